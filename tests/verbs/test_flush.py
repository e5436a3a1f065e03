"""Test RDMA FLUSH, which makes sure that data has reached the peer's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from aiordma import verbs
from aiordma.errors import PostError, UnsupportedError, VerbsError
from aiordma.verbs import (
    AccessFlags,
    FlushInfo,
    PlacementType,
    QPCapabilities,
    QPType,
    ScatterGatherElement,
    SelectivityLevel,
    SendFlags,
    SendOps,
    SendWorkRequest,
    WCOpcode,
    WCStatus,
    WROpcode,
)
from conftest import ALL_REMOTE, End

if TYPE_CHECKING:
    from conftest import ConnectedPair

OPS = SendOps.RDMA_WRITE | SendOps.FLUSH
RIGHTS = AccessFlags.LOCAL_WRITE | ALL_REMOTE | AccessFlags.FLUSH_GLOBAL


Flushed = Callable[[], tuple[End, End, verbs.MemoryRegion]]


@pytest.fixture
def flushed(connected_pair: ConnectedPair, pd: verbs.ProtectionDomain) -> Iterator[Flushed]:
    """Provide a function that connects two ends and registers flushable memory for the second."""

    def make() -> tuple[End, End, verbs.MemoryRegion]:
        one, two = connected_pair(QPCapabilities(), send_ops=OPS, access=RIGHTS)
        return one, two, stack.enter_context(pd.reg_mr(4096, RIGHTS))

    with ExitStack() as stack:
        yield make


@pytest.mark.needs("FLUSH")
@pytest.mark.parametrize("level", SelectivityLevel, ids=lambda level: level.name)
def test_flush_completes_after_a_write(flushed: Flushed, level: SelectivityLevel) -> None:
    one, _, mr = flushed()
    one.mr.buf[:5] = b"there"
    with one.qp.batch() as batch:
        sge = ScatterGatherElement(one.mr.addr, 5, one.mr.lkey)
        batch.write([sge], mr.addr, mr.rkey, signaled=False)
        batch.flush(FlushInfo(5, level=level), mr.addr, mr.rkey, wr_id=3)
    done = one.completion()
    assert (done.wr_id, done.status, done.opcode) == (3, WCStatus.SUCCESS, WCOpcode.FLUSH)
    assert bytes(mr.buf[:5]) == b"there"


@pytest.mark.needs("FLUSH")
def test_flush_rejects_invalid_requests(flushed: Flushed) -> None:
    one, _, mr = flushed()
    sge = ScatterGatherElement(one.mr.addr, 5, one.mr.lkey)
    for wrong in (
        SendWorkRequest(1, WROpcode.FLUSH),
        SendWorkRequest(1, WROpcode.FLUSH, [sge], flush=FlushInfo(5)),
    ):
        with pytest.raises(ValueError, match="requires flush=FlushInfo"):
            one.qp.post_send([wrong])
    with pytest.raises(ValueError, match=r"FLUSH on a RC .*INLINE"):
        one.qp.post_send(
            [SendWorkRequest(1, WROpcode.FLUSH, (), SendFlags.INLINE, flush=FlushInfo(5))]
        )
    with (
        pytest.raises(ValueError, match=r"flush\.length must be an int from 0 .*, not -1"),
        one.qp.batch() as batch,
    ):
        batch.flush(FlushInfo(-1), mr.addr, mr.rkey)
    with pytest.raises(PostError), one.qp.batch() as batch:
        batch.flush(FlushInfo(5, PlacementType.NONE), mr.addr, mr.rkey)


def test_flush_is_rejected_on_queue_pairs_created_without_flush(
    connected_pair: ConnectedPair,
) -> None:
    one, _ = connected_pair()
    with pytest.raises(UnsupportedError, match="FLUSH on a queue pair created without"):
        one.qp.post_send([SendWorkRequest(1, WROpcode.FLUSH, flush=FlushInfo(5))])
    unreliable, _ = connected_pair(qp_type=QPType.UC)
    with pytest.raises(UnsupportedError, match="FLUSH on a UC queue pair"):
        unreliable.qp.post_send([SendWorkRequest(1, WROpcode.FLUSH, flush=FlushInfo(5))])


@pytest.mark.needs("FLUSH")
def test_create_qp_raises_unsupported_error_without_flush_support(
    context: verbs.Context,
    pd: verbs.ProtectionDomain,
    cq: verbs.CompletionQueue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = context.query_device_ex()
    with monkeypatch.context() as patch:
        lacking = there._replace(device_cap_flags_ex=0)
        patch.setattr(context, "query_device_ex", lambda: lacking)
        with pytest.raises(UnsupportedError, match="does not support flushes"):
            pd.create_qp(cq, send_ops=SendOps.FLUSH)
    pd.create_qp(cq, send_ops=SendOps.FLUSH).close()


def test_reg_mr_rejects_flush_persistent(pd: verbs.ProtectionDomain) -> None:
    """The kernel returns EINVAL for rights it does not support."""
    is_embedded = pd.context.library.name == "embedded"
    with pytest.raises(UnsupportedError if is_embedded else VerbsError, match="ibv_reg_mr"):
        pd.reg_mr(4096, AccessFlags.LOCAL_WRITE | AccessFlags.FLUSH_PERSISTENT)
