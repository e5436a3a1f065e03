"""Several event loops: in several threads at once, one after the other, and the wrong one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aiordma import Connection, Listener, start_server, streams
from aiordma.errors import ConnectionClosedError, WrongLoopError
from aiordma.verbs import live
from tests.combinations import LOOPS

from .connection_factory import SMALL, ConnectionFactory, check_alive, ends, pattern
from .marks import by_cm, one_loop

LIMIT = 300.0


class LoopThread:
    """An event loop of its own in a thread of its own."""

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


async def echo(conn: Connection) -> None:
    async for message in conn:
        with message:
            await conn.send(message)


async def talk(factory: ConnectionFactory, port: int, seed: int) -> None:
    async with await factory.connect(port) as conn:
        for size in (0, 100, 5000, 200_000):
            data = pattern(size, seed)
            sending = asyncio.create_task(conn.send(data))
            with await conn.recv() as message:
                assert message == data
            await sending


def test_servers_and_clients_in_many_threads(factory: ConnectionFactory) -> None:
    """One device, four loops of two kinds; each has a server and talks with all the servers."""
    kinds = ["asyncio", "uvloop", "asyncio", "uvloop"]

    async def serve() -> Any:
        return await start_server(
            echo, factory.host, device=factory.device, via=factory.via, config=SMALL
        )

    async def visit(ports: list[int], number: int) -> None:
        await asyncio.gather(*(talk(factory, port, number) for port in ports for _ in range(2)))

    with threads(*kinds) as loops:
        servers = [thread.run(serve()) for thread in loops]
        ports = [server.port for server in servers]
        visits = [thread.start(visit(ports, number)) for number, thread in enumerate(loops)]
        for each in visits:
            each.result(LIMIT)
        # One loop ends, the others go on.
        loops[0].run(servers[0].close())
        for thread in loops[1:]:
            thread.run(visit(ports[1:], 9))
        for thread, server in zip(loops[1:], servers[1:], strict=True):
            thread.run(server.close())


# ---- the wrong place -----------------------------------------------------------------------------

Use = Callable[[Connection], Awaitable[object]]


async def abort(conn: Connection) -> None:
    conn.abort()


async def send_nowait(conn: Connection) -> None:
    await conn.send_nowait(b"x")


async def alloc(conn: Connection) -> None:
    conn.alloc(64)


async def register(conn: Connection) -> None:
    conn.register(bytearray(64))


async def batch(conn: Connection) -> None:
    conn.batch()


USES: dict[str, Use] = {
    "send": lambda conn: conn.send(b"x"),
    "send_nowait": send_nowait,
    "recv": lambda conn: conn.recv(),
    "recv_into": lambda conn: conn.recv_into(bytearray(10)),
    "async for": lambda conn: anext(aiter(conn)),
    "request_region": lambda conn: conn.request_region(64),
    "recv_region": lambda conn: conn.recv_region(),
    "alloc": alloc,
    "register": register,
    "batch": batch,
    "close": lambda conn: conn.close(),
    "abort": abort,
    "wait_closed": lambda conn: conn.wait_closed(),
}


@by_cm
@pytest.mark.parametrize("other", LOOPS)
async def test_a_connection_in_another_loop(factory: ConnectionFactory, other: str) -> None:
    """Each use is refused, and the connection has not noticed."""

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
async def test_a_connection_in_a_thread_without_a_loop(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        for use in (lambda: client.send_nowait(b"x"), client.abort, lambda: client.alloc(64)):
            with pytest.raises(WrongLoopError, match="run_coroutine_threadsafe"):
                await asyncio.to_thread(use)
        await check_alive(client, server)


@by_cm
@one_loop
async def test_listeners_and_servers_in_another_loop(factory: ConnectionFactory) -> None:
    async def refused(use: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(WrongLoopError, match="another event loop"):
            await use()

    where: dict[str, Any] = {"device": factory.device, "via": factory.via, "config": SMALL}
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
async def test_a_stream_in_another_thread(factory: ConnectionFactory) -> None:
    """What was refused has not become a part of the stream."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()

    where: dict[str, Any] = {"device": factory.device, "via": factory.via, "config": SMALL}
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
            with pytest.raises(WrongLoopError):
                await asyncio.to_thread(use)
        writer.write(b"hello")
        writer.write_eof()
        assert await reader.read() == b"hello"
        writer.close()
        await writer.wait_closed()


def test_between_two_runs_of_a_loop(factory: ConnectionFactory) -> None:
    """Its own thread may use it while the loop does not run."""
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


def test_loops_that_end_with_everything_open(factory: ConnectionFactory, loop_name: str) -> None:
    """`asyncio.run` several times: each warns of what was left open, and leaves nothing behind."""
    where: dict[str, Any] = {"device": factory.device, "via": factory.via, "config": SMALL}
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
        with pytest.raises(WrongLoopError):
            await left[1].send(b"x")

    asyncio.run(use())
    left.clear()


@by_cm  # asyncio itself complains of sockets that were left open
def test_a_loop_that_is_closed_without_a_word(factory: ConnectionFactory) -> None:
    """What it had is given back when the next loop comes to use the device."""
    before = live()
    loop = asyncio.new_event_loop()
    kept: list[Any] = []

    async def leave() -> None:
        listener = await factory.listen()
        kept[:] = [listener, *await factory.both(listener)]

    async def come() -> None:
        async with factory.pair() as ends:
            await check_alive(*ends)

    loop.run_until_complete(leave())
    loop.close()
    with pytest.warns(ResourceWarning, match="was not closed before its event loop"):
        asyncio.run(come())
    assert live() == before
    with pytest.raises(ConnectionClosedError, match="has been closed"):
        kept[1].alloc(64)
    kept.clear()


@by_cm
def test_a_dropped_listener_that_its_warning_keeps(factory: ConnectionFactory) -> None:
    """What records warnings keeps the listener until its loop has ended: it is closed once."""
    before = live()

    async def main() -> None:
        await factory.listen()

    with pytest.warns(ResourceWarning, match=r"^<Listener on .*, listening>.* not closed$") as kept:
        asyncio.run(main())
    assert [type(warning.source) for warning in kept] == [Listener]
    assert live() == before
