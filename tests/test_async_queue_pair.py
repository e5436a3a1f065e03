"""Tests of verbs on the event loop: backpressure, batches, cancellation and failures."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from aiordma import verbs
from aiordma._event_loop.driver import ContextEvents
from aiordma.async_queue_pair import AsyncQueuePair
from aiordma.errors import (
    BufferStateError,
    BusyError,
    DeviceEventError,
    QueueFullError,
    RemoteAccessError,
    UnsupportedError,
    WorkRequestFlushedError,
)
from aiordma.verbs import (
    EventType,
    QPCapabilities,
    QPType,
    ScatterGatherElement,
    SendWorkRequest,
    WCOpcode,
    WROpcode,
)
from conftest import ALL_REMOTE


@dataclass
class Side:
    queue: AsyncQueuePair
    mr: verbs.MemoryRegion

    def piece(self, offset: int = 0, length: int = 8) -> ScatterGatherElement:
        return ScatterGatherElement(self.mr.addr + offset, length, self.mr.lkey)


@asynccontextmanager
async def connected(
    pd: verbs.ProtectionDomain,
    capabilities: QPCapabilities | None = None,
    qp_type: QPType = QPType.RC,
    sq_sig_all: bool = False,
    **connect: float,
) -> AsyncIterator[tuple[Side, Side]]:
    sides = []
    for _ in range(2):
        queue = AsyncQueuePair(pd, capabilities, qp_type=qp_type, sq_sig_all=sq_sig_all)
        sides.append(Side(queue, pd.reg_mr(8192, ALL_REMOTE | verbs.AccessFlags.LOCAL_WRITE)))
    first, second = (side.queue.qp.endpoint() for side in sides)
    sides[0].queue.qp.connect(first, second, access=ALL_REMOTE, **connect)  # type: ignore[arg-type]
    sides[1].queue.qp.connect(second, first, access=ALL_REMOTE, **connect)  # type: ignore[arg-type]
    try:
        yield sides[0], sides[1]
    finally:
        for side in sides:
            side.queue.close()
            side.mr.close()


async def test_awaited_and_nowait_operations_return_their_completions(
    pd: verbs.ProtectionDomain,
) -> None:
    """tests/verbs/test_batch.py tests the same operations in batches."""
    async with connected(pd) as (one, two):
        queue, piece, there = one.queue, one.piece(), (two.mr.addr, two.mr.rkey)
        received = [two.queue.recv_nowait([two.piece(64)]) for _ in range(2)]
        one.mr.buf[:8] = b"12345678"
        for operation, opcode in (
            (queue.write_nowait([piece], *there), WCOpcode.RDMA_WRITE),
            (queue.read_nowait([one.piece(8)], *there), WCOpcode.RDMA_READ),
            (queue.send_nowait([one.piece(8)], imm=7), WCOpcode.SEND),
            (queue.send([piece], imm=8), WCOpcode.SEND),
            (queue.fetch_and_add(piece, *there, 0), WCOpcode.FETCH_ADD),
            (queue.compare_and_swap(piece, *there, 0, 0), WCOpcode.COMP_SWAP),
            (queue.read([piece], *there), WCOpcode.RDMA_READ),
            (queue.write([piece], *there), WCOpcode.RDMA_WRITE),
        ):
            done = await operation
            assert done is not None
            assert done.opcode is opcode
        assert [(await it).imm_data for it in received] == [7, 8]
        assert bytes(two.mr.buf[:8]) == bytes(two.mr.buf[64:72]) == b"12345678"


async def test_async_batch_completes_or_discards_all_requests(pd: verbs.ProtectionDomain) -> None:
    async with connected(pd) as (one, two):
        one.mr.buf[:8] = b"12345678"
        async with one.queue.batch() as batch:
            batch.write([one.piece()], two.mr.addr, two.mr.rkey)
            batch.read([one.piece(8)], two.mr.addr, two.mr.rkey, fence=True)
            assert len(batch) == 2
        assert [wc.opcode for wc in batch.completions] == [WCOpcode.RDMA_WRITE, WCOpcode.RDMA_READ]
        assert bytes(one.mr.buf[8:16]) == b"12345678"

        async def fail() -> None:
            async with one.queue.batch() as batch:
                batch.write([one.piece()], two.mr.addr + 100, two.mr.rkey)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        await one.queue.read([one.piece(8)], two.mr.addr + 100, two.mr.rkey)
        assert not any(one.mr.buf[8:16])  # it was dropped


async def test_full_send_queue_serves_waiters_in_fifo_order(pd: verbs.ProtectionDomain) -> None:
    async with connected(pd, QPCapabilities(max_send_wr=2)) as (one, two):
        size = one.queue.qp.capabilities.max_send_wr
        done: list[int] = []

        async def add(number: int) -> None:
            await one.queue.fetch_and_add(one.piece(), two.mr.addr, two.mr.rkey, 1)
            done.append(number)

        async with asyncio.TaskGroup() as tasks:
            for number in range(20 * size):
                tasks.create_task(add(number))
        assert done == list(range(20 * size))
        assert int.from_bytes(two.mr.buf[:8], "little") == 20 * size
        assert one.queue.qp.free_send_slots == size


async def test_small_batch_does_not_overtake_a_waiting_larger_batch(
    pd: verbs.ProtectionDomain,
) -> None:
    async with connected(pd, QPCapabilities(max_send_wr=4)) as (one, two):
        size = one.queue.qp.capabilities.max_send_wr
        order: list[str] = []

        async def write(name: str, count: int) -> None:
            async with one.queue.batch() as batch:
                for _ in range(count):
                    batch.write([one.piece()], two.mr.addr, two.mr.rkey)
            order.append(name)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(write("half", size // 2))
            tasks.create_task(write("all", size))
            tasks.create_task(write("one", 1))
        assert order == ["half", "all", "one"]
        with pytest.raises(ValueError, match=f"has {size}"):
            await write("too many", size + 1)


async def test_pending_operations_fail_with_the_cause_passed_to_fail(
    pd: verbs.ProtectionDomain,
) -> None:
    """Completed operations are still delivered. Later operations fail with the same cause."""
    async with connected(pd) as (one, two):
        arrived, waiting = two.queue.recv_nowait([two.piece()]), two.queue.recv_nowait()
        await one.queue.send([one.piece()])
        cause = TimeoutError("no keep-alive")
        two.queue.fail(cause)
        two.queue.fail(ZeroDivisionError("too late"))
        assert (await arrived).byte_len == 8
        with pytest.raises(WorkRequestFlushedError) as caught:
            await waiting
        assert caught.value.__cause__ is cause
        with pytest.raises(WorkRequestFlushedError) as caught:
            two.queue.recv_nowait()
        assert caught.value.__cause__ is cause


async def test_receive_ring_reposts_its_receives_after_a_full_queue_drains(
    pd: verbs.ProtectionDomain,
) -> None:
    """A place of the ring that finds the queue full must not be lost."""
    async with connected(pd, rnr_retry=7, min_rnr_timer=0.4) as (one, two):
        ring = two.queue.receives(2, 8)
        for imm in (1, 2):
            await one.queue.send(imm=imm)
        assert (await ring.get())[0].imm_data == 1
        others: list[asyncio.Future[verbs.WorkCompletion]] = []
        with contextlib.suppress(QueueFullError):
            while len(others) < 4096:
                others.append(two.queue.recv_nowait())
        assert (await ring.get())[0].imm_data == 2  # the first place finds no room
        with pytest.raises(QueueFullError):  # nor any
            await ring.get()
        for imm in range(len(others)):
            await one.queue.send(imm=imm)
        assert [(await other).imm_data for other in others] == list(range(len(others)))
        for imm in range(6):
            sent = one.queue.send_nowait(imm=imm)
            assert (await ring.get())[0].imm_data == imm
            await sent
        assert len(ring._posted) + len(ring._free_slots) == 2


async def test_receive_ring_posts_all_of_its_receives_or_none(pd: verbs.ProtectionDomain) -> None:
    """Receives left behind would consume messages that may be too long for them."""
    async with connected(pd, QPCapabilities(max_recv_wr=8)) as (one, two):
        size = two.queue.qp.capabilities.max_recv_wr
        ring = two.queue.receives(4, 8)
        with pytest.raises(
            QueueFullError, match=f"slots: {size - 3}, free slots: {size - 4} of {size}"
        ):
            two.queue.receives(size - 3, 1)
        for _ in range(8):
            await one.queue.send([one.piece()])
            assert (await ring.get())[0].byte_len == 8
        for count, room in ((0, 8), (8, 0), (-1, 8), (4, 1 << 50), (1, (1 << 31) + 1)):
            with pytest.raises(ValueError, match=f"{count} receives of {room} bytes: .* 1 to 2147"):
                two.queue.receives(count, room)
        two.queue.close()
        with pytest.raises(BufferStateError):
            two.queue.receives(1, 1)


async def test_receive_ring_delivers_received_messages_before_raising(
    pd: verbs.ProtectionDomain,
) -> None:
    """Every later call raises the failure again. After the close, the ring is closed."""
    async with connected(pd) as (one, two):
        rings = two.queue.receives(2, 8), two.queue.receives(1, 8)
        for imm in (1, 2, 3):
            await one.queue.send(imm=imm)
        cause = TimeoutError("no keep-alive")
        two.queue.fail(cause)
        assert [(await rings[0].get())[0].imm_data for _ in range(2)] == [1, 2]
        for _ in range(2):
            with pytest.raises(WorkRequestFlushedError) as caught:
                await rings[0].get()
            assert caught.value.__cause__ is cause
        two.queue.close()
        for ring in rings:
            with pytest.raises(BufferStateError, match="is closed"):
                await ring.get()


async def test_abandoned_futures_report_no_exception(pd: verbs.ProtectionDomain) -> None:
    """A report to the event loop would fail the test."""
    async with connected(pd) as (one, _):
        one.queue.recv_nowait()
        one.queue.recv_nowait().cancel()
        one.queue.fail(TimeoutError("no keep-alive"))
    gc.collect()


async def test_receive_ring_raises_busy_error_for_a_second_task(pd: verbs.ProtectionDomain) -> None:
    async with connected(pd) as (one, two):
        ring = two.queue.receives(2, 8)
        waiting = asyncio.create_task(ring.get())
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await ring.get()
        for imm in range(4):
            sent = one.queue.send_nowait(imm=imm)
            assert (await (ring.get() if imm else waiting))[0].imm_data == imm
            await sent


async def test_submit_nowait_raises_queue_full_error(pd: verbs.ProtectionDomain) -> None:
    async with connected(pd, rnr_retry=7, min_rnr_timer=0.4) as (one, _):
        size = one.queue.qp.capabilities.max_send_wr
        requests = [SendWorkRequest(0, WROpcode.SEND) for _ in range(size)]
        one.queue.submit_nowait(requests)  # no receives: nothing completes
        with pytest.raises(QueueFullError, match="requested slots: 1, free slots: 0"):
            one.queue.submit_nowait(requests[:1])
        waiting = asyncio.create_task(one.queue.send())
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="other waiting tasks: 1"):
            one.queue.submit_nowait([])
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


@pytest.mark.parametrize("signal_all", [False, True], ids=["by request", "all"])
async def test_unsignaled_requests_never_block_the_send_queue(
    pd: verbs.ProtectionDomain, signal_all: bool
) -> None:
    """Post ten times the queue's capacity, one request at a time and in batches that fill it."""
    async with connected(pd, QPCapabilities(max_send_wr=4), sq_sig_all=signal_all) as (one, two):
        queue, size = one.queue, one.queue.qp.capabilities.max_send_wr
        target = two.mr.addr, two.mr.rkey
        for number in range(10 * size):
            one.mr.buf[:8] = number.to_bytes(8, "little")
            ended = await queue.write([one.piece()], *target, signaled=False, wr_id=77)
            assert ended is None if not signal_all else ended is not None and ended.wr_id == 77
        for _ in range(10):
            async with queue.batch() as batch:
                for number in range(size):
                    batch.fetch_and_add(
                        one.piece(8), *target, 1, signaled=number == 1, wr_id=number
                    )
            numbers = [completion.wr_id for completion in batch.completions]
            assert numbers == (list(range(size)) if signal_all else [1])
        last = await queue.read([one.piece(16)], *target, wr_id=78)
        assert last is not None
        assert last.wr_id == 78
        assert queue.qp.free_send_slots == size
        assert int.from_bytes(one.mr.buf[16:24], "little") == 20 * size - 1


