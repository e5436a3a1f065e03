"""Tests of the connection manager on the event loop, from connecting to cancellation."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

import aiordma
from aiordma import AsyncConnectionId, cm, verbs
from aiordma.errors import (
    AddressError,
    BufferStateError,
    ConnectionManagerError,
    DeviceNotFoundError,
    LimitError,
    RejectedError,
    RouteError,
    UnreachableError,
    VerbsError,
    WorkRequestFlushedError,
    WrongLoopError,
)
from aiordma.verbs import QPCapabilities, ScatterGatherElement, WCOpcode
from conftest import EMBEDDED

ROOM = QPCapabilities(max_send_wr=8, max_recv_wr=8)


@asynccontextmanager
async def listening(
    device_name: str, host: str, backlog: int = 8
) -> AsyncIterator[tuple[AsyncConnectionId, cm.Address]]:
    async with AsyncConnectionId(device_name) as listener:
        listener.id.bind_addr((host, 0))
        listener.listen(backlog)
        address = listener.id.local_address
        assert address is not None
        yield listener, address


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the listener has no event for it
        await asyncio.sleep(0)


async def resolved(id: AsyncConnectionId, address: cm.Address) -> AsyncConnectionId:
    await id.resolve_addr(address)
    await id.resolve_route()
    return id


Connecting = asyncio.Task[cm.ConnectionEvent]


@asynccontextmanager
async def connecting_id(
    device_name: str, address: cm.Address, data: bytes = b""
) -> AsyncIterator[tuple[AsyncConnectionId, Connecting]]:
    """Provide an ID that is connecting to a listener, and the task that awaits the response."""
    async with AsyncConnectionId(device_name) as id:
        (await resolved(id, address)).create_qp()
        yield id, asyncio.create_task(id.connect(cm.ConnectionParameters(data)))


@dataclass
class End:
    """A connected ID with posted receives of 64 bytes, and 64 bytes of memory to send from."""

    id: AsyncConnectionId
    queue: aiordma.AsyncQueuePair
    receives: aiordma.ReceiveRing
    mr: verbs.MemoryRegion

    @classmethod
    def prepare(cls, id: AsyncConnectionId) -> End:
        queue = id.create_qp(ROOM)
        return cls(id, queue, queue.receives(4, 64), id.pd.reg_mr(64))

    async def send(self, data: bytes, imm: int | None = None) -> None:
        self.mr.buf[: len(data)] = data
        piece = ScatterGatherElement(self.mr.addr, len(data), self.mr.lkey)
        await self.queue.send([piece], imm=imm)


@asynccontextmanager
async def connected(device_name: str, host: str) -> AsyncIterator[tuple[End, End]]:
    async with (
        listening(device_name, host) as (listener, address),
        AsyncConnectionId(device_name) as id,
    ):
        one = End.prepare(await resolved(id, address))
        connecting = asyncio.create_task(id.connect(cm.ConnectionParameters(b"question")))
        async with await listener.get_request() as request:
            assert request.request is not None
            assert request.request.private_data[:8] == b"question"
            two = End.prepare(request)
            await request.accept(cm.ConnectionParameters(b"answer"))
            assert (await connecting).private_data[:6] == b"answer"
            yield one, two


async def test_write_with_immediate_completes_an_empty_receive(device_name: str, host: str) -> None:
    async with connected(device_name, host) as (one, two):
        rights = verbs.AccessFlags.LOCAL_WRITE | verbs.AccessFlags.REMOTE_WRITE
        target = two.id.pd.reg_mr(64, rights)
        one.mr.buf[:5] = b"hello"
        piece = ScatterGatherElement(one.mr.addr, 5, one.mr.lkey)
        await one.queue.write([piece], target.addr, target.rkey, imm=9)
        completion, data = await two.receives.get()
        assert completion.opcode is WCOpcode.RECV_RDMA_WITH_IMM
        assert (completion.imm_data, len(data), bytes(target.buf[:5])) == (9, 0, b"hello")


async def test_cancelled_receive_does_not_lose_a_message(device_name: str, host: str) -> None:
    async with connected(device_name, host) as (one, two):
        for _ in range(3):
            waiting = asyncio.create_task(two.receives.get())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await one.send(b"first")
        assert bytes((await two.receives.get())[1]) == b"first"


@pytest.mark.parametrize("active", [True, False], ids=["active", "passive"])
async def test_disconnect_fails_pending_calls_on_both_sides(
    device_name: str, host: str, active: bool
) -> None:
    async with connected(device_name, host) as (one, two):
        leaving, left = (one, two) if active else (two, one)
        for number in range(3):
            await leaving.send(b"%d" % number)
        waiting = [asyncio.create_task(end.queue.recv()) for end in (leaving, left)]
        await asyncio.sleep(0)
        leaving.id.disconnect()
        leaving.id.disconnect()
        reason = await left.id.wait_disconnected()
        assert isinstance(reason, ConnectionManagerError)
        assert host in str(reason)
        assert "by this side" in str(await leaving.id.wait_disconnected())
        for number in range(3):
            assert bytes((await left.receives.get())[1]) == b"%d" % number
        for end, task in zip((leaving, left), waiting, strict=True):
            with pytest.raises(WorkRequestFlushedError) as caught:
                await task
            assert caught.value.__cause__ is await end.id.wait_disconnected()
            with pytest.raises(WorkRequestFlushedError):
                await end.send(b"too late")


async def test_connection_request_wakes_only_get_request(device_name: str, host: str) -> None:
    """A task that waits for the listener's end must not wake up instead."""
    async with listening(device_name, host) as (listener, address):
        ending = asyncio.create_task(listener.wait_disconnected())
        await asyncio.sleep(0)
        taking = asyncio.create_task(listener.get_request())
        await asyncio.sleep(0)
        async with connecting_id(device_name, address) as (_, connecting):
            async with asyncio.timeout(60):
                (await taking).reject()
            with pytest.raises(RejectedError):
                await connecting
        listener.close()
        with pytest.raises(BufferStateError):
            await ending


