"""Test `start_server`, which runs a handler for every connection."""

from __future__ import annotations

import asyncio
import functools
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock

import pytest

from aiordma import (
    Connection,
    ConnectionBrokenError,
    ConnectionClosedError,
    Server,
    reconnect,
    start_server,
    transport,
)
from aiordma.errors import RejectedError
from aiordma.transport import Address, Handler

from .connection_factory import (
    NEVER,
    SMALL,
    ConnectionFactory,
    echo,
    ends,
    limits_pass,
    pattern,
    told_once,
    yield_loop,
)
from .marks import one_loop


async def serve(factory: ConnectionFactory, handler: Handler) -> Server:
    return await start_server(handler, factory.host, 0, config=SMALL, **factory.where)


async def serves(server: Server, count: int) -> None:
    """Wait until the server has `count` connections. A client can be connected earlier."""
    while server.connections < count:
        await yield_loop(1)


async def test_server_echoes_to_several_clients(factory: ConnectionFactory) -> None:
    async with await serve(factory, echo) as server:
        assert server.host == factory.host
        assert server.device == factory.device
        clients = await asyncio.gather(*(factory.connect(server.port) for _ in range(5)))

        async def talk(seed: int, client: Connection) -> None:
            for size in (0, 10, 5000, 100_000):
                await client.send(pattern(size, seed))
                with await client.recv() as message:
                    assert message == pattern(size, seed)

        await asyncio.gather(*(talk(n, client) for n, client in enumerate(clients)))
        assert server.connections == 5
        await asyncio.gather(*(client.close() for client in clients))
        await asyncio.gather(*server._tasks)
        assert server.connections == 0


@one_loop
async def test_close_cancels_handlers_after_the_grace_period(factory: ConnectionFactory) -> None:
    """Handlers that finish within the grace are not cancelled. No new connection is accepted."""
    ended: list[str] = []
    started: asyncio.Queue[None] = asyncio.Queue()

    async def answer(conn: Connection) -> None:
        name = bytes(await conn.recv()).decode()
        started.put_nowait(None)
        try:
            await conn.recv()
            await conn.send(b"answer")
        except asyncio.CancelledError:
            ended.append(f"{name} cancelled")
            raise
        ended.append(f"{name} by itself")

    server = await serve(factory, answer)
    async with (
        await factory.connect(server.port) as good,
        await factory.connect(server.port) as bad,
    ):
        for client, name in ((good, b"good"), (bad, b"bad")):
            await client.send(name)
            await started.get()
        closing = asyncio.create_task(server.close(grace=NEVER))
        await yield_loop(1)
        await ends(factory.connect(server.port), RejectedError)
        assert not ended
        await good.send(b"go on")
        assert bytes(await good.recv()) == b"answer"
        while server.connections > 1:
            await yield_loop(1)
        assert ended == ["good by itself"]
        limits_pass()
        await closing
        assert ended == ["good by itself", "bad cancelled"]
        await ends(good.recv(), ConnectionClosedError)
        await ends(bad.recv(), ConnectionBrokenError)


@one_loop
async def test_server_close_lets_pending_requests_finish(factory: ConnectionFactory) -> None:
    """Closing does not wait for the end of the grace, and the peers are told that the server is
    shutting down.
    """
    go_on = asyncio.Event()
    asked: asyncio.Queue[bytes] = asyncio.Queue()

    async def answer(conn: Connection) -> None:
        async for message in conn:
            with message:
                asked.put_nowait(bytes(message))
                await go_on.wait()
                await conn.send(message)

    server = await serve(factory, answer)
    idle = await factory.connect(server.port)
    busy = await factory.connect(server.port)
    await busy.send(b"under way")
    await asked.get()
    await busy.send(b"here already")
    await serves(server, 2)
    serving = asyncio.create_task(server.serve_forever())
    await yield_loop(1)
    closing = asyncio.create_task(server.close(grace=NEVER))
    error = await ends(idle.recv(), ConnectionClosedError)
    assert error.by_peer
    assert "its server is shutting down" in str(error)
    assert not closing.done()
    assert not serving.done()
    go_on.set()
    assert [bytes(message) async for message in busy] == [b"under way", b"here already"]
    await closing
    await serving
    for client in (idle, busy):
        await client.close()


@one_loop
async def test_close_without_grace_period_breaks_busy_connections(
    factory: ConnectionFactory,
) -> None:
    """The peer of an idle handler sees an orderly end, and the peer of a busy handler an error."""
    started = asyncio.Event()

    async def answer(conn: Connection) -> None:
        async for message in conn:
            message.release()
            await conn.send(b"half")
            started.set()
            await asyncio.Event().wait()

    server = await serve(factory, answer)
    async with (
        await factory.connect(server.port) as idle,
        await factory.connect(server.port) as busy,
    ):
        await busy.send(b"x")
        await started.wait()
        await serves(server, 2)
        await server.close()
        assert [message async for message in idle] == []
        assert bytes(await busy.recv()) == b"half"
        error = await ends(busy.recv(), ConnectionBrokenError)
        assert "the server was shut down before its handler had finished" in str(error)