async def test_unsignaled_request_completes_with_next_signaled_request(
    pd: verbs.ProtectionDomain,
) -> None:
    async with connected(pd) as (one, two):
        request = SendWorkRequest(
            5, WROpcode.RDMA_WRITE, [one.piece()], 0, remote_addr=two.mr.addr, rkey=two.mr.rkey
        )
        silent = one.queue.submit_nowait([request, request])
        told = one.queue.write_nowait([one.piece()], two.mr.addr, two.mr.rkey, wr_id=6)
        assert [(await each).wr_id for each in (*silent, told)] == [5, 5, 6]
        assert (request.wr_id, request.send_flags) == (5, 0)
        refused = one.queue.submit_nowait([request])
        bad = one.queue.write_nowait([one.piece()], two.mr.addr, two.mr.rkey ^ 0x5A5A5A00, wr_id=7)
        with pytest.raises(RemoteAccessError) as failure:
            await bad
        assert failure.value.wr_id == 7
        assert (await refused[0]).ok


async def test_request_cancelled_before_posting_is_never_posted(pd: verbs.ProtectionDomain) -> None:
    """The next waiting request gets its turn."""
    async with connected(pd, QPCapabilities(max_send_wr=1)) as (one, two):
        size = one.queue.qp.capabilities.max_send_wr

        def add() -> asyncio.Task[verbs.WorkCompletion | None]:
            return asyncio.create_task(
                one.queue.fetch_and_add(one.piece(), two.mr.addr, two.mr.rkey, 1)
            )

        tasks = [add() for _ in range(size + 3)]
        await asyncio.sleep(0)
        given_up = tasks[size : size + 2]
        for task in given_up:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(r, asyncio.CancelledError) for r in results] == [
            task in given_up for task in tasks
        ]
        assert int.from_bytes(two.mr.buf[:8], "little") == size + 1
        assert one.queue.qp.free_send_slots == size


