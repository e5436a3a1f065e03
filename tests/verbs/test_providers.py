"""Test vendor-specific queue pairs: the refusal on other devices, and the arguments of library
calls.

None of the vendors' devices is available here, so calls of the embedded device replace those of the
vendors' libraries. The tests compare the arguments, and check that the work posted then really
arrives.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aiordma import verbs
from aiordma._native import ProviderCalls, embedded, ffi
from aiordma.errors import PostError, UnsupportedError, VerbsError
from aiordma.verbs import QPCapabilities, QPState, QPType, SendFlags, SendOps, WROpcode
from aiordma.verbs.experimental import efa, mlx5

F: Any = ffi  # untyped, because the stub omits these names
QKEY = 0x11111111
DC_KEY = 0xFEDCBA9876543210


# ---- on devices of others -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "make"),
    [
        ("libefa.so.1", lambda pd, cq, srq: efa.query_device(pd.context)),
        ("libefa.so.1", lambda pd, cq, srq: efa.create_srd_qp(pd, cq)),
        ("libmlx5.so.1", lambda pd, cq, srq: mlx5.create_dc_initiator(pd, cq)),
        ("libmlx5.so.1", lambda pd, cq, srq: mlx5.create_dc_target(pd, cq, srq, DC_KEY)),
    ],
)
def test_provider_calls_raise_unsupported_error_on_unsupported_devices(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue, library: str, make: Callable[..., object]
) -> None:
    """On a kernel device, the vendor's library itself is asked, and refuses."""
    with pd.create_srq(4) as srq, pytest.raises(UnsupportedError, match=library) as caught:
        make(pd, cq, srq)
    assert caught.value.device == pd.context.name
    assert caught.value.errno == (
        errno.ENOSYS if pd.context.library.name == "embedded" else errno.EOPNOTSUPP
    )


# ---- with stand-ins -----------------------------------------------------------------------------


