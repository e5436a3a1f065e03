"""Test several event loops: in concurrent threads, one after another, and use in the wrong loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import re
import threading
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from aiordma import Config, Connection, Listener, start_server, streams
from aiordma.errors import ConnectionBrokenError, WrongLoopError
from aiordma.verbs import live
from tests.combinations import LOOPS

from .connection_factory import (
    SMALL,
    ConnectionFactory,
    check_alive,
    echo,
    ends,
    pattern,
    yield_loop,
)
from .marks import by_cm, one_loop

LIMIT = 300.0


class LoopThread:
    """A thread that runs a separate event loop."""

    def __init__(self, kind: str) -> None:
        self.loop = LOOPS[kind]()
        self._thread = threading.Thread(target=self._run, name=f"loop on {kind}")
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def start(self, main: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(main, self.loop)

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        return self.start(main).result(LIMIT)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()


@contextmanager
def threads(*kinds: str) -> Iterator[list[LoopThread]]:
    made = [LoopThread(kind) for kind in kinds]
    try:
        yield made
    finally:
        for thread in made:
            thread.end()


async def talk(factory: ConnectionFactory, port: int, seed: int) -> None:
    async with await factory.connect(port) as conn:
        for size in (0, 100, 5000, 200_000):
            data = pattern(size, seed)
            sending = asyncio.create_task(conn.send(data))
            with await conn.recv() as message:
                assert message == data
            await sending


def test_servers_and_clients_communicate_across_threads(factory: ConnectionFactory) -> None:
    """Four loops of two kinds share one device. Each has a server and talks to all servers."""
    kinds = ["asyncio", "uvloop", "asyncio", "uvloop"]

    async def serve() -> Any:
        return await start_server(echo, factory.host, config=SMALL, **factory.where)

    async def visit(ports: list[int], number: int) -> None:
        await asyncio.gather(*(talk(factory, port, number) for port in ports for _ in range(2)))

    with threads(*kinds) as loops:
        servers = [thread.run(serve()) for thread in loops]
        ports = [server.port for server in servers]
        visits = [thread.start(visit(ports, number)) for number, thread in enumerate(loops)]
        for each in visits:
            each.result(LIMIT)
        # The other loops continue after one has ended.
        loops[0].run(servers[0].close())
        for thread in loops[1:]:
            thread.run(visit(ports[1:], 9))
        for thread, server in zip(loops[1:], servers[1:], strict=True):
            thread.run(server.close())


# ---- the wrong place -----------------------------------------------------------------------------

Use = Callable[[Connection], Awaitable[object]]


async def abort(conn: Connection) -> None:
    conn.abort()


USES: dict[str, Use] = {
    "send": lambda conn: conn.send(b"x"),
    "recv": lambda conn: conn.recv(),
    "recv_into": lambda conn: conn.recv_into(bytearray(10)),
    "async for": lambda conn: anext(aiter(conn)),
    "request_region": lambda conn: conn.request_region(64),
    "recv_region": lambda conn: conn.recv_region(),
    "wait_closed": lambda conn: conn.wait_closed(),
    "close": lambda conn: conn.close(),
    "abort": abort,
}


@by_cm
@pytest.mark.parametrize("other", LOOPS)
async def test_calls_from_another_event_loop_raise_wrong_loop_error(
    factory: ConnectionFactory, other: str
) -> None:
    """The connection must work as before afterwards."""

    async def use_all(conn: Connection) -> None:
        for name, use in USES.items():
            error = await ends(use(conn), WrongLoopError)
            assert re.search(r"another event loop.*connection_factory\.py:\d+", str(error)), name

    async with factory.pair() as (client, server):
        with threads(other) as (thread,):
            await asyncio.wrap_future(thread.start(use_all(client)))
        await check_alive(client, server)


@by_cm
@one_loop
async def test_calls_from_a_thread_without_a_loop_raise_wrong_loop_error(
    factory: ConnectionFactory,
) -> None:
    async with factory.pair() as (client, server):
        for use in (
            lambda: client.send_nowait(b"x"),
            lambda: client.alloc(64),
            lambda: client.register(bytearray(64)),
            client.batch,
            client.abort,
        ):
            with pytest.raises(WrongLoopError, match="run_coroutine_threadsafe"):
                await asyncio.to_thread(use)
        await check_alive(client, server)


@by_cm
@one_loop
async def test_server_calls_from_another_event_loop_raise_wrong_loop_error(
    factory: ConnectionFactory,
) -> None:
    async def refused(use: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(WrongLoopError, match="another event loop"):
            await use()

    where: dict[str, Any] = {**factory.where, "config": SMALL}
    async with (
        await factory.listen() as listener,
        await start_server(echo, factory.host, **where) as server,
        await streams.create_server(asyncio.Protocol, factory.host, **where) as stream_server,
    ):

        async def close_stream_server() -> None:
            stream_server.close()

        with threads("asyncio") as (thread,):
            for use in (
                listener.accept,
                listener.close,
                server.close,
                server.serve_forever,
                stream_server.start_serving,
                close_stream_server,
            ):
                await asyncio.wrap_future(thread.start(refused(use)))
        ends = await factory.both(listener)
        await check_alive(*ends)
        for end in ends:
            await end.close()


@by_cm
@one_loop
async def test_stream_call_from_another_thread_sends_no_data(factory: ConnectionFactory) -> None:
    """Data of a refused call must not become part of the stream."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()

    where: dict[str, Any] = {**factory.where, "config": SMALL}
    async with await streams.start_stream_server(answer, factory.host, **where) as server:
        reader, writer = await streams.open_connection(factory.host, server.address[1], **where)
        transport = writer.transport
        assert isinstance(transport, streams.StreamTransport)
        for use in (
            lambda: transport.write(b"lost"),
            transport.write_eof,
            transport.pause_reading,
            transport.resume_reading,
            transport.close,
            transport.abort,
        ):
            await ends(asyncio.to_thread(use), WrongLoopError)
        writer.write(b"hello")
        writer.write_eof()
        assert await reader.read() == b"hello"
        writer.close()
        await writer.wait_closed()