async def test_request_cancelled_after_posting_still_completes(pd: verbs.ProtectionDomain) -> None:
    async with connected(pd) as (one, two):
        one.mr.buf[:8] = b"12345678"
        task = asyncio.create_task(one.queue.write([one.piece()], two.mr.addr, two.mr.rkey))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await one.queue.read([one.piece(8)], two.mr.addr, two.mr.rkey)
        assert bytes(one.mr.buf[8:16]) == b"12345678"
        assert one.queue.qp.free_send_slots == one.queue.qp.capabilities.max_send_wr


async def test_rejected_request_does_not_block_later_requests(pd: verbs.ProtectionDomain) -> None:
    async with connected(pd, QPCapabilities(max_send_wr=1)) as (one, two):
        size = one.queue.qp.capabilities.max_send_wr
        wrong = SendWorkRequest(0, WROpcode.TSO)
        right = SendWorkRequest(
            0, WROpcode.RDMA_WRITE, [one.piece()],
            remote_addr=two.mr.addr, rkey=two.mr.rkey,
        )  # fmt: skip
        results = await asyncio.gather(
            one.queue.submit([right] * size),
            one.queue.submit([wrong] * size),
            one.queue.submit([right]),
            return_exceptions=True,
        )
        assert isinstance(results[1], UnsupportedError)
        assert not isinstance(results[0], BaseException)
        assert not isinstance(results[2], BaseException)