async def test_disconnect_is_ignored_before_connection_is_established(
    device_name: str, host: str
) -> None:
    async with (
        listening(device_name, host) as (listener, address),
        AsyncConnectionId(device_name) as id,
    ):
        listener.disconnect()
        one = End.prepare(await resolved(id, address))
        id.disconnect()
        connecting = asyncio.create_task(id.connect())
        async with await listener.get_request() as request:
            two = End.prepare(request)
            request.disconnect()
            await request.accept()
            await connecting
            await one.send(b"hello")
            assert bytes((await two.receives.get())[1]) == b"hello"
            id.disconnect()
            assert host in str(await request.wait_disconnected())


async def test_request_can_be_rejected_with_data(device_name: str, host: str) -> None:
    async with (
        listening(device_name, host) as (listener, address),
        connecting_id(device_name, address) as (_, connecting),
    ):
        (await listener.get_request()).reject(b"not today")
        with pytest.raises(RejectedError) as caught:
            await connecting
        assert caught.value.private_data[:9] == b"not today"


async def test_request_from_departed_peer_can_be_rejected(device_name: str, host: str) -> None:
    async with listening(device_name, host) as (listener, address):
        async with connecting_id(device_name, address) as (_, connecting):
            request = await listener.get_request()
        with pytest.raises(BufferStateError):
            await connecting
        if request.id.library.offers("withdrawn"):
            await wait_until(lambda: request.id._withdrawn)
        request.reject(b"too late")
        assert request.id.closed
    async with AsyncConnectionId(device_name) as id:
        id.id.bind_addr((host, 0))
        with pytest.raises(VerbsError):
            id.reject()  # not a request


async def test_accept_raises_verbs_error_after_request_was_rejected(
    device_name: str, host: str
) -> None:
    async with (
        listening(device_name, host) as (listener, address),
        connecting_id(device_name, address) as (_, connecting),
    ):
        async with await listener.get_request() as request:
            request.create_qp()
            request.id.reject()
            with pytest.raises(VerbsError) as caught:
                await request.accept()
            assert caught.value.errno == errno.EINVAL
        with pytest.raises(RejectedError):
            await connecting