def test_connection_can_be_used_while_its_loop_is_not_running(factory: ConnectionFactory) -> None:
    """The loop's own thread may use the connection while the loop does not run."""
    loop = asyncio.new_event_loop()
    try:

        async def make() -> tuple[Listener, Connection, Connection]:
            listener = await factory.listen()
            return listener, *await factory.both(listener)

        listener, client, server = loop.run_until_complete(make())
        with client.alloc(64) as buffer:
            buffer.view[:] = bytes(64)
        client.abort()
        loop.run_until_complete(client.wait_closed())
        loop.run_until_complete(server.close())
        loop.run_until_complete(listener.close())
    finally:
        loop.close()


# ---- one loop after the other --------------------------------------------------------------------


def test_asyncio_run_warns_about_open_objects_and_closes_them(
    factory: ConnectionFactory, loop_name: str
) -> None:
    """Each of several runs in one process must leave nothing behind."""
    where: dict[str, Any] = {**factory.where, "config": SMALL}
    left: list[Any] = []

    async def main() -> None:
        listener = await factory.listen()
        client, server = await factory.both(listener)
        await check_alive(client, server)
        waiting = asyncio.create_task(server.recv())
        serving = await start_server(echo, factory.host, **where)
        served = await factory.connect(serving.port)
        await served.send(b"x")
        assert bytes(await served.recv()) == b"x"
        stream_server = await streams.create_server(asyncio.Protocol, factory.host, **where)
        stream, _ = await streams.create_connection(
            asyncio.Protocol, factory.host, stream_server.address[1], **where
        )
        stream.write(b"x")
        left[:] = [listener, client, server, serving, served, stream_server, stream, waiting]

    before = live()
    for _ in range(3):
        with (
            pytest.warns(ResourceWarning, match="was not closed before its event loop") as caught,
            asyncio.Runner(debug=True, loop_factory=LOOPS[loop_name]) as runner,
        ):
            runner.run(main())
        texts = [str(warning.message) for warning in caught]
        for what in ("<Listener on", "<Connection on", "<Server of", "<StreamServer with"):
            assert any(text.startswith(what) for text in texts), (what, texts)
        assert any(f"{__file__}:" in text for text in texts)
        assert live() == before
        assert left[1].closed

    async def use() -> None:
        await ends(left[1].send(b"x"), WrongLoopError)

    asyncio.run(use())
    left.clear()


Left = Callable[[ConnectionFactory], Coroutine[Any, Any, Any]]


async def connected(
    factory: ConnectionFactory, config: Config = SMALL
) -> tuple[Listener, Connection, Connection]:
    listener = await factory.listen(config)
    return listener, *await factory.both(listener, config)


def waiting(
    begin: Callable[[Listener, Connection, Connection], Awaitable[Any]],
    config: Config = SMALL,
    iterations: int = 5,
) -> Left:
    """Return a function that leaves its connection open, with a task that is still waiting."""

    async def leave(factory: ConnectionFactory) -> Any:
        things = await connected(factory, config)
        task = asyncio.ensure_future(begin(*things))
        await yield_loop(iterations)
        assert not task.done()
        return task, things

    return leave


async def read_on(listener: Listener, client: Connection, server: Connection) -> None:
    """Keep an operation of several work requests in flight until the loop ends."""
    target = await client.request_region(1 << 20)
    memory = bytes(1 << 20)
    while True:
        await client.write(memory, target)


