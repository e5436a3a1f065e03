"""Test memory windows of both types, and invalidation by this side and by the peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from aiordma import verbs
from aiordma.errors import BufferStateError, PostError, QueueFullError, VerbsError
from aiordma.verbs import (
    AccessFlags,
    MemoryWindow,
    MWType,
    QPCapabilities,
    SendFlags,
    SendWorkRequest,
    WCFlags,
    WCOpcode,
    WCStatus,
    WROpcode,
    inc_rkey,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import ConnectedPair, End

SIGNALED = SendFlags.SIGNALED
READ, WRITE, ATOMIC = (
    AccessFlags.REMOTE_READ, AccessFlags.REMOTE_WRITE, AccessFlags.REMOTE_ATOMIC,
)  # fmt: skip
BINDABLE = AccessFlags.LOCAL_WRITE | AccessFlags.MW_BIND


@dataclass
class Scene:
    """A region of ``owner`` that ``peer`` can access only through ``window``."""

    owner: End
    peer: End
    region: verbs.MemoryRegion
    window: MemoryWindow

    def bind(
        self, access: AccessFlags, offset: int = 0, length: int = 4096, wr_id: int = 100
    ) -> int:
        key = self.window.bind(
            self.owner.qp, self.region, access, self.region.addr + offset, length, wr_id=wr_id
        )
        done = self.owner.completion()
        assert (done.wr_id, done.status, done.opcode) == (
            wr_id, WCStatus.SUCCESS, WCOpcode.BIND_MW,
        )  # fmt: skip
        return key

    def access(
        self, opcode: WROpcode, rkey: int, offset: int = 0, length: int = 8, base: int | None = None
    ) -> WCStatus:
        """Post one request from the peer and return its completion status."""
        start = self.region.addr if base is None else base
        self.peer.qp.post_send_one(
            7, opcode, SIGNALED, self.peer.mr.addr, length, self.peer.mr.lkey, start + offset, rkey
        )
        return self.peer.completion().status


@pytest.fixture(params=list(MWType), ids=lambda mw_type: mw_type.name)
def mw_type(request: pytest.FixtureRequest) -> MWType:
    assert isinstance(request.param, MWType)
    return request.param


TYPE_2 = pytest.mark.parametrize("mw_type", [MWType.TYPE_2])
"""For tests of features that only type 2 windows have."""


@pytest.fixture
def scene(pd: verbs.ProtectionDomain, pair: tuple[End, End], mw_type: MWType) -> Iterator[Scene]:
    owner, peer = pair
    with pd.reg_mr(8192, BINDABLE) as region, pd.alloc_mw(mw_type) as window:
        yield Scene(owner, peer, region, window)


# --- the object --------------------------------------------------------------------------------


def test_window_rkey_is_unavailable_after_close(
    pd: verbs.ProtectionDomain, mw_type: MWType
) -> None:
    window = pd.alloc_mw(mw_type)
    assert (window.pd, window.context, window.mw_type) == (pd, pd.context, mw_type)
    assert window.rkey
    assert f"type {int(mw_type)}" in repr(window)
    assert verbs.live()["MemoryWindow"] == 1
    window.close()
    with pytest.raises(BufferStateError, match="MemoryWindow"):
        window.rkey  # noqa: B018


def test_inc_rkey_wraps_within_the_lowest_byte() -> None:
    assert inc_rkey(0x12345600) == 0x12345601
    assert inc_rkey(0x123456FF) == 0x12345600


def test_closing_a_pd_closes_windows_before_their_regions(
    context: verbs.Context, connected_pair: ConnectedPair
) -> None:
    """The window was created first, but must be closed before the region that it is bound to."""
    with context.alloc_pd() as pd, context.create_cq(8) as cq:
        window = pd.alloc_mw(MWType.TYPE_2)
        region = pd.reg_mr(4096, BINDABLE)
        qp = pd.create_qp(cq)
        mine = qp.endpoint()
        qp.connect(mine, mine)
        window.bind(qp, region, READ)
        while not (found := cq.poll()):
            pass
        assert found[0].ok
    assert window.closed
    assert region.closed


def beyond(deviations: frozenset[str]) -> WCStatus:
    """Return the status of an access that is outside the window but inside the region."""
    wrong = "a window reaches as far as its region"
    return WCStatus.SUCCESS if wrong in deviations else WCStatus.REM_ACCESS_ERR


# --- access ------------------------------------------------------------------------------------


def test_window_allows_read_write_and_atomic(scene: Scene) -> None:
    key = scene.bind(READ | WRITE | ATOMIC, 1024, 64)
    assert key == scene.window.rkey
    scene.peer.mr.buf[:8] = b"written!"
    assert scene.access(WROpcode.RDMA_WRITE, key, 1024) is WCStatus.SUCCESS
    assert bytes(scene.region.buf[1024:1032]) == b"written!"
    scene.region.buf[1032:1040] = b"to read."
    assert scene.access(WROpcode.RDMA_READ, key, 1032) is WCStatus.SUCCESS
    assert bytes(scene.peer.mr.buf[:8]) == b"to read."
    scene.region.buf[1080:1088] = (41).to_bytes(8, "little")
    with scene.peer.qp.batch() as batch:
        batch.fetch_and_add(scene.peer.mr.sge(0, 8), scene.region.addr + 1080, key, 1)
    assert scene.peer.completion().ok
    assert bytes(scene.region.buf[1080:1088]) == (42).to_bytes(8, "little")


def test_bind_covers_the_whole_region_by_default(scene: Scene) -> None:
    key = scene.window.bind(scene.owner.qp, scene.region, WRITE)
    assert scene.owner.completion().ok
    assert scene.access(WROpcode.RDMA_WRITE, key, 0, 8192) is WCStatus.SUCCESS


def test_zero_based_window_is_addressed_from_zero(scene: Scene, deviations: frozenset[str]) -> None:
    if scene.window.mw_type is MWType.TYPE_1 and "no zero based windows of type 1" in deviations:
        with pytest.raises(VerbsError, match="ibv_bind_mw"):
            scene.window.bind(scene.owner.qp, scene.region, WRITE | AccessFlags.ZERO_BASED)
        return
    key = scene.bind(WRITE | AccessFlags.ZERO_BASED, 1024, 64)
    scene.peer.mr.buf[:8] = b"from 56!"
    assert scene.access(WROpcode.RDMA_WRITE, key, 56, base=0) is WCStatus.SUCCESS
    assert bytes(scene.region.buf[1080:1088]) == b"from 56!"
    assert scene.access(WROpcode.RDMA_WRITE, key, 57, base=0) is beyond(deviations)


@pytest.mark.parametrize("offset", [1023, 1081])
def test_access_beyond_the_window_fails(
    scene: Scene, offset: int, deviations: frozenset[str]
) -> None:
    key = scene.bind(WRITE, 1024, 64)
    assert scene.access(WROpcode.RDMA_WRITE, key, offset) is beyond(deviations)


@pytest.mark.parametrize(
    ("access", "opcode"),
    [
        (READ | ATOMIC, WROpcode.RDMA_WRITE),
        (WRITE | ATOMIC, WROpcode.RDMA_READ),
        (READ | WRITE, WROpcode.ATOMIC_FETCH_AND_ADD),
    ],
)
def test_access_not_granted_by_the_window_fails(
    scene: Scene, access: AccessFlags, opcode: WROpcode
) -> None:
    assert scene.access(opcode, scene.bind(access)) is WCStatus.REM_ACCESS_ERR


def test_never_bound_window_rejects_access_and_unbind(scene: Scene) -> None:
    with pytest.raises(ValueError, match="has not been bound"):
        scene.window.unbind(scene.owner.qp)
    assert scene.access(WROpcode.RDMA_WRITE, scene.window.rkey) is WCStatus.REM_ACCESS_ERR


def test_only_type_2_windows_are_limited_to_their_queue_pair(
    scene: Scene, connected_pair: ConnectedPair
) -> None:
    """A type 1 window is valid in its protection domain, a type 2 window only on the queue pair of
    the bind.
    """
    key = scene.bind(WRITE)
    _, other = connected_pair()
    other.qp.post_send_one(
        9, WROpcode.RDMA_WRITE, SIGNALED, other.mr.addr, 8, other.mr.lkey, scene.region.addr, key
    )
    own = scene.window.mw_type is MWType.TYPE_2
    assert other.completion().status is (WCStatus.REM_ACCESS_ERR if own else WCStatus.SUCCESS)
    assert scene.access(WROpcode.RDMA_WRITE, key) is WCStatus.SUCCESS


# --- the end of a bind -------------------------------------------------------------------------


def test_window_key_is_invalid_after_unbind(scene: Scene) -> None:
    key = scene.bind(WRITE)
    assert scene.access(WROpcode.RDMA_WRITE, key) is WCStatus.SUCCESS
    scene.window.unbind(scene.owner.qp, wr_id=5)
    done = scene.owner.completion()
    assert (done.wr_id, done.status) == (5, WCStatus.SUCCESS)
    one = scene.window.mw_type is MWType.TYPE_1
    assert done.opcode is (WCOpcode.BIND_MW if one else WCOpcode.LOCAL_INV)
    scene.region.close()
    assert scene.access(WROpcode.RDMA_WRITE, key) is WCStatus.REM_ACCESS_ERR


def test_rebound_window_has_a_new_key_and_range(scene: Scene) -> None:
    first = scene.bind(WRITE, 0, 64)
    if scene.window.mw_type is MWType.TYPE_2:
        scene.window.unbind(scene.owner.qp)
        assert scene.owner.completion().ok
    second = scene.bind(WRITE, 64, 64)
    assert second == scene.window.rkey != first
    assert scene.access(WROpcode.RDMA_WRITE, second, 64) is WCStatus.SUCCESS
    assert scene.access(WROpcode.RDMA_WRITE, first) is WCStatus.REM_ACCESS_ERR


def test_region_cannot_be_closed_while_a_window_is_bound(scene: Scene) -> None:
    key = scene.bind(WRITE)
    with pytest.raises(VerbsError, match="ibv_dereg_mr"):
        scene.region.close()
    assert not scene.region.closed
    assert scene.access(WROpcode.RDMA_WRITE, key) is WCStatus.SUCCESS
    scene.window.close()
    scene.region.close()
    assert scene.access(WROpcode.RDMA_WRITE, key) is WCStatus.REM_ACCESS_ERR


@TYPE_2
def test_binding_a_bound_type_2_window_fails(scene: Scene) -> None:
    """IBTA o10-37.2.30 allows binding a type 2 window only while it is not bound."""
    scene.bind(READ)
    scene.window.bind(scene.owner.qp, scene.region, READ)
    failed = scene.owner.completion()
    assert failed.status is WCStatus.MW_BIND_ERR
    assert "MW_BIND_ERR" in str(failed.error())


@TYPE_2
def test_bind_accepts_an_rkey_differing_only_in_the_lowest_byte(scene: Scene) -> None:
    chosen = scene.window.rkey ^ 0x55
    assert (
        scene.window.bind(scene.owner.qp, scene.region, WRITE, rkey=chosen)
        == scene.window.rkey
        == chosen
    )
    assert scene.owner.completion().ok
    assert scene.access(WROpcode.RDMA_WRITE, chosen) is WCStatus.SUCCESS
    with pytest.raises(ValueError, match="lowest 8 bits"):
        scene.window.bind(scene.owner.qp, scene.region, WRITE, rkey=chosen ^ 0x100)


@TYPE_2
def test_send_with_invalidate_revokes_the_window_key(
    scene: Scene, deviations: frozenset[str]
) -> None:
    key = scene.bind(WRITE)
    scene.owner.qp.post_recv_one(1, scene.owner.mr.addr, 64, scene.owner.mr.lkey)
    scene.peer.mr.buf[:4] = b"done"
    sge = verbs.ScatterGatherElement(scene.peer.mr.addr, 4, scene.peer.mr.lkey)
    scene.peer.qp.post_send(
        [SendWorkRequest(2, WROpcode.SEND_WITH_INV, [sge], invalidate_rkey=key)]
    )
    received = scene.owner.completion()
    assert (received.wr_id, received.opcode) == (1, WCOpcode.RECV)
    if "WITH_INV is told as IP_CSUM_OK" in deviations:
        assert received.wc_flags & WCFlags.IP_CSUM_OK
        assert not received.wc_flags & WCFlags.WITH_INV
    else:
        assert received.wc_flags & WCFlags.WITH_INV
        assert received.invalidated_rkey == key
    assert received.imm_data is None
    assert bytes(scene.owner.mr.buf[:4]) == b"done"
    assert scene.peer.completion().ok
    scene.region.close()  # no window is bound to the region any more
    assert scene.access(WROpcode.RDMA_WRITE, key) is WCStatus.REM_ACCESS_ERR


# --- order and batches -------------------------------------------------------------------------


def test_bind_preserves_the_key_when_the_send_queue_is_full(
    pd: verbs.ProtectionDomain, connected_pair: ConnectedPair, mw_type: MWType
) -> None:
    owner, _ = connected_pair(QPCapabilities(max_send_wr=4))
    room = owner.qp.free_send_slots
    with pd.reg_mr(64, BINDABLE) as region, pd.alloc_mw(mw_type) as window:
        for _ in range(room):
            if mw_type is MWType.TYPE_1:
                window.bind(owner.qp, region, READ)
            else:
                owner.qp.post_send_one(1, WROpcode.SEND, SIGNALED, 0, 0, 0)
        before = window.rkey
        with pytest.raises(QueueFullError):
            window.bind(owner.qp, region, READ)
        assert window.rkey == before
        owner.qp.to_error()  # prevents further requests to the peer


# --- what is refused before anything is posted -------------------------------------------------


def test_bind_rejects_invalid_ranges_and_rights(pd: verbs.ProtectionDomain, scene: Scene) -> None:
    bind, qp, region = scene.window.bind, scene.owner.qp, scene.region
    for offset, length in ((-1, 8), (8185, 8), (0, 0)):
        with pytest.raises(ValueError, match="are not within"):
            bind(qp, region, READ, region.addr + offset, length)
    with pytest.raises(ValueError, match="LOCAL_WRITE"):
        bind(qp, region, AccessFlags.LOCAL_WRITE)
    with pd.reg_mr(64) as plain, pytest.raises(ValueError, match=r"with AccessFlags\.MW_BIND"):
        bind(qp, plain, READ)
    with pd.reg_mr(64, AccessFlags.MW_BIND) as fixed:
        with pytest.raises(ValueError, match="requires a region with LOCAL_WRITE"):
            bind(qp, fixed, WRITE)
        bind(qp, fixed, READ)
        assert scene.owner.completion().ok
        scene.window.close()
    assert qp.first_failure is None


def test_bind_on_unconnected_queue_pair_raises_post_error(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue, mw_type: MWType
) -> None:
    with pd.reg_mr(64, BINDABLE) as region, pd.alloc_mw(mw_type) as window, pd.create_qp(cq) as qp:
        before = window.rkey
        with pytest.raises(PostError) as caught:
            window.bind(qp, region, READ)
        assert caught.value.bad_index == 0
        assert window.rkey == before
        assert qp.free_send_slots == qp.capabilities.max_send_wr