async def test_requests_beyond_the_backlog_are_rejected(device_name: str, host: str) -> None:
    async with listening(device_name, host, backlog=2) as (listener, address):

        async def ask() -> None:
            async with connecting_id(device_name, address) as (_, connecting):
                await connecting

        tasks = [asyncio.create_task(ask()) for _ in range(3)]
        done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert [type(task.exception()) for task in done] == [RejectedError]
        listener.close()  # rejects pending requests
        results = await asyncio.gather(*rest, return_exceptions=True)
        assert [type(result) for result in results] == [RejectedError] * 2
        with pytest.raises(BufferStateError):
            await listener.get_request()


async def test_withdrawn_request_frees_its_backlog_slot(device_name: str, host: str) -> None:
    """The embedded device reports the withdrawal. A card's driver does not before the accept."""
    async with listening(device_name, host, backlog=1) as (listener, address):
        async with connecting_id(device_name, address, b"first") as (_, connecting):
            await wait_until(lambda: bool(listener._requests))
            first = listener._requests[0]
            assert not first.id._withdrawn
        with pytest.raises(BufferStateError):
            await connecting
        tells = first.id.library.offers("withdrawn")
        assert tells is (device_name == EMBEDDED)
        if tells:
            await wait_until(lambda: first.id._withdrawn)
        async with connecting_id(device_name, address, b"second") as (_, connecting):
            if not tells:
                with pytest.raises(RejectedError):
                    await connecting
                return
            await wait_until(lambda: listener._requests[0] is not first)
            async with await listener.get_request() as request:
                assert request.request is not None
                assert request.request.private_data[:6] == b"second"
                request.create_qp()
                await request.accept()
                await connecting


async def test_closing_connection_id_wakes_waiting_tasks(device_name: str, host: str) -> None:
    async with listening(device_name, host) as (listener, address):
        requests = [request async for request in requests_until_closed(listener)]
        assert requests == []
    async with (
        listening(device_name, host) as (listener, address),
        connecting_id(device_name, address) as (id, connecting),
    ):
        ended = asyncio.create_task(id.wait_disconnected())
        (await listener.get_request()).close()
        id.close()
        for task in (connecting, ended):
            with pytest.raises(BufferStateError):
                await task


async def requests_until_closed(listener: AsyncConnectionId) -> AsyncIterator[AsyncConnectionId]:
    asyncio.get_running_loop().call_soon(listener.close)
    async for request in listener:
        yield request


async def test_cancelled_connect_cannot_be_accepted(device_name: str, host: str) -> None:
    async with listening(device_name, host) as (listener, address):
        async with AsyncConnectionId(device_name) as id:
            (await resolved(id, address)).create_qp()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await id.connect()
        async with await listener.get_request() as request:
            # The initiator has given up. Which of these calls fails depends on when this side
            # notices.
            with pytest.raises((VerbsError, RejectedError), match=r"Invalid argument|timed out"):  # noqa: PT012
                request.create_qp()
                await request.accept()


async def test_resolve_addr_rejects_unusable_addresses(device_name: str, host: str) -> None:
    async with AsyncConnectionId(device_name) as id:
        with pytest.raises(ValueError, match=r"call resolve_addr\(\) first"):
            id.pd  # noqa: B018
        with pytest.raises(ValueError, match="not a numeric IP address"):
            await id.resolve_addr(("localhost", 1))
        with pytest.raises(AddressError) as caught:
            await id.resolve_addr(("192.0.2.1", 1), source=("192.0.2.77", 0))
        assert caught.value.errno in (errno.EADDRNOTAVAIL, errno.ENODEV)


