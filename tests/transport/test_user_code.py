"""Test what programs may do in callbacks of the data path and with the awaitables they get."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from aiordma import Config, Connection, ConnectionClosedError, RDMAError, Rights
from aiordma.mr_pool import Block, MemoryPool
from aiordma.verbs import MemoryWindow, ProtectionDomain

from .connection_factory import (
    ALONE,
    SMALL,
    ConnectionFactory,
    check_alive,
    ends,
    pattern,
    yield_loop,
)
from .inside import figures
from .marks import by_cm, one_loop
from .test_dropped import drop

pytestmark = pytest.mark.any_device

LONG = 50_000  # bytes; sent by rendezvous


def step(awaitable: Coroutine[Any, Any, Any]) -> Any:
    """Run one step of a coroutine. Return its result, or None if it is not done."""
    try:
        awaitable.send(None)
    except StopIteration as done:
        return done.value
    return None


async def steps(awaitable: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine to its end, with one step per loop iteration."""
    with suppress(StopIteration):
        while True:
            awaitable.send(None)
            await yield_loop(1)


async def arrived(conn: Connection, count: int) -> None:
    while figures(conn)["arrived"] < count:
        await yield_loop(1)


# ---- in `allocate` -------------------------------------------------------------------------------


@one_loop
async def test_recv_called_from_allocate_gets_the_current_message(
    factory: ConnectionFactory,
) -> None:
    """A task that `allocate` creates can do so if it starts eagerly.

    asyncio.eager_task_factory makes tasks start that way.
    """
    async with factory.pair() as (client, server):
        await client.send(b"first")
        await arrived(server, 1)
        taken: list[bytes] = []

        def allocate(length: int) -> bytearray:
            taken.append(bytes(step(server.recv())))
            return bytearray(length)

        receiving = asyncio.create_task(server.recv_with(allocate))
        await yield_loop(3)
        assert taken == [b"first"]
        assert not receiving.done()
        await client.send(b"next")
        received = await receiving
        assert bytes(received.memory[: received.length]) == b"next"
        await check_alive(client, server)


@pytest.mark.parametrize("length", [5, LONG])
@one_loop
async def test_next_receiver_gets_message_when_allocate_closes_its_receive(
    factory: ConnectionFactory, length: int
) -> None:
    async with factory.pair() as (client, server):

        def allocate(length: int) -> bytearray:
            receiving.close()
            return bytearray(length)

        receiving = server.recv_with(allocate)
        assert step(receiving) is None
        sending = client.send_nowait(pattern(length))
        if length == LONG:
            assert await server.recv() == pattern(length)
            await sending
        else:
            await sending
            await arrived(server, 1)
            step(receiving)
        await check_alive(client, server)


@one_loop
async def test_allocate_is_called_once_when_it_adds_receivers(factory: ConnectionFactory) -> None:
    """Here `allocate` adds other receivers, which look for a message to read."""
    config = Config(eager_size=1024, max_eager_size=1024)
    async with factory.pair(config) as (client, server):
        calls: list[bytearray] = []

        def allocate(length: int) -> bytearray:
            calls.append(bytearray(length))
            others.append(server.recv())
            assert step(others[-1]) is None
            return calls[-1]

        others: list[Any] = []
        receiving = asyncio.create_task(server.recv_with(allocate))
        await yield_loop(2)
        await client.send(pattern(LONG))
        received = await receiving
        assert received.memory is calls[0]
        assert calls == [pattern(LONG)]
        others.clear()
        await check_alive(client, server)


# ---- in the end of a buffer ----------------------------------------------------------------------


BEHIND = pattern(LONG, 1)


class SendsInFinalizer(bytearray):
    """A buffer that sends another message from its finalizer."""

    def __init__(self, data: bytes, conn: Connection, sent: list[Any]) -> None:
        super().__init__(data)
        self._conn, self._sent = conn, sent

    def __del__(self) -> None:
        send_behind(self._conn, self._sent)


def send_behind(conn: Connection, sent: list[Any]) -> None:
    sent.append(conn.send_nowait(BEHIND))


