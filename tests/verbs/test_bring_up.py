"""Test bringing up queue pairs from exchanged endpoints, with every type, option and refusal."""

from __future__ import annotations

import dataclasses
import errno
import select
import sys
from typing import TYPE_CHECKING

import pytest

from aiordma import verbs
from aiordma.errors import QPTransitionError, VerbsError
from aiordma.verbs import (
    GID,
    MTU,
    AddressVector,
    Endpoint,
    EventType,
    GIDType,
    PortState,
    QPState,
    QPType,
)
from aiordma.verbs._device.route_lookup import source_entry
from tests.processes import run

if TYPE_CHECKING:
    from conftest import ConnectedPair, Pair


# --- what is negotiated ------------------------------------------------------------------------


def test_connect_negotiates_the_smaller_mtu_and_read_depths(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue
) -> None:
    with pd.create_qp(cq) as qp, pd.create_qp(cq) as peer:
        mine = qp.endpoint(max_rd_atomic=4, max_dest_rd_atomic=2)
        theirs = dataclasses.replace(
            peer.endpoint(max_rd_atomic=1, max_dest_rd_atomic=8), mtu=MTU.MTU_512
        )
        qp.connect(mine, theirs)
        there = qp.query()
        assert there.path_mtu is MTU.MTU_512
        assert there.max_rd_atomic == 4
        assert there.max_dest_rd_atomic == 1
        assert there.ah_attr.dgid == GID(theirs.gid)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(QPType.RC, QPType.UC), (QPType.UC, QPType.RC), (QPType.RC, QPType.UD)]
)
def test_connect_rejects_a_peer_with_a_different_qp_type(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue, ours: QPType, theirs: QPType
) -> None:
    with pd.create_qp(cq, qp_type=ours) as qp, pd.create_qp(cq, qp_type=theirs) as peer:
        message = f"the peer's queue pair must be of type {ours.name}, not {theirs.name}"
        with pytest.raises(ValueError, match=message):
            qp.connect(qp.endpoint(), peer.endpoint())
        assert qp.state is QPState.RESET


def test_source_entry_matches_the_endpoint_roce_version(
    qp: verbs.QueuePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = qp.context.choose_gid()
    older = chosen._replace(gid_index=chosen.gid_index + 7, gid_type=GIDType.ROCE_V1)
    monkeypatch.setattr(qp.context, "query_gid_table", lambda: [older, chosen])
    assert source_entry(qp.context, qp.endpoint()) is chosen
    endpoint = Endpoint.unpack(qp.endpoint(older).pack())
    assert endpoint.is_roce_v1
    assert source_entry(qp.context, endpoint) is older


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [PortState.DOWN, PortState.INIT])
def test_endpoint_and_connect_raise_enetdown_when_port_is_not_active(
    pd: verbs.ProtectionDomain,
    cq: verbs.CompletionQueue,
    monkeypatch: pytest.MonkeyPatch,
    state: PortState,
) -> None:
    with pd.create_qp(cq) as qp, pd.create_qp(cq, qp_type=QPType.UD) as datagrams:
        mine, other = qp.endpoint(), datagrams.endpoint()
        port = qp.context.ask_port(1)
        port.state = state
        monkeypatch.setattr(qp.context, "ask_port", lambda port_num: port)
        message = f"port 1 of {qp.context.name} is {state.name}, not ACTIVE"
        for call in (
            qp.endpoint,
            lambda: qp.connect(mine, mine),
            lambda: datagrams.start(other),
            lambda: datagrams.destination(other, other),
        ):
            with pytest.raises(VerbsError, match=message) as caught:
                call()
            assert caught.value.errno == errno.ENETDOWN
        assert qp.state is datagrams.state is QPState.RESET


def invalid_vectors(context: verbs.Context) -> list[tuple[AddressVector, str]]:
    """Return invalid address vectors with the expected error text of each."""
    best = context.choose_gid()
    other = GID.from_ip("2001:db8::1" if best.gid.ip.version == 4 else "192.0.2.1")
    vectors = [(AddressVector(dgid=best.gid, sgid_index=200), f"GID index 200 of port 1 of "
             f"{context.name}; this GID is empty; use GID index ")]  # fmt: skip
    vectors += [
        (
            AddressVector(dgid=other, sgid_index=best.gid_index),
            f"to {other} from GID index {best.gid_index} ({best.gid}, ",
        )
    ]
    return vectors


def test_unreachable_destination_error_describes_the_route(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue
) -> None:
    for vector, text in invalid_vectors(pd.context):
        with pd.create_qp(cq) as qp:
            qp.to_init()
            with pytest.raises(
                VerbsError, match=r"\(RC\) from INIT to RTR; the route goes to "
            ) as caught:
                qp.to_rtr(vector, dest_qp_num=qp.qp_num)
            assert caught.value.verb == "ibv_modify_qp"
            assert text in str(caught.value)
            assert qp.query().qp_state is QPState.INIT
        with pytest.raises(VerbsError, match="an address handle to ") as caught:
            pd.create_ah(vector)
        assert caught.value.verb == "ibv_create_ah"
        assert text in str(caught.value)


