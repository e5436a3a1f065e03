"""`start_server`: a handler for every connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiordma import Connection, ConnectionBrokenError, ConnectionClosedError, Server, start_server
from aiordma.errors import RejectedError
from aiordma.transport import Handler

from .connection_factory import (
    NEVER,
    SMALL,
    ConnectionFactory,
    ends,
    limits_pass,
    pattern,
    yield_loop,
)
from .marks import one_loop


async def serve(factory: ConnectionFactory, handler: Handler) -> Server:
    return await start_server(
        handler, factory.host, 0, device=factory.device, via=factory.via, config=SMALL
    )


async def echo(conn: Connection) -> None:
    async for message in conn:
        with message:
            await conn.send(message)


async def test_echo(factory: ConnectionFactory) -> None:
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
        async with factory.within(1):
            await asyncio.gather(*server._tasks)
        assert server.connections == 0


async def test_connection_is_closed_when_its_handler_returns(factory: ConnectionFactory) -> None:
    async def greet(conn: Connection) -> None:
        await conn.send(b"hello")

    async with await serve(factory, greet) as server, await factory.connect(server.port) as client:
        assert [bytes(message) async for message in client] == [b"hello"]


async def test_close_cancels_the_handlers(factory: ConnectionFactory) -> None:
    started: asyncio.Queue[Connection] = asyncio.Queue()
    cancelled = []

    async def wait(conn: Connection) -> None:
        started.put_nowait(conn)
        try:
            await conn.recv()
        except asyncio.CancelledError:
            cancelled.append(conn)
            raise

    server = await serve(factory, wait)
    clients = [await factory.connect(server.port) for _ in range(3)]
    waiting = [asyncio.create_task(client.recv()) for client in clients]
    async with factory.within(2):
        for _ in clients:
            await started.get()
        await server.close()
        await server.close()
        assert len(cancelled) == 3
        assert all(conn.closed for conn in cancelled)
        for task in waiting:
            with pytest.raises((ConnectionClosedError, ConnectionBrokenError)):
                await task
        await ends(factory.connect(server.port), RejectedError)
    for client in clients:
        await client.close()


@one_loop
async def test_close_gives_the_handlers_time(factory: ConnectionFactory) -> None:
    """Those that end by themselves meanwhile are not cancelled; no new one is accepted."""
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
        async with factory.within(5):
            while server.connections > 1:
                await yield_loop(1)
        assert ended == ["good by itself"]
        limits_pass()
        await closing
        assert ended == ["good by itself", "bad cancelled"]


@one_loop
async def test_close_waits_no_longer_than_the_handlers(factory: ConnectionFactory) -> None:
    async with factory.within(5):
        server = await serve(factory, echo)
        async with await factory.connect(server.port) as client:
            await client.send(b"served")
            assert bytes(await client.recv()) == b"served"
            closing = asyncio.create_task(server.close(grace=1000))
            await yield_loop(1)
            await client.send(b"still served")
            assert bytes(await client.recv()) == b"still served"
        await closing


@one_loop
async def test_handler_that_fails(factory: ConnectionFactory) -> None:
    """It is reported to the loop, its peer is told, the others and the server go on."""
    reported: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: reported.append(context))

    async def fail(conn: Connection) -> None:
        if bytes(await conn.recv()) == b"fail":
            raise ZeroDivisionError
        await echo(conn)

    async with await serve(factory, fail) as server:
        good = await factory.connect(server.port)
        await good.send(b"go on")
        async with await factory.connect(server.port) as bad:
            await bad.send(b"fail")
            async with factory.within(1):
                await ends(bad.recv(), ConnectionClosedError)
        (context,) = reported
        assert isinstance(context["exception"], ZeroDivisionError)
        await good.send(b"still here")
        assert bytes(await good.recv()) == b"still here"
        await good.close()
    loop.set_exception_handler(before)


@one_loop
async def test_peer_that_breaks_is_no_failure(factory: ConnectionFactory) -> None:
    """The test fails if the loop hears of it (tests/conftest.py)."""
    async with await serve(factory, echo) as server:
        client = await factory.connect(server.port)
        await client.send(b"x")
        client.abort()
        await client.wait_closed()
        async with factory.within(1), await factory.connect(server.port) as another:
            await another.send(b"y")
            assert bytes(await another.recv()) == b"y"


@one_loop
async def test_serve_forever(factory: ConnectionFactory) -> None:
    server = await serve(factory, echo)
    serving = asyncio.create_task(server.serve_forever())
    client = await factory.connect(server.port)
    await client.send(b"x")
    assert bytes(await client.recv()) == b"x"
    serving.cancel()
    async with factory.within(2):
        with pytest.raises(asyncio.CancelledError):
            await serving
        await ends(client.recv(), ConnectionClosedError, ConnectionBrokenError)
        await ends(factory.connect(server.port), RejectedError)
        await client.close()
