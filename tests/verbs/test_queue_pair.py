"""Test queue pairs: creating them, their states, and bringing them up."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from aiordma import verbs
from aiordma.errors import BufferStateError, QPTransitionError, VerbsError
from aiordma.verbs import MTU, AccessFlags, AddressVector, QPState, QPType
from aiordma.verbs._qp.qp_attributes import QPChanges

if TYPE_CHECKING:
    from conftest import ConnectedPair, Pair


def test_connect_brings_both_sides_to_rts_with_default_attributes(
    pair: Pair, context: verbs.Context
) -> None:
    one, two = pair
    for qp, peer in ((one.qp, two.qp), (two.qp, one.qp)):
        assert qp.state is QPState.RTS
        there = qp.query()
        assert there.qp_state is QPState.RTS
        assert there.dest_qp_num == peer.qp_num
        assert there.path_mtu == context.query_port().active_mtu
        assert there.ah_attr.dgid == context.choose_gid().gid
        assert there.ah_attr.sgid_index == context.choose_gid().gid_index
        assert there.qp_access_flags & AccessFlags.REMOTE_READ
        assert there.timeout == pytest.approx(0.067, rel=0.01)
        assert there.min_rnr_timer == 0.00064
        assert there.retry_cnt == there.rnr_retry == 7
        assert there.max_rd_atomic >= 1
        assert there.max_dest_rd_atomic >= 1
    assert one.qp.query().sq_psn == two.qp.query().rq_psn


def test_connect_applies_every_option(connected_pair: ConnectedPair) -> None:
    one, _ = connected_pair(
        access=AccessFlags.REMOTE_WRITE,
        timeout=math.inf,
        retry_cnt=3,
        rnr_retry=2,
        min_rnr_timer=0.01,
        max_rd_atomic=2,
        max_dest_rd_atomic=3,
        hop_limit=9,
        traffic_class=0x20,
    )
    there = one.qp.query()
    assert there.timeout == math.inf
    assert (there.retry_cnt, there.rnr_retry) == (3, 2)
    assert there.min_rnr_timer == 0.01024
    assert there.max_rd_atomic == 2
    assert there.max_dest_rd_atomic >= 3  # a device may round up (rxe: to a power of two)
    assert there.ah_attr.hop_limit > 1  # the kernel uses the hop limit of its route
    assert there.ah_attr.traffic_class == 0x20
    assert not there.qp_access_flags & AccessFlags.REMOTE_READ


def test_endpoint_matches_the_queue_pair_and_port(qp: verbs.QueuePair) -> None:
    first, second = qp.endpoint(), qp.endpoint()
    assert first.qp_num == qp.qp_num
    assert first.gid == qp.context.choose_gid().gid.raw
    assert first.mtu == qp.context.query_port().active_mtu
    assert first.is_global
    assert first.max_rd_atomic > 0
    assert qp.endpoint(psn=5).psn == 5
    # PSNs are random, so four of them are equal with a probability of 2^-72.
    assert len({first.psn, second.psn, qp.endpoint().psn, qp.endpoint().psn}) > 1
    for gid in qp.context.query_gid_table():
        assert qp.endpoint(gid).gid == gid.gid.raw
    assert verbs.Endpoint.unpack(first.pack()) == first


def test_connect_rejects_a_foreign_local_endpoint(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue
) -> None:
    with pd.create_qp(cq) as qp, pd.create_qp(cq) as other:
        mine, theirs = qp.endpoint(), other.endpoint()
        with pytest.raises(ValueError, match="local must be the endpoint of"):
            qp.connect(theirs, mine)
        elsewhere = verbs.Endpoint(
            gid=verbs.GID.from_ip("192.0.2.9").raw, qp_num=qp.qp_num, psn=1, lid=0, mtu=5
        )
        with pytest.raises(ValueError, match=r"no longer has the GID ::ffff:192\.0\.2\.9"):
            qp.connect(elsewhere, theirs)
        assert qp.state is QPState.RESET


def test_illegal_transition_raises_transition_error(qp: verbs.QueuePair) -> None:
    with pytest.raises(QPTransitionError, match=r"RESET -> RTS is not a transition; .* INIT"):
        qp.modify(qp_state=QPState.RTS)
    with pytest.raises(QPTransitionError, match="RESET -> ERR is not"):
        qp.to_error()
    qp.to_reset()


@pytest.mark.parametrize("qp_type", ["AH", "RC", "UC"])
def test_address_vector_with_lid_but_no_grh_is_rejected(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue, qp_type: str
) -> None:
    """RoCE sends nothing without a GRH. The embedded device accepts only its own LID."""
    vector = AddressVector(dlid=pd.context.query_port().lid + 1)
    refused = pytest.raises(VerbsError, match=rf"Errno 22.* to LID {vector.dlid} .* RoCE requires")
    if qp_type == "AH":
        with refused:
            pd.create_ah(vector)
        return
    with pd.create_qp(cq, qp_type=QPType[qp_type]) as qp:
        qp.to_init()
        with refused:
            qp.to_rtr(vector, dest_qp_num=5, rq_psn=7, path_mtu=MTU.MTU_512)


def test_state_and_attributes_are_updated_after_each_transition(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue
) -> None:
    gid = pd.context.choose_gid()
    lid = pd.context.query_port().lid
    with pd.create_qp(cq) as qp, pd.create_qp(cq) as peer:
        qp.to_init(access=AccessFlags.REMOTE_READ)
        assert qp.query().qp_state is qp.state is QPState.INIT
        qp.modify(qp_access_flags=AccessFlags.NONE)  # INIT -> INIT without naming the state
        vector = AddressVector(dgid=gid.gid, sgid_index=gid.gid_index, dlid=lid)
        qp.to_rtr(vector, dest_qp_num=peer.qp_num, rq_psn=7, path_mtu=MTU.MTU_512)
        assert qp.query().path_mtu is MTU.MTU_512
        assert qp.query().rq_psn == 7
        qp.to_rts(sq_psn=9, timeout=0.5)
        assert qp.query().sq_psn == 9
        qp.modify(min_rnr_timer=0.1)
        assert qp.query().min_rnr_timer == pytest.approx(0.12288)
        qp.to_error()
        assert qp.state is qp.query().qp_state is QPState.ERR
        qp.to_reset()
        assert qp.state is qp.query().qp_state is QPState.RESET
        qp.to_init()


def test_failed_modify_error_includes_the_transition(qp: verbs.QueuePair) -> None:
    with pytest.raises(VerbsError, match=r"\(RC\) from RESET to INIT") as caught:
        qp.to_init(port_num=77)
    assert caught.value.verb == "ibv_modify_qp"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (QPChanges(timeout=-1), "ack timeout"),
        (QPChanges(min_rnr_timer=5), "RNR timer"),
        (QPChanges(retry_cnt=256), "retry_cnt"),
        (QPChanges(sq_psn=-1), "sq_psn"),
    ],
)
def test_modify_rejects_values_out_of_range(
    qp: verbs.QueuePair, changes: QPChanges, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        qp.modify(**changes)


def test_modify_rejects_unknown_attributes(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue
) -> None:
    changes: Any = {"speed": 1}
    with (
        pd.create_qp(cq) as qp,
        pytest.raises(TypeError, match="unexpected keyword argument 'speed'"),
    ):
        qp.modify(**changes)


def test_closed_queue_pair_raises_buffer_state_error(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue
) -> None:
    qp = pd.create_qp(cq)
    number = qp.qp_num
    qp.close()
    message = f"QueuePair {number:#x} is closed"
    for use in (
        qp.query,
        qp.to_init,
        lambda: qp.state,
        lambda: qp.post_send_one(1, 2, 2, 0, 0, 0),
        lambda: qp.post_recv_one(1, 0, 0, 0),
        lambda: qp.post_send([]),
        lambda: qp.post_recv([]),
    ):
        with pytest.raises(BufferStateError, match=message):
            use()


def test_queue_pairs_can_be_created_concurrently_in_threads(
    context: verbs.Context, pd: verbs.ProtectionDomain
) -> None:
    """The threads share one context and one protection domain."""

    def work(_: int) -> None:
        for _ in range(10):
            with context.create_cq(16) as cq, pd.create_qp(cq) as qp, pd.reg_mr(4096):
                qp.to_init()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