@pytest.mark.parametrize("kind", ["alone", "in a bundle", "joined"])
@one_loop
async def test_send_from_a_buffer_finalizer_follows_earlier_messages(
    factory: ConnectionFactory, kind: str
) -> None:
    """The message that has waited for a credit is sent first and uses that credit."""
    async with factory.pair() as (client, server):
        expected = [pattern(ALONE, n) for n in range(SMALL.data_receives)]
        sent: list[Any] = [client.send_nowait(each) for each in expected]
        if kind == "joined":
            sent.append(client.send_nowait([SendsInFinalizer(b"5", client, sent), pattern(LONG)]))
            expected.append(b"5" + pattern(LONG))
        else:
            sent.append(client.send_nowait(SendsInFinalizer(b"5", client, sent)))
            expected.append(b"5")
        if kind == "in a bundle":
            sent.append(client.send_nowait(b"6"))
            expected.append(b"6")
        for data in (*expected, BEHIND):
            with await server.recv() as message:
                assert bytes(message) == data
        await asyncio.gather(*sent)
        await check_alive(client, server)


# ---- the awaitables ------------------------------------------------------------------------------


@one_loop
async def test_unstarted_send_and_recv_fail_after_connection_is_collected(
    factory: ConnectionFactory,
) -> None:
    async with await factory.listen() as listener:
        client, server = await factory.both(listener)
        late = client.send(b"too late"), client.recv()
        reference = weakref.ref(client)
        kept = [client]
        del client
        with pytest.warns(ResourceWarning, match="was not closed"):
            drop(kept)
        await server.wait_closed()
        while reference() is not None:
            await yield_loop(1)
        for awaitable in late:
            await ends(awaitable, ConnectionClosedError)


@one_loop
async def test_write_and_read_reference_the_connection_until_done(
    factory: ConnectionFactory,
) -> None:
    async with factory.sharing(5) as (client, _, _, remote):
        with client.alloc(5) as here:
            for operation in client.write(here, remote), client.read(remote, here):
                assert client in gc.get_referents(operation)
                await operation
                assert {*gc.get_referents(operation)} == {None}


@by_cm  # asyncio itself warns about sockets left open
def test_send_and_recv_fail_after_the_event_loop_is_closed(factory: ConnectionFactory) -> None:
    """A message that has already arrived can still be received."""
    loop = asyncio.new_event_loop()

    kept: list[Any] = []

    async def leave() -> tuple[Any, ...]:
        listener = await factory.listen()
        client, server = await factory.both(listener)
        kept[:] = [listener, client, server]
        await client.send(b"here")
        await arrived(server, 1)
        return server.recv(), server.recv(), server.send(b"x")

    first, second, sending = loop.run_until_complete(leave())
    with pytest.warns(ResourceWarning):
        loop.close()
    drop(kept)
    assert bytes(step(first)) == b"here"
    for awaitable in (second, sending):
        with pytest.raises(ConnectionClosedError):
            step(awaitable)


@by_cm  # asyncio itself warns about sockets left open
def test_pending_receives_can_be_garbage_collected_with_the_loop(
    factory: ConnectionFactory,
) -> None:
    """All these objects form one cycle, which the collector may take apart in any order."""
    for _ in range(5):
        loop = asyncio.new_event_loop()
        kept: list[Any] = []

        async def leave(kept: list[Any]) -> None:
            listener = await factory.listen()
            kept[:] = [listener, *await factory.both(listener)]
            for conn in kept[1:]:
                waiting = [conn.recv() for _ in range(3)]
                for each in waiting:
                    each.send(None).add_done_callback(waiting.append)

        loop.run_until_complete(leave(kept))
        with pytest.warns(ResourceWarning):
            loop.close()
        del loop
        drop(kept)
        gc.collect()


@one_loop
async def test_awaitables_created_without_a_connection_raise_errors(
    factory: ConnectionFactory,
) -> None:
    async with factory.pair() as (client, server):
        receiving, sending, future = server.recv(), client.send(b""), client.send_nowait(b"")
        receiving.close()
        sending.close()
        await future
        for awaitable in (
            type(receiving)(),
            type(sending)(),
            Connection.__new__(Connection).send(b""),
        ):
            with pytest.raises(RuntimeError):
                step(awaitable)
        with pytest.raises(AttributeError):
            Connection.__new__(Connection).send_nowait(b"")
        with pytest.raises(TypeError):
            type(future)()


# ---- failures ------------------------------------------------------------------------------------


NO_MEMORY = pytest.mark.parametrize("error", [OSError(12, "cannot register"), MemoryError()])


@contextmanager
def failing_allocation(conn: Connection, method: str, error: Exception) -> Iterator[list[int]]:
    """Clear the pool's ready blocks and make `method` raise. Yield the list of requested sizes."""
    asked: list[int] = []

    def refuse(pool: MemoryPool, size: int) -> Block:
        asked.append(size)
        raise error

    conn._endpoint.driver.pool.take_cached_blocks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryPool, method, refuse)
        yield asked