async def test_cm_failure_events_raise_the_corresponding_errors(
    device_name: str, host: str
) -> None:
    """These events cannot be triggered on this machine, so the test delivers them itself."""

    async def after(
        kind: cm.EventType, step: Callable[[AsyncConnectionId], Awaitable[object]]
    ) -> None:
        async with (
            listening(device_name, host) as (_, address),
            AsyncConnectionId(device_name) as id,
        ):
            (await resolved(id, address)).create_qp()
            parameters = cm.ConnectionParameters()
            id._on_event(cm.ConnectionEvent(kind, id.id, None, -errno.EHOSTUNREACH, parameters))
            await step(id)

    with pytest.raises(RouteError):
        await after(cm.EventType.ROUTE_ERROR, AsyncConnectionId.resolve_route)
    with pytest.raises(UnreachableError):
        await after(cm.EventType.UNREACHABLE, AsyncConnectionId.connect)
    async with listening(device_name, host) as (listener, _):
        waiting = asyncio.create_task(listener.get_request())
        await asyncio.sleep(0)
        removal = cm.ConnectionEvent(
            cm.EventType.DEVICE_REMOVAL, listener.id, None, 0, cm.ConnectionParameters()
        )
        listener._on_event(removal)
        with pytest.raises(ConnectionManagerError, match="the device is being removed"):
            await waiting


async def test_connection_id_rejects_invalid_calls(device_name: str, host: str) -> None:
    with pytest.raises(DeviceNotFoundError):
        AsyncConnectionId("no_such_device")
    async with AsyncConnectionId(device_name) as id:
        with pytest.raises(ValueError, match="backlog must be at least 1, not 0"):
            id.listen(0)
        with pytest.raises(ValueError, match=r"call listen\(\) first"):
            await id.get_request()
        id.id.bind_addr((host, 0))
        queue = id.create_qp()
        with pytest.raises(ValueError, match="already has a queue pair"):
            id.create_qp()
        assert id.queue is queue
    async with listening(device_name, host) as (listener, address):
        async with AsyncConnectionId(device_name) as id:
            id._device = "mlx5_9"
            with pytest.raises(ConnectionManagerError, match="not 'mlx5_9'"):
                await id.resolve_addr(address)
        async with AsyncConnectionId(device_name) as id:
            (await resolved(id, address)).create_qp()
            much = cm.ConnectionParameters(bytes(300))
            with pytest.raises(LimitError):
                await id.connect(much)
            connecting = asyncio.create_task(id.connect())
            async with await listener.get_request() as request:
                request.create_qp()
                with pytest.raises(LimitError):
                    await request.accept(much)
                with pytest.raises(LimitError):
                    request.reject(bytes(300))
                request.reject()
            with pytest.raises(RejectedError):
                await connecting


async def test_disconnect_from_another_thread_raises_wrong_loop_error(
    device_name: str, host: str
) -> None:
    async with connected(device_name, host) as (one, two):
        for end in (one.id.disconnect, one.id.close):
            with pytest.raises(WrongLoopError, match="used in thread"):
                await asyncio.to_thread(end)
        await one.send(b"hello")
        assert bytes((await two.receives.get())[1]) == b"hello"


async def test_async_queue_pair_accepts_a_synchronous_id(device: verbs.Device, host: str) -> None:
    with cm.EventChannel(device.library) as channel, channel.create_id() as id:
        id.bind_addr((host, 0))
        assert id.context is not None
        with id.context.alloc_pd() as pd:
            async with aiordma.AsyncQueuePair(pd, ROOM, id=id) as queue:
                assert queue.qp is id.qp
                with pytest.raises(TypeError, match="source_qpn"):
                    aiordma.AsyncQueuePair(pd, ROOM, id=id, source_qpn=1)


def test_unclosed_connection_id_warns_when_event_loop_closes(device_name: str, host: str) -> None:
    async def forget() -> None:
        id = AsyncConnectionId(device_name)
        id.id.bind_addr((host, 0))
        id.create_qp()

    with pytest.warns(ResourceWarning, match="AsyncConnectionId.*not closed before its event loop"):
        asyncio.run(forget())
    loop = asyncio.new_event_loop()
    loop.run_until_complete(forget())
    with pytest.warns(ResourceWarning, match="AsyncConnectionId.*not closed before its event loop"):
        loop.close()