@one_loop
async def test_second_close_ends_the_grace_period_immediately(factory: ConnectionFactory) -> None:
    started = asyncio.Event()

    async def stay(conn: Connection) -> None:
        started.set()
        await conn.recv()

    server = await serve(factory, stay)
    async with await factory.connect(server.port) as client:
        await started.wait()
        closing = asyncio.create_task(server.close(grace=NEVER))
        await yield_loop(1)
        await server.close()
        await closing
        await ends(client.recv(), ConnectionBrokenError)


@one_loop
async def test_ending_an_iteration_does_not_affect_earlier_recv_calls(
    factory: ConnectionFactory,
) -> None:
    """The iteration ends in its turn.

    Earlier calls of `recv` continue, and messages keep their order.
    """
    async with factory.pair() as (client, server):
        receiving = [asyncio.create_task(server.recv()) for _ in range(2)]
        iterating = asyncio.create_task(anext(aiter(server), None))
        await yield_loop(1)
        server._messages.end_iteration()
        await yield_loop(3)
        assert not any(task.done() for task in (*receiving, iterating))
        await client.send(b"first")
        assert bytes(await receiving[0]) == b"first"
        receiving[1].cancel()
        assert await iterating is None
        await client.send(b"last")
        assert bytes(await server.recv()) == b"last"


@one_loop
async def test_reconnect_uses_the_next_address_after_shutdown(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name has two addresses. The server at the first one shuts down between two requests."""
    first, second = await serve(factory, echo), await serve(factory, echo)

    async def resolve(host: str, port: int, **hints: int) -> list[Address]:
        return [first.address, second.address]

    monkeypatch.setattr(transport, "resolve", resolve)
    ports = []
    async with second:
        async for conn in reconnect("name", 1, config=SMALL, **factory.where):
            assert conn.peer_address is not None
            ports.append(conn.peer_address[1])
            await conn.send(b"x")
            assert bytes(await conn.recv()) == b"x"
            if len(ports) == 2:
                break
            await first.close(grace=NEVER)
            await ends(conn.recv(), ConnectionClosedError)
        await conn.close()
    assert ports == [first.port, second.port]


class Outcome(BaseException):
    """A BaseException that is not an Exception, like pytest's `Failed`."""


ERRORS: dict[str, BaseException] = {
    "ZeroDivisionError": ZeroDivisionError("secret"),
    "BrokenPipeError": BrokenPipeError("secret"),  # from another connection
    "KeyError": ExceptionGroup("secret", [ExceptionGroup("secret", [KeyError("secret")])]),
    "CancelledError": asyncio.CancelledError("secret"),
    "Outcome": Outcome("secret"),
}


@one_loop
@pytest.mark.parametrize("name", ERRORS)
async def test_handler_exception_is_reported_and_closes_only_its_connection(
    factory: ConnectionFactory, name: str, reported: list[dict[str, Any]]
) -> None:
    """The peer is told the type of the error, but not its text.

    The other connections and the server continue.
    """

    async def fail(conn: Connection) -> None:
        if bytes(await conn.recv()) == b"fail":
            await conn.send(b"half an answer")
            raise ERRORS[name]
        await echo(conn)

    async with await serve(factory, fail) as server:
        good = await factory.connect(server.port)
        await good.send(b"go on")
        async with await factory.connect(server.port) as bad:
            await bad.send(b"fail")
            assert bytes(await bad.recv()) == b"half an answer"
            error = await ends(bad.recv(), ConnectionBrokenError)
            assert f"the peer's program ended the connection with {name}" in str(error)
            assert "secret" not in str(error)
            told_once(error)
        told = [context["exception"] for context in reported]
        assert told == ([] if name in ("BrokenPipeError", "CancelledError") else [ERRORS[name]])
        await good.send(b"still here")
        assert bytes(await good.recv()) == b"still here"
        await good.close()


@one_loop
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("secret"), ConnectionBrokenError),
        (asyncio.CancelledError(), ConnectionBrokenError),
        (GeneratorExit(), ConnectionClosedError),  # from a discarded generator
    ],
)
async def test_exception_type_in_async_with_is_reported_to_the_peer(
    factory: ConnectionFactory, error: BaseException, kind: type[Exception]
) -> None:
    async with factory.pair() as (client, server):

        async def leave() -> None:
            async with client:
                await client.send(b"half a request")
                raise error

        await ends(leave(), type(error))
        assert bytes(await server.recv()) == b"half a request"
        told = await ends(server.recv(), kind)
        assert "secret" not in str(told)
        assert kind is ConnectionClosedError or type(error).__name__ in str(told)