async def test_failed_request_flushes_all_pending_operations(pd: verbs.ProtectionDomain) -> None:
    async with connected(pd, QPCapabilities(max_send_wr=1)) as (one, two):
        size = one.queue.qp.capabilities.max_send_wr
        receive = one.queue.recv_nowait([one.piece(64)])
        tasks = [
            asyncio.create_task(one.queue.read([one.piece()], two.mr.addr, rkey))
            for rkey in [two.mr.rkey ^ 0x5A5A5A00] + [two.mr.rkey] * (size + 1)
        ]
        results = await asyncio.gather(*tasks, receive, return_exceptions=True)
        first = results[0]
        assert isinstance(first, RemoteAccessError)
        assert first.operation == "read"
        for error in results[1:]:
            assert isinstance(error, WorkRequestFlushedError)
            assert error.__cause__ is first
        for _ in range(2):
            with pytest.raises(WorkRequestFlushedError) as caught:
                await one.queue.send()
            assert caught.value.__cause__ is first
            one.queue.fail(TimeoutError("no keep-alive"))  # heard of later, it hides no failure


async def test_submit_accepts_empty_lists_and_rejects_invalid_elements(
    pd: verbs.ProtectionDomain,
) -> None:
    async with connected(pd) as (one, _):
        assert await one.queue.submit([]) == []
        assert one.queue.submit_nowait([]) == []
        for wrong, kind in (([b"x"], "of bytes"), (b"x", "bytes"), ([None], "of NoneType")):
            with pytest.raises(TypeError, match=f"of ScatterGatherElement.*, not {kind}"):
                await one.queue.send(wrong)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match=f"not {kind}"):
                one.queue.recv_nowait(wrong)  # type: ignore[arg-type]