@NO_MEMORY
@one_loop
async def test_failed_bundle_allocation_fails_only_its_messages(
    factory: ConnectionFactory, error: Exception
) -> None:
    async with factory.pair(Config()) as (client, server):
        first = client.send_nowait(b"alone")
        others = [client.send_nowait(pattern(300, n)) for n in range(5)]
        with failing_allocation(client, "_block", error):
            for future in others:
                await ends(future, type(error))
        await first
        assert bytes(await server.recv()) == b"alone"
        await check_alive(client, server)


@NO_MEMORY
@one_loop
async def test_control_messages_are_sent_when_memory_is_exhausted(
    factory: ConnectionFactory, error: Exception
) -> None:
    """Blocks are reserved for control messages."""
    async with factory.pair() as (client, server):
        with client.alloc(8) as buffer:
            with failing_allocation(client, "_block", error):
                share = await client.send_region(buffer)
                remote = await server.recv_region()
            share.revoke()
            remote._mark_unusable()
        await check_alive(client, server)


@NO_MEMORY
@one_loop
async def test_no_message_is_lost_when_receive_buffer_allocation_fails(
    factory: ConnectionFactory, error: Exception
) -> None:
    """No message may be lost in the meantime."""
    async with factory.pair() as (client, server):
        for n in range(SMALL.data_receives):
            await client.send(pattern(ALONE, n))
        held = []
        with failing_allocation(server, "_block_if_first", error) as refused:
            for n in range(SMALL.data_receives):
                server._endpoint.driver.pool.take_cached_blocks()
                held.append(await server.recv())
                assert bytes(held[-1]) == pattern(ALONE, n)
            assert refused
        for n in range(SMALL.data_receives):
            sending = client.send_nowait(pattern(ALONE, n))
            with await server.recv() as message:
                assert bytes(message) == pattern(ALONE, n)
            await sending
        for message in held:
            message.release()
        await check_alive(client, server)


def test_keyboard_interrupt_in_callback_does_not_skip_later_callbacks(
    factory: ConnectionFactory,
) -> None:
    loop = asyncio.new_event_loop()
    called: list[str] = []

    def interrupt(_: object) -> None:
        called.append("first")
        raise KeyboardInterrupt

    async def talk() -> None:
        async with factory.pair() as (client, server):
            future = client.send_nowait(b"x")
            future.add_done_callback(interrupt)
            future.add_done_callback(lambda _: called.append("second"))
            while len(called) < 2:
                await yield_loop(1)
            assert bytes(await server.recv()) == b"x"

    task = loop.create_task(talk())
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(task)
    loop.run_until_complete(task)
    assert called == ["first", "second"]
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


class Outcome(BaseException):
    """A BaseException that is not an Exception, like pytest's `Failed`."""


@pytest.mark.parametrize("kind", [LookupError, asyncio.CancelledError, GeneratorExit, Outcome])
async def test_exception_in_a_callback_is_reported_to_the_loop(
    factory: ConnectionFactory, reported: list[dict[str, Any]], kind: type[BaseException]
) -> None:
    """Tasks that wait for something else must not get the exception."""

    def fail(_: object) -> None:
        raise kind

    async with factory.pair() as (client, server):
        for _ in range(5):
            future = client.send_nowait(b"x")
            future.add_done_callback(fail)
            future.add_done_callback(fail)
            while not future.done():
                await yield_loop(1)
            assert bytes(await server.recv()) == b"x"
    assert [type(context["exception"]) for context in reported] == [kind] * 10


@pytest.mark.parametrize(
    "kind", [LookupError, asyncio.CancelledError, Outcome, GeneratorExit, StopIteration]
)
async def test_await_raises_exceptions_from_progress_and_allocate(
    factory: ConnectionFactory, kind: type[BaseException]
) -> None:
    """Tasks that wait for something else must not get the exception."""

    def fail(_: int) -> Any:
        raise kind

    size = 9 << 20  # longer than one work request allows
    told = RuntimeError if kind in (GeneratorExit, StopIteration) else kind
    async with factory.sharing(size, config=Config()) as (client, server, _, remote):
        waiting = asyncio.create_task(server.recv())
        await ends(client.write(bytes(size), remote, progress=fail), told)
        await client.send(b"x")
        assert bytes(await waiting) == b"x"
        for waits in True, False:
            receiving = asyncio.create_task(server.recv_with(fail))
            await yield_loop(waits)
            await client.send(b"y")
            await ends(receiving, told)
            assert bytes(await server.recv()) == b"y"