class StandIn:
    """The vendors' calls, implemented by the embedded device. ``asked`` records the arguments."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.addressed: list[tuple[int, int]] = []
        self.table = F.new("struct aiordma_provider_calls *")
        self.extended = F.new("struct mlx5dv_qp_ex *")
        self.kept: list[Any] = []
        for name in dict(F.typeof(self.table).item.fields):
            self.set(self.table, name, getattr(self, name))
        self.set(self.extended, "wr_set_dc_addr", self.wr_set_dc_addr)

    def set(self, struct: Any, name: str, function: Callable[..., object]) -> None:
        callback = F.callback(dict(F.typeof(struct).item.fields)[name].type, function)
        self.kept.append(callback)
        setattr(struct, name, callback)

    def efadv_query_device(self, context: Any, attr: Any, size: int) -> int:
        assert size == F.sizeof("struct efadv_device_attr")
        attr.max_sq_wr, attr.max_rq_wr, attr.inline_buf_size = 1, 2, 3
        attr.device_caps, attr.max_rdma_size = 0b11, 1 << 30
        return 0

    def create(self, context: Any, attr: Any, qp_type: QPType) -> Any:
        self.asked |= {"type": attr.qp_type, "ops": attr.send_ops_flags, "mask": attr.comp_mask}
        attr.qp_type = qp_type
        return embedded().calls.ibv_create_qp_ex(context, attr)

    def efadv_create_qp_ex(self, context: Any, attr: Any, own: Any, size: int) -> Any:
        assert size == F.sizeof("struct efadv_qp_init_attr")
        self.asked["driver type"] = own.driver_qp_type
        return self.create(context, attr, QPType.UD)

    def mlx5dv_create_qp(self, context: Any, attr: Any, own: Any) -> Any:
        self.asked |= {"own mask": own.comp_mask, "dc type": own.dc_init_attr.dc_type}
        self.asked["key"] = own.dc_init_attr.dct_access_key
        return self.create(context, attr, QPType.UD)

    def mlx5dv_qp_ex_from_ibv_qp_ex(self, qp: Any) -> Any:
        self.qp = qp
        return self.extended

    def wr_set_dc_addr(self, dc: Any, ah: Any, number: int, key: int) -> None:
        self.addressed.append((number, key))
        self.qp.wr_set_ud_addr(self.qp, ah, number, QKEY)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(embedded(), "_providers", ProviderCalls(stand_in.table))
    return stand_in


@pytest.fixture
def here() -> Iterator[tuple[verbs.ProtectionDomain, verbs.CompletionQueue]]:
    """Provide the embedded device, because `StandIn` passes its calls to this device."""
    with (
        verbs.open_device("embedded0") as context,
        context.alloc_pd() as pd,
        context.create_cq(64) as cq,
    ):
        yield pd, cq


Here = tuple[verbs.ProtectionDomain, verbs.CompletionQueue]


def ah_to_self(pd: verbs.ProtectionDomain) -> verbs.AddressHandle:
    gid = pd.context.choose_gid()
    return pd.create_ah(verbs.AddressVector(dgid=gid.gid, sgid_index=gid.gid_index))


def received(cq: verbs.CompletionQueue) -> dict[int, verbs.WorkCompletion]:
    done: dict[int, verbs.WorkCompletion] = {}
    while len(done) < 2:
        done |= {wc.wr_id: wc for wc in cq.poll()}
    return done


def test_efa_query_device_returns_provider_attributes(here: Here, stand_in: StandIn) -> None:
    assert efa.query_device(here[0].context) == efa.EFADeviceAttributes(
        max_sq_wr=1,
        max_rq_wr=2,
        max_sq_sge=0,
        max_rq_sge=0,
        inline_buf_size=3,
        device_caps=efa.EFACapability.RDMA_READ | efa.EFACapability.RNR_RETRY,
        max_rdma_size=1 << 30,
    )


def test_srd_queue_pair_sends_datagrams(here: Here, stand_in: StandIn) -> None:
    pd, cq = here
    with efa.create_srd_qp(pd, cq, send_ops=SendOps.SEND_WITH_IMM) as qp, pd.reg_mr(128) as mr:
        assert stand_in.asked == {
            "type": 0xFF,
            "ops": SendOps.SEND_WITH_IMM,
            "mask": 0b1000001,
            "driver type": 0,
        }
        with pytest.raises(VerbsError, match="PKEY_INDEX"):
            qp.start(qkey=QKEY, pkey_index=99)
        qp.start(qkey=QKEY)
        assert qp.query().qp_state is QPState.RTS
        qp.post_recv([verbs.ReceiveWorkRequest(1, [mr.sge(0, 64)])])
        mr.buf[64:69] = b"hello"
        flags = SendFlags.SIGNALED
        wr = verbs.SendWorkRequest(2, WROpcode.SEND_WITH_IMM, [mr.sge(64, 5)], flags, imm_data=7)
        with ah_to_self(pd) as ah:
            qp.post_send(wr, ah, qp.qp_num, QKEY)
            done = received(cq)
        assert done[1].imm_data == 7
        assert bytes(mr.buf[40:45]) == b"hello"


def test_provider_receives_the_type_and_key_of_dc_queue_pairs(
    here: Here, stand_in: StandIn
) -> None:
    pd, cq = here
    with mlx5.create_dc_initiator(pd, cq, QPCapabilities()) as qp, pd.reg_mr(128) as mr:
        asked = stand_in.asked
        assert (asked["type"], asked["own mask"], asked["dc type"]) == (0xFF, 2, 2)
        efa.SRDQueuePair.start(qp, qkey=QKEY)  # type: ignore[arg-type]  # the stand-in's is UD
        qp.post_recv([verbs.ReceiveWorkRequest(1, [mr.sge(0, 64)])])
        wr = verbs.SendWorkRequest(2, WROpcode.SEND, [mr.sge(64, 5)], SendFlags.SIGNALED)
        with ah_to_self(pd) as ah:
            qp.post_send(wr, ah, qp.qp_num, DC_KEY)
            assert received(cq)[1].byte_len == 45
        assert stand_in.addressed == [(qp.qp_num, DC_KEY)]
    with pd.create_srq(4) as srq, mlx5.create_dc_target(pd, cq, srq, DC_KEY):
        assert (asked["type"], asked["dc type"], asked["key"]) == (0xFF, 1, DC_KEY)


@pytest.mark.parametrize("make", [efa.create_srd_qp, mlx5.create_dc_initiator])
def test_provider_queue_pairs_reject_invalid_requests(
    here: Here, stand_in: StandIn, make: Callable[..., efa.SRDQueuePair | mlx5.DCInitiator]
) -> None:
    pd, cq = here
    with make(pd, cq) as qp, ah_to_self(pd) as ah:
        with pytest.raises(VerbsError, match=type(qp).__name__):
            qp.modify(qp_state=QPState.RTS)
        wr = verbs.SendWorkRequest(1, WROpcode.ATOMIC_FETCH_AND_ADD)
        with pytest.raises(UnsupportedError, match="ATOMIC_FETCH_AND_ADD on a"):
            qp.post_send(wr, ah, qp.qp_num, QKEY)
        wr.opcode = WROpcode.SEND
        with pytest.raises(ValueError, match="does not fit"):
            qp.post_send(wr, ah, 1 << 40, QKEY)
        with pytest.raises(PostError):  # not allowed in RESET
            qp.post_send(wr, ah, qp.qp_num, QKEY)
        with pytest.raises(PostError):
            qp.post_recv([verbs.ReceiveWorkRequest(1)])
    with pytest.raises(ValueError, match="a queue pair with"):
        make(pd, cq, capabilities=QPCapabilities(max_send_wr=-1))