async def test_close_fails_all_pending_operations(pd: verbs.ProtectionDomain) -> None:
    async with connected(pd) as (one, _):
        task = asyncio.create_task(one.queue.recv([one.piece()]))
        await asyncio.sleep(0)
        one.queue.close()
        one.queue.close()
        with pytest.raises(BufferStateError, match="was closed"):
            await task
        for use in (one.queue.send, one.queue.recv):
            with pytest.raises(BufferStateError, match="is closed"):
                await use()
        with pytest.raises(BufferStateError, match="is closed"):
            one.queue.write_nowait([], 0, 0)
        assert one.queue.qp.closed


async def test_failed_queue_pair_creation_leaks_no_resources(pd: verbs.ProtectionDomain) -> None:
    with pytest.raises(UnsupportedError):
        AsyncQueuePair(pd, max_tso_header=64)


async def test_datagram_is_sent_and_received(pd: verbs.ProtectionDomain) -> None:
    async with AsyncQueuePair(pd, qp_type=QPType.UD) as queue:
        mine = queue.qp.endpoint()
        queue.qp.start(mine)
        to = queue.qp.destination(mine, mine)
        with to.ah, pd.reg_mr(1024) as mr:
            side = Side(queue, mr)
            mr.buf[:4] = b"ping"
            received = queue.recv_nowait([side.piece(512, 512)])
            await queue.send([side.piece(0, 4)], to=to)
            assert (await received).byte_len == verbs.GRH_SIZE + 4
            assert bytes(mr.buf[512 + verbs.GRH_SIZE :][:4]) == b"ping"


@pytest.mark.parametrize("kind", [EventType.QP_FATAL, EventType.CQ_ERR, EventType.DEVICE_FATAL])
async def test_device_failure_event_fails_pending_operations(
    context: verbs.Context, pd: verbs.ProtectionDomain, kind: EventType
) -> None:
    """Nothing may complete after this event. Each error has the device's report as its cause."""
    async with AsyncQueuePair(pd) as one, AsyncQueuePair(pd) as two:
        here, there = one.qp.endpoint(), two.qp.endpoint()
        one.qp.connect(here, there)
        two.qp.connect(there, here)
        waiting = [queue.recv_nowait([]) for queue in (one, one, two)]
        event = {
            EventType.QP_FATAL: verbs.AsyncEvent(kind, one.qp),
            EventType.CQ_ERR: verbs.AsyncEvent(kind, one.qp.recv_cq),
            EventType.DEVICE_FATAL: verbs.AsyncEvent(kind),
        }[kind]
        ContextEvents.deliver(context, event)
        for future in waiting[: 3 if kind is EventType.DEVICE_FATAL else 2]:
            with pytest.raises(WorkRequestFlushedError) as caught:
                await future
            cause = caught.value.__cause__
            assert isinstance(cause, DeviceEventError)
            assert cause.event == kind.name
        with pytest.raises(WorkRequestFlushedError):
            await one.send([])
        assert waiting[2].done() is (kind is EventType.DEVICE_FATAL)