@one_loop
async def test_sys_exit_in_a_handler_sets_the_exit_status(factory: ConnectionFactory) -> None:
    """The peer is told before the process ends."""
    program = f"""
import asyncio, sys, aiordma
async def handle(conn):
    await conn.recv()
    sys.exit(3)
async def main():
    where = dict(device={factory.device!r}, via={factory.via!r})
    async with await aiordma.start_server(handle, {factory.host!r}, **where) as server:
        print(server.port, flush=True)
        await server.serve_forever()
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=PIPE)
    assert process.stdout is not None
    async with await factory.connect(int(await process.stdout.readline())) as client:
        await client.send(b"x")
        error = await ends(client.recv(), ConnectionBrokenError)
    assert "ended the connection with SystemExit" in str(error)
    assert await process.wait() == 3


@pytest.mark.parametrize("kind", ["asyncio.SelectorEventLoop", "uvloop.Loop"])
@pytest.mark.parametrize("leave", ["sys.exit(3)", "async with conn: sys.exit(3)"])
@one_loop
async def test_sys_exit_status_takes_precedence_over_errors_in_other_tasks(
    factory: ConnectionFactory, leave: str, kind: str
) -> None:
    """Another task that sees the end of the connection must not end the program first."""
    program = f"""
import asyncio, sys, uvloop, aiordma
where = dict(device={factory.device!r}, via={factory.via!r})
async def handle(conn):
    await conn.recv()
    {leave}
async def main():
    server = await aiordma.start_server(handle, {factory.host!r}, **where)
    conn = await aiordma.connect(server.address[0], server.port, **where)
    await conn.send(b"x")
    await conn.recv()  # raises as the handler's end is seen
with asyncio.Runner(loop_factory={kind}) as runner:
    runner.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stderr=DEVNULL)
    assert await process.wait() == 3


class Echo:
    async def __call__(self, conn: Connection) -> None:
        await echo(conn)

    async def method(self, prefix: bytes, conn: Connection) -> None:
        await echo(conn)

    @classmethod
    async def of_class(cls, conn: Connection) -> None:
        await echo(conn)


def wrapped(handler: Any) -> Handler:
    @functools.wraps(handler)
    def call(conn: Connection) -> Any:
        return handler(conn)

    return call


async def reads_and_writes(reader: object, writer: object) -> None:
    """Do nothing, with the signature of an asyncio stream handler."""


async def generates(conn: Connection) -> AsyncIterator[None]:
    yield


HANDLERS: dict[str, Any] = {
    "partial": functools.partial(Echo().method, b""),
    "object": Echo(),
    "class method": Echo.of_class,
    "wrapped": wrapped(echo),
    "mock": AsyncMock(side_effect=echo),
}


@one_loop
@pytest.mark.parametrize("name", HANDLERS)
async def test_start_server_accepts_every_supported_handler_type(
    factory: ConnectionFactory, name: str
) -> None:
    async with (
        await serve(factory, HANDLERS[name]) as server,
        await factory.connect(server.port) as client,
    ):
        await client.send(b"x")
        assert bytes(await client.recv()) == b"x"


NO_HANDLERS: dict[str, tuple[Any, str]] = {
    "plain function": (lambda _: None, "not a coroutine function: write `async def"),
    "class": (Echo, "not a coroutine function"),
    "None": (None, "not a coroutine function"),
    "builtin": (print, "not a coroutine function"),
    "partial of a builtin": (functools.partial(print), "not a coroutine function"),
    "wrapped builtin": (wrapped(print), "not a coroutine function"),
    "generator": (generates, "not a coroutine function"),
    "of streams": (reads_and_writes, "one argument, the connection: missing .*start_stream_server"),
    "more arguments": (Echo().method, "one argument, the connection: missing"),
}


@one_loop
@pytest.mark.parametrize("name", NO_HANDLERS)
async def test_start_server_rejects_invalid_handlers(factory: ConnectionFactory, name: str) -> None:
    handler, said = NO_HANDLERS[name]
    with pytest.raises(TypeError, match=said):
        await serve(factory, handler)


@one_loop
async def test_cancelled_serve_forever_closes_the_server(factory: ConnectionFactory) -> None:
    server = await serve(factory, echo)
    serving = asyncio.create_task(server.serve_forever())
    client = await factory.connect(server.port)
    await client.send(b"x")
    assert bytes(await client.recv()) == b"x"
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    await ends(client.recv(), ConnectionClosedError, ConnectionBrokenError)
    await ends(factory.connect(server.port), RejectedError)
    await client.close()
