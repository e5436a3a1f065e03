"""Test that a batch is posted with one doorbell, or not at all."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from aiordma import verbs
from aiordma.errors import BufferStateError, QueueFullError
from aiordma.verbs import (
    AccessFlags,
    BindInfo,
    MWType,
    QPCapabilities,
    ReceiveWorkRequest,
    SendOps,
    SendWorkRequest,
    WCFlags,
    WCOpcode,
    WCStatus,
    WROpcode,
    inc_rkey,
)

if TYPE_CHECKING:
    from conftest import ConnectedPair, Pair

BUILDERS = verbs.send_ops_of(verbs.QPType.RC)


@pytest.fixture(params=[SendOps.NONE, BUILDERS], ids=["classic", "builders"])
def connected_pair(request: pytest.FixtureRequest, connected_pair: ConnectedPair) -> ConnectedPair:
    """Provide the factory of connected pairs, once for each way of posting."""
    return partial(connected_pair, send_ops=request.param)


def test_batch_executes_every_operation_in_order(connected_pair: ConnectedPair) -> None:
    one, two = connected_pair(QPCapabilities(max_send_sge=2, max_inline_data=64))
    one.mr.buf[:8] = b"0123abcd"
    two.mr.buf[2048:2056] = b"to read!"
    two.mr.buf[4096:4104] = (43).to_bytes(8, "little")
    with two.qp.recv_batch() as receives:
        for wr_id in range(3):
            receives.recv([two.sge(256 * wr_id, 64)], wr_id=wr_id)
        receives.recv(wr_id=3)
    there, rkey = two.mr.addr, two.mr.rkey
    with one.qp.batch() as batch:
        batch.send([one.sge(0, 4)], wr_id=10, signaled=False)
        batch.send([one.sge(4, 4), one.sge(0, 4)], wr_id=11, imm=0x11223344)
        pieces = [one.sge(at, 2)._replace(lkey=0) for at in (0, 6)]  # no key is needed
        batch.send(pieces, wr_id=12, inline=True, solicited=True)
        batch.write([one.sge()], there + 1024, rkey, wr_id=13)
        batch.write([one.sge()], there + 1032, rkey, wr_id=14, imm=7, inline=True)
        batch.read([one.sge(512)], there + 2048, rkey, wr_id=15)
        batch.fetch_and_add(one.sge(520), there + 4096, rkey, -1, wr_id=16)
        batch.compare_and_swap(one.sge(528), there + 4096, rkey, 42, 5, wr_id=17)
        batch.write([one.sge(512)], there + 1040, rkey, wr_id=18, fence=True)
        assert len(batch) == 9
        assert one.cq.poll() == two.cq.poll() == []  # nothing has been posted yet
    done = one.completions(8)
    assert [wc.wr_id for wc in done] == [11, 12, 13, 14, 15, 16, 17, 18]
    assert [wc.opcode for wc in done] == [
        WCOpcode.SEND, WCOpcode.SEND, WCOpcode.RDMA_WRITE, WCOpcode.RDMA_WRITE, WCOpcode.RDMA_READ,
        WCOpcode.FETCH_ADD, WCOpcode.COMP_SWAP, WCOpcode.RDMA_WRITE,
    ]  # fmt: skip
    received = two.completions(4)
    assert [(wc.wr_id, wc.byte_len, wc.imm_data) for wc in received[:3]] == [
        (0, 4, None), (1, 8, 0x11223344), (2, 4, None),
    ]  # fmt: skip
    assert (received[3].opcode, received[3].imm_data) == (WCOpcode.RECV_RDMA_WITH_IMM, 7)
    assert received[3].byte_len == 8
    assert received[3].wc_flags & WCFlags.WITH_IMM
    here = one.mr.buf
    assert bytes(two.mr.buf[:4]) == b"0123"
    assert bytes(two.mr.buf[256:264]) == b"abcd0123"
    assert bytes(two.mr.buf[512:516]) == b"01cd"
    assert bytes(two.mr.buf[1024:1040]) == b"0123abcd" * 2
    assert bytes(two.mr.buf[1040:1048]) == bytes(here[512:520]) == b"to read!"  # the fence waited
    assert int.from_bytes(here[520:528], "little") == 43
    assert int.from_bytes(here[528:536], "little") == 42
    assert int.from_bytes(two.mr.buf[4096:4104], "little") == 5
    assert one.cq.poll() == two.cq.poll() == []  # a plain write causes no completion at the peer


async def test_async_with_on_a_batch_raises_type_error(connected_pair: ConnectedPair) -> None:
    one, _ = connected_pair(QPCapabilities())
    for batch in (one.qp.batch(), one.qp.recv_batch()):
        text = f"^a {type(batch).__name__} is not an asynchronous context manager: use 'with' "
        with pytest.raises(TypeError, match=text):
            async with batch:
                pass


def test_work_requests_gather_and_scatter_several_elements(connected_pair: ConnectedPair) -> None:
    one, two = connected_pair(QPCapabilities(max_send_sge=3, max_recv_sge=3))
    one.mr.buf[:48] = b"a" * 16 + b"b" * 16 + b"c" * 16
    two.qp.post_recv(
        [
            ReceiveWorkRequest(1, [two.sge(0, 10), two.sge(1000, 10), two.sge(2000, 100)]),
            ReceiveWorkRequest(2, [two.sge(3000, 100)]),
            ReceiveWorkRequest(3),
        ]
    )
    one.qp.post_send(
        [
            SendWorkRequest(4, WROpcode.SEND, [one.sge(32, 16), one.sge(16, 16), one.sge(0, 16)]),
            SendWorkRequest(5, WROpcode.SEND, [one.sge(0, 3)], 0),
            SendWorkRequest(6, WROpcode.SEND_WITH_IMM, imm_data=9),
        ]
    )
    assert [wc.wr_id for wc in one.completions(2)] == [4, 6]
    received = two.completions(3)
    assert [wc.wr_id for wc in received] == [1, 2, 3]
    assert [wc.byte_len for wc in received] == [48, 3, 0]
    assert received[2].imm_data == 9
    assert bytes(two.mr.buf[:10]) == b"c" * 10
    assert bytes(two.mr.buf[1000:1010]) == b"c" * 6 + b"b" * 4
    assert bytes(two.mr.buf[2000:2028]) == b"b" * 12 + b"a" * 16
    assert bytes(two.mr.buf[3000:3003]) == b"aaa"


WINDOWS = SendOps.BIND_MW | SendOps.LOCAL_INV | SendOps.SEND_WITH_INV


def test_batch_binds_and_invalidates_memory_windows(
    connected_pair: ConnectedPair, pd: verbs.ProtectionDomain, deviations: frozenset[str]
) -> None:
    """The owner binds a window and sends its key in one batch.

    The peer uses and invalidates it in another batch, and the owner binds it again.
    """
    ops = connected_pair.keywords["send_ops"]  # type: ignore[attr-defined]
    owner, peer = connected_pair(send_ops=ops | WINDOWS if ops else ops)
    rights = AccessFlags.LOCAL_WRITE | AccessFlags.MW_BIND
    with pd.reg_mr(4096, rights) as mr, pd.alloc_mw(MWType.TYPE_2) as mw:
        first, second = inc_rkey(mw.rkey), inc_rkey(inc_rkey(mw.rkey))
        peer.mr.buf[:8] = b"12345678"
        peer.qp.post_recv_one(1, 0, 0, 0)
        owner.qp.post_recv_one(2, 0, 0, 0)
        with owner.qp.batch() as batch:
            info = BindInfo(mw, mr, first, mr.addr + 64, 64, AccessFlags.REMOTE_WRITE)
            batch.bind(info, wr_id=3)
            batch.send(imm=first, wr_id=4)
        assert mw.rkey == first
        assert [wc.opcode for wc in owner.completions(2)] == [WCOpcode.BIND_MW, WCOpcode.SEND]
        assert peer.completion().imm_data == first
        with peer.qp.batch() as batch:
            batch.write([peer.sge()], mr.addr + 64, first, wr_id=5, signaled=False)
            batch.send(invalidate=first, wr_id=6)
        assert peer.completion().wr_id == 6
        ended = owner.completion()
        if "WITH_INV is told as IP_CSUM_OK" in deviations:
            assert ended.wc_flags & WCFlags.IP_CSUM_OK
            assert ended.invalidated_rkey is None
        else:
            assert ended.wc_flags & WCFlags.WITH_INV
            assert ended.invalidated_rkey == first  # in host byte order
        assert bytes(mr.buf[64:72]) == b"12345678"
        with owner.qp.batch() as batch:
            batch.bind(info._replace(rkey=second), wr_id=7)
            batch.invalidate(second, wr_id=8)
        assert [wc.opcode for wc in owner.completions(2)] == [WCOpcode.BIND_MW, WCOpcode.LOCAL_INV]
        with peer.qp.batch() as batch:
            batch.write([peer.sge()], mr.addr + 64, second, wr_id=9)
        assert peer.completion().status is WCStatus.REM_ACCESS_ERR
        owner.qp.close()


def test_exception_discards_the_whole_batch(pair: Pair) -> None:
    one, two = pair
    one.mr.buf[:4] = b"bad!"

    def fail() -> None:
        with one.qp.batch() as batch:
            batch.write([one.sge(0, 4)], two.mr.addr, two.mr.rkey, wr_id=1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with one.qp.batch() as batch:
        batch.write([one.sge(0, 4)], two.mr.addr + 8, two.mr.rkey, wr_id=2)
    assert one.completion().wr_id == 2
    assert bytes(two.mr.buf[:12]) == bytes(8) + b"bad!"
    assert one.qp.free_send_slots == one.qp.capabilities.max_send_wr


def test_invalid_batch_posts_nothing(pair: Pair) -> None:
    one, two = pair

    def misaligned() -> None:
        with one.qp.batch() as batch:
            batch.write([one.sge(0, 4)], two.mr.addr, two.mr.rkey)
            batch.fetch_and_add(one.sge(), two.mr.addr + 4, two.mr.rkey, 1)

    def too_many() -> None:
        with one.qp.batch() as batch:
            for wr_id in range(one.qp.capabilities.max_send_wr + 1):
                batch.write([one.sge(0, 4)], two.mr.addr, two.mr.rkey, wr_id=wr_id)

    with pytest.raises(ValueError, match="must be a multiple of 8"):
        misaligned()
    with pytest.raises(QueueFullError):
        too_many()
    assert one.qp.free_send_slots == one.qp.capabilities.max_send_wr
    assert one.cq.poll() == []


def test_batch_rejects_requests_outside_its_with_block(pair: Pair) -> None:
    one, two = pair
    batch = one.qp.batch()
    with pytest.raises(BufferStateError, match="within its with"):
        batch.send()
    with batch:
        with pytest.raises(BufferStateError, match="already active"), batch:
            pass
        assert len(batch) == 0
    with pytest.raises(BufferStateError, match="within its with"):
        batch.send()
    two.qp.post_recv_one(1, 0, 0, 0)
    with batch:  # the batch can be used again
        batch.send(wr_id=9)
    assert one.completion().wr_id == 9
    assert two.completion().ok


def test_batch_send_rejects_imm_together_with_invalidate(pair: Pair) -> None:
    with pair[0].qp.batch() as batch, pytest.raises(ValueError, match="cannot be combined"):
        batch.send(imm=1, invalidate=2)