class Garbage:
    """An object that only the cycle collector can free. Its finalizer calls `call`.

    The collector can run in any thread, but the call must be made in the creating thread. In
    another thread, the finalizer replaces the object with a new one.
    """

    def __init__(self, call: Callable[[], object], thread: int | None = None) -> None:
        self._call = call
        self._thread = thread or threading.get_ident()
        self._myself = self

    def __del__(self) -> None:
        if self._thread == threading.get_ident():
            self._call()
        else:
            Garbage(self._call, self._thread)


@one_loop
async def test_send_raises_when_connection_is_aborted_during_window_creation(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector can end the connection while a memory window is created."""
    make_window = ProtectionDomain.alloc_mw
    async with factory.pair() as (client, _):

        def end_first(pd: ProtectionDomain) -> MemoryWindow:
            client.abort()
            return make_window(pd)

        monkeypatch.setattr(ProtectionDomain, "alloc_mw", end_first)
        with pytest.raises(ConnectionClosedError, match="was aborted"):
            await client.send(pattern(LONG))


@one_loop
async def test_send_fails_when_a_finalizer_fills_the_send_queue(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finalizer that writes can take the entries at that point.

    Nothing may be left of the failed send.
    """
    make_window = ProtectionDomain.alloc_mw
    writing: list[asyncio.Task[None]] = []
    async with factory.pair() as (client, server):
        with server.alloc(8) as target, client.alloc(8) as source:
            await server.send_region(target, access=Rights.WRITE)
            remote = await client.recv_region()

            def write_first(pd: ProtectionDomain) -> MemoryWindow:
                if not writing:
                    for _ in range(3 * SMALL.send_queue):
                        coroutine = client.write(source, remote)
                        coroutine.send(None)
                        writing.append(asyncio.ensure_future(steps(coroutine)))
                return make_window(pd)

            with monkeypatch.context() as patch:
                patch.setattr(ProtectionDomain, "alloc_mw", write_first)
                # Without brief spins, no write completes before all are posted.
                patch.setattr(client._endpoint.driver.table.wakeups, "poll_for", None)
                with pytest.raises(RDMAError, match="filled the send queue"):
                    await client.send([pattern(LONG, n) for n in range(4)])
            await asyncio.gather(*writing)
            assert not figures(client)["rendezvous"]
            await check_alive(client, server)


@pytest.mark.parametrize("before", range(SMALL.data_receives))
@one_loop
async def test_finalizer_that_sends_does_not_use_another_sends_credit(
    factory: ConnectionFactory, before: int
) -> None:
    """The collector runs in the middle of another send, with `before` messages ahead of it.

    From Python 3.12 on, the collector runs only between two steps of Python code.
    """
    first = gc.get_threshold()
    data = pattern(20_000)  # too long to wait for a shared frame
    async with await factory.listen(config := replace(SMALL, eager_size=32 << 10)) as listener:
        for after in range(1, 12):
            client, server = await factory.both(listener, config)
            async with client, server:
                for _ in range(2 * SMALL.data_receives):  # leaves ready blocks in the pool
                    await check_alive(client, server)
                sent: list[Any] = [client.send_nowait(data) for _ in range(before)]
                gc.collect()
                Garbage(partial(send_behind, client, sent))
                gc.set_threshold(gc.get_count()[0] + after)
                try:
                    sent.append(client.send_nowait(data))
                finally:
                    gc.set_threshold(*first)
                gc.collect()
                arrived = [bytes(await server.recv()) for _ in range(before + 2)]
                await asyncio.gather(*sent)
                assert sorted(arrived) == sorted([data] * (before + 1) + [BEHIND])


@one_loop
async def test_connection_can_be_aborted_during_garbage_collection(
    factory: ConnectionFactory,
) -> None:
    """Objects in use at that moment must stay valid."""
    first = gc.get_threshold()
    async with await factory.listen(replace(SMALL, data_receives=40)) as listener:
        for after in range(1, 60, 2):
            client, server = await factory.both(listener, replace(SMALL, data_receives=40))
            receiving = [server.recv() for _ in range(3)]
            for each in receiving:
                step(each)
            sending = [client.send_nowait(pattern(size)) for size in (5, 2000, ALONE) * 8]
            gc.collect()
            Garbage(server.abort)
            Garbage(client.abort)
            gc.set_threshold(after)
            try:
                await yield_loop(50)
            finally:
                gc.set_threshold(*first)
            gc.collect()  # frees objects kept by a tracer
            for future in sending:
                with suppress(RDMAError):
                    await future
            await asyncio.gather(client.wait_closed(), server.wait_closed())
            for each in receiving:
                each.close()
