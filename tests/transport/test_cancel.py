"""Test that cancelled awaits send nothing twice and leave no memory behind.

Random programs (programs.py) cancel sends, receives, writes, reads and requests for regions at any
time.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, cast

import pytest

from aiordma import Connection, ConnectionBrokenError, ConnectionClosedError

from .connection_factory import (
    ALONE,
    ConnectionFactory,
    cancelled_after,
    ends,
    exchange,
    pattern,
    yield_loop,
)
from .inside import figures
from .marks import on_device, on_pair

pytestmark = on_pair


# ---- regions -------------------------------------------------------------------------------------


# ---- connecting and closing ----------------------------------------------------------------------


@on_device
async def test_listener_keeps_accepting_after_cancelled_connects(
    factory: ConnectionFactory,
) -> None:
    """The listener may already have made its side of the cancelled connection."""
    async with await factory.listen() as listener:
        made: list[Connection] = []
        first: asyncio.Queue[bytes] = asyncio.Queue()

        async def receive(conn: Connection) -> None:
            made.append(conn)
            with suppress(ConnectionError):
                first.put_nowait(bytes(await conn.recv()))

        async def accept() -> None:
            async with asyncio.TaskGroup() as group:
                async for conn in listener:
                    group.create_task(receive(conn))

        accepting = asyncio.create_task(accept())
        for count in (*factory.cancel_points, 80, 160):
            for conn in await cancelled_after(count, lambda: factory.connect(listener.port)):
                await conn.close()
        async with await factory.connect(listener.port) as client:
            await client.send(b"hello")
            assert await first.get() == b"hello"
        await listener.close()
        await accepting
        for conn in made:
            await conn.close()


@on_device
async def test_cancelled_accept_does_not_lose_the_connection(factory: ConnectionFactory) -> None:
    async with await factory.listen() as listener:
        for count in factory.cancel_points:
            connecting = asyncio.create_task(factory.connect(listener.port))
            accepted = await cancelled_after(count, listener.accept)
            server = accepted[0] if accepted else await listener.accept()
            client = await connecting
            await exchange(client, server, b"hello")
            await client.close()
            await server.close()


async def drain(conn: Connection) -> None:
    while True:
        (await conn.recv()).release()


async def test_connection_ends_when_its_close_is_cancelled(factory: ConnectionFactory) -> None:
    for count in factory.cancel_points:
        async with factory.pair() as (client, server):
            sends = [asyncio.create_task(client.send(bytes(5000))) for _ in range(20)]
            await yield_loop(2)
            await cancelled_after(count, client.close)
            if not count:  # then it was cancelled before its first step
                client.abort()
            await client.wait_closed()
            ended = await asyncio.gather(*sends, return_exceptions=True)
            assert all(isinstance(end, ConnectionClosedError | None) for end in ended)
            await ends(drain(server), ConnectionBrokenError, ConnectionClosedError)
            await server.wait_closed()


# ---- operations that no task goes on with --------------------------------------------------------


async def test_dropped_operation_behaves_as_if_cancelled(factory: ConnectionFactory) -> None:
    """A program that drives a coroutine by hand may drop its last reference before the end."""
    async with factory.pair() as (client, server):
        for told in (False, True):
            left = [server.recv(), server.recv_into(bytearray(10)), anext(aiter(server))]
            for receiving in left:
                cast("Any", receiving).send(None)
            sending = client.send_nowait(b"first") if told else None
            while told and not figures(server)["arrived"]:
                await yield_loop(1)
            del receiving
            left.clear()
            await (sending or client.send(b"first"))
            assert bytes(await server.recv()) == b"first"
        sends = [client.send_nowait(pattern(ALONE, n)) for n in range(20)]  # of which some wait
        unfinished = cast("Any", client.send(b"left"))
        unfinished.send(None)
        del unfinished
        last = client.send_nowait(b"last")
        for n in range(20):
            assert bytes(await server.recv()) == pattern(ALONE, n)
        assert bytes(await server.recv()) == b"last"
        await asyncio.gather(*sends, last)


async def test_operation_raises_runtime_error_when_awaited_twice(
    factory: ConnectionFactory,
) -> None:
    """asyncio shows the operation in the repr of the task that awaits it."""
    async with factory.sharing(1) as (client, server, _, remote):
        with client.alloc(1) as here:
            sending, receiving = client.send(b"x"), server.recv()
            await sending
            task = asyncio.ensure_future(receiving)
            assert "Connection.recv" in repr(task)
            assert bytes(await task) == b"x"
            writing = client.write(here, remote)
            await writing
            for again in (sending, receiving, writing):
                with pytest.raises(RuntimeError, match="already awaited"):
                    await again
            for method, operation in (
                ("send", client.send(b"y")),
                ("write", client.write(here, remote)),
                ("read", client.read(remote, here)),
            ):
                other = asyncio.ensure_future(operation)
                assert f"Connection.{method}" in repr(other)
                await other
            assert bytes(await server.recv()) == b"y"