async def close_late(listener: Listener, client: Connection, server: Connection) -> None:
    client.send_nowait(bytes(3_000_000))
    await client.close()


async def exhausted(listener: Listener, client: Connection, server: Connection) -> object:
    most = 1 << client.pool_statistics().limit.bit_length() - 2
    return [await client.lease(most) for _ in range(4)]


async def aborted(factory: ConnectionFactory) -> Any:
    listener, client, server = await connected(factory)
    client.abort()
    return listener, client, server


async def not_accepted(factory: ConnectionFactory) -> Any:
    listener = await factory.listen()
    return listener, [await factory.connect(listener.port) for _ in range(3)]


async def in_the_handshake(factory: ConnectionFactory) -> Any:
    listener = await factory.listen()
    connecting = [asyncio.ensure_future(factory.connect(listener.port)) for _ in range(3)]
    await yield_loop(6)  # a listener takes one request per iteration
    return listener, connecting


async def more_than_one_queue_of_completions(factory: ConnectionFactory) -> Any:
    config = replace(SMALL, send_queue=1024)
    listener = await factory.listen(config)
    return listener, [await factory.both(listener, config) for _ in range(3)]


async def servers(factory: ConnectionFactory) -> None:
    where: dict[str, Any] = {**factory.where, "config": SMALL}
    server = await start_server(echo, factory.host, **where)
    client = await factory.connect(server.port)
    await client.send(b"x")
    (await client.recv()).release()
    await streams.create_server(asyncio.Protocol, factory.host, **where)


LEFT: dict[str, Left] = {
    "everything": connected,
    "aborted": aborted,
    "not accepted": not_accepted,
    "during the handshake": in_the_handshake,
    "many": more_than_one_queue_of_completions,
    "servers": servers,
    "recv": waiting(lambda listener, client, server: server.recv()),
    "accept": waiting(lambda listener, client, server: listener.accept()),
    "send": waiting(lambda listener, client, server: client.send(bytes(3_000_000))),
    "close": waiting(close_late),
    "lease": waiting(exhausted, replace(SMALL, pool_limit=64 << 20)),
    "request_region": waiting(
        lambda listener, client, server: client.request_region(64), iterations=2
    ),
    "write": waiting(read_on),
}


# The test starts no task that is left waiting in these cases. uvloop is tested only with them,
# because closing a uvloop loop runs its tasks and reports those that are still waiting.
WITHOUT_TASKS = ("everything", "aborted", "not accepted", "many", "servers")


@one_loop
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dropped"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("asyncio", name) for name in LEFT] + [("uvloop", name) for name in WITHOUT_TASKS],
)
def test_closing_the_loop_releases_all_verbs_objects(
    factory: ConnectionFactory, kind: str, name: str, keep: bool
) -> None:
    """This must hold whether or not the program keeps the objects, and must not affect the next
    loop.
    """
    before = live()
    kept: list[Any] = []

    async def leave() -> None:
        left = await LEFT[name](factory)
        if keep:
            kept.append(left)
        for task in asyncio.all_tasks():
            task._log_destroy_pending = False  # type: ignore[attr-defined]

    async def come() -> None:
        async with factory.pair() as ends:
            await check_alive(*ends)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # covers asyncio's sockets too
        loop = LOOPS[kind]()
        loop.run_until_complete(leave())
        loop.close()
        assert live() == before
        asyncio.run(come())
        kept.clear()
        del loop
        gc.collect()


@one_loop
def test_peer_raises_connection_broken_error_when_the_loop_closes(
    factory: ConnectionFactory,
) -> None:
    """The program uses a new loop for each call, and drops its connections with the loop."""

    async def serve(calls: int) -> None:
        async with await factory.listen() as listener:
            port.set_result(listener.port)
            for _ in range(calls):
                async with await listener.accept() as conn:
                    (await conn.recv()).release()
                    await ends(conn.recv(), ConnectionBrokenError)

    async def visit() -> None:
        conn = await factory.connect(port.result(LIMIT))
        await conn.send(b"hello")

    port: concurrent.futures.Future[int] = concurrent.futures.Future()
    with threads("asyncio") as (thread,), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        serving = thread.start(serve(3))
        for _ in range(3):
            loop = asyncio.new_event_loop()
            loop.run_until_complete(visit())
            loop.close()
        serving.result(LIMIT)
        del loop
        gc.collect()


@by_cm
def test_dropped_listener_warns_once_when_the_warning_is_recorded(
    factory: ConnectionFactory,
) -> None:
    """A recorded warning keeps the listener alive until its loop has ended."""
    before = live()

    async def main() -> None:
        await factory.listen()

    with pytest.warns(ResourceWarning, match=r"^<Listener on .*, listening>.* not closed$") as kept:
        asyncio.run(main())
    assert [type(warning.source) for warning in kept] == [Listener]
    assert live() == before