WITHOUT_ROUTES = """
from aiordma import VerbsError, verbs

with (
    verbs.find_device("embedded0").open() as context,
    context.alloc_pd() as pd,
    context.create_cq(1) as cq,
    pd.create_qp(cq) as qp,
):
    qp.to_init()
    vector = verbs.AddressVector(dgid=verbs.GID.from_ip("192.0.2.1"), sgid_index=0)
    for call in (lambda: qp.to_rtr(vector, dest_qp_num=1), lambda: pd.create_ah(vector)):
        try:
            call()
        except VerbsError as error:
            print(error.errno, error)
    print(qp.query().qp_state.name)
"""


@pytest.mark.any_device
def test_missing_route_raises_enetunreach() -> None:
    """The program runs in a network namespace without a route to any other host."""
    done = run("unshare", "-rn", sys.executable, "-c", WITHOUT_ROUTES, check=True)
    *errors, state = done.stdout.splitlines()
    assert state == "INIT"
    for error, verb in zip(errors, ("ibv_modify_qp", "ibv_create_ah"), strict=True):
        assert error.startswith(f"{errno.ENETUNREACH} ")
        for part in (
            verb,
            "to ::ffff:192.0.2.1 from GID index 0 (",
            "check its address and the routes",
        ):
            assert part in error


def test_connect_stops_in_rtr_when_transition_to_rts_fails(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue
) -> None:
    with pd.create_qp(cq) as qp:
        mine = qp.endpoint()
        with pytest.raises(VerbsError, match="from RTR to RTS") as caught:
            qp.connect(mine, mine, max_rd_atomic=255)
        assert (caught.value.verb, caught.value.errno) == ("ibv_modify_qp", errno.EINVAL)
        assert qp.state is qp.query().qp_state is QPState.RTR


def test_connect_rejects_invalid_options_and_connected_queue_pairs(qp: verbs.QueuePair) -> None:
    mine = qp.endpoint()
    for name, most in (("retry_cnt", 7), ("rnr_retry", 7), ("hop_limit", 255), ("sl", 15)):
        with pytest.raises(ValueError, match=f"{name} must be an int from 0 to {most}, not 256"):
            qp.connect(mine, mine, **{name: 256})  # type: ignore[arg-type]
    for call, name in ((qp.connect, "timeout"), (qp.destination, "sl")):
        wrong = rf"{call.__name__}\(\) got an unexpected keyword argument '{name}s': .*\b{name}\b"
        with pytest.raises(TypeError, match=wrong):
            call(mine, mine, **{f"{name}s": 1})  # type: ignore[arg-type]
    qp.connect(mine, mine)
    with pytest.raises(QPTransitionError, match="RTS -> INIT is not a transition"):
        qp.connect(mine, mine)
    assert qp.state is QPState.RTS


# --- stopping and going on ---------------------------------------------------------------------


def test_work_posted_in_sqd_waits_until_the_queue_pair_resumes(
    context: verbs.Context, pair: Pair, deviations: frozenset[str]
) -> None:
    """IBTA volume 1, clause 10.3.1.5 requires this."""
    one, two = pair
    one.mr.buf[:8] = b"12345678"
    one.qp.to_sqd(notify=True)
    events: list[verbs.AsyncEvent] = []
    while not any(event.type is EventType.SQ_DRAINED for event in events):
        assert select.select([context.async_fd], [], [], 30)[0]
        events += context.async_events()
    there = one.qp.query()
    assert (there.qp_state, there.sq_draining) == (QPState.SQD, False)
    with one.qp.batch() as batch:
        batch.write([one.sge()], two.mr.addr, two.mr.rkey, wr_id=1)
    assert one.cq.poll() == []
    one.qp.resume()
    if "what waited in SQD begins with the next post" in deviations:
        with one.qp.batch() as batch:
            batch.write([one.sge()], two.mr.addr, two.mr.rkey, wr_id=2)
        assert [wc.wr_id for wc in one.completions(2)] == [1, 2]
    else:
        assert one.completion().wr_id == 1
    assert bytes(two.mr.buf[:8]) == b"12345678"
    assert one.qp.query().qp_state is QPState.RTS


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC], ids=lambda qp_type: qp_type.name)
def test_queue_pair_reconnects_after_reset_with_new_endpoints(
    connected_pair: ConnectedPair, qp_type: QPType
) -> None:
    one, two = connected_pair(qp_type=qp_type)
    for round in range(3):
        for end in (one, two):
            end.qp.to_error()
            end.qp.to_reset()
        first, second = one.qp.endpoint(), two.qp.endpoint()
        assert first.qp_type is qp_type
        assert (first.max_rd_atomic == first.max_dest_rd_atomic == 0) == (qp_type is QPType.UC)
        one.qp.connect(first, second)
        two.qp.connect(second, first)
        two.post_recv(round, 8)
        with one.qp.batch() as batch:
            batch.send([one.sge()], wr_id=round)
        assert one.completion().wr_id == two.completion().wr_id == round
