"""Test that failed calls and ended objects are freed with their last reference, not by the
collector.

Otherwise a program that retries would grow with each failure, and large memory would stay until the
cycle collector runs. `test_dropped.py` tests the parts of a connection.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from aiordma import (
    AsyncConnectionId,
    AsyncQueuePair,
    Connection,
    RemoteRegion,
    connect,
    listen,
    start_server,
    streams,
    verbs,
)
from aiordma._datapath.one_sided import TRANSFER_SIZE

from .connection_factory import ALL, SMALL, ConnectionFactory, yield_loop
from .marks import one_loop

Call = Callable[[ConnectionFactory], Coroutine[Any, Any, object]]


async def fails(awaitable: Awaitable[object]) -> None:
    """Check that the awaitable fails, and drop the error."""
    try:
        await awaitable
    except (Exception, asyncio.CancelledError):
        return
    finally:
        del awaitable  # a task refers to its error, whose frames include this one
    raise AssertionError("it has not failed")


async def refused(factory: ConnectionFactory) -> None:
    await fails(factory.connect(1))


async def stream_refused(factory: ConnectionFactory) -> None:
    where = factory.where
    await fails(streams.open_connection(factory.host, 1, **where))


async def silent_peer(factory: ConnectionFactory, config: Any = SMALL) -> None:
    with socket.create_server((factory.host, 0)) as silent:
        await factory.connect(silent.getsockname()[1], config)


async def unanswered_request(factory: ConnectionFactory) -> None:
    await fails(silent_peer(factory, replace(SMALL, connect_timeout=0.02)))


async def cancelled(factory: ConnectionFactory) -> None:
    connecting = asyncio.create_task(silent_peer(factory))
    await yield_loop(5)
    connecting.cancel()
    await fails(connecting)


async def rejected(factory: ConnectionFactory) -> None:
    where: dict[str, Any] = {**factory.where, "config": SMALL}
    async with await listen(factory.host, on_request=lambda _: "no", **where) as listener:
        await fails(connect(factory.host, listener.port, **where))


async def without_the_key(factory: ConnectionFactory) -> None:
    where: dict[str, Any] = {**factory.where, "config": SMALL}
    async with await listen(factory.host, auth=b"k" * 32, **where) as listener:
        await fails(connect(factory.host, listener.port, auth=b"j" * 32, **where))


async def too_many(factory: ConnectionFactory) -> None:
    async with await factory.listen(replace(SMALL, max_connections=1)) as listener:
        client, server = await factory.both(listener)
        await fails(factory.connect(listener.port))
        await close(client, server)


async def busy_address(factory: ConnectionFactory) -> None:
    async with await factory.listen() as listener:
        where: dict[str, Any] = {"device": factory.device, "via": "tcp"}
        with socket.create_server((factory.host, 0)) as taken:
            await fails(listen(factory.host, taken.getsockname()[1], **where))
        accepting = asyncio.create_task(listener.accept())
        await yield_loop(1)
        accepting.cancel()
        await fails(accepting)


async def of_a_handler(factory: ConnectionFactory) -> None:
    async def handler(conn: Connection) -> None:
        raise ConnectionError("meant")

    where: dict[str, Any] = {**factory.where, "config": SMALL}
    async with (
        await start_server(handler, factory.host, **where) as server,
        await factory.connect(server.port) as conn,
    ):
        await fails(conn.recv())


async def pair(factory: ConnectionFactory) -> tuple[Connection, Connection]:
    async with await factory.listen() as listener:
        return await factory.both(listener)


async def end(tasks: list[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks)
    assert [error for task in tasks if (error := task.exception()) is not None]


async def close(*ends: Connection) -> None:
    for end in ends:
        await end.close()


async def lost(factory: ConnectionFactory) -> None:
    """Lose the peer while calls of every kind are pending."""
    client, server = await pair(factory)
    lent = await client.request_region(1 << 16, access=ALL)
    calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
        client.recv,
        lambda: as_coroutine(client.send(bytes(300_000))),
        client.recv_region,
        client.recv_buffer,
        lambda: client.request_region(64),
        lambda: client.write(bytes(1 << 16), lent),
        lambda: client.read(lent, bytearray(1 << 16)),
        lambda: client.fetch_and_add(lent[:8], 1),
    ]
    tasks = [asyncio.create_task(call()) for call in calls]
    await yield_loop(1)
    server.abort()
    await end(tasks)
    await close(client, server)


async def as_coroutine(awaitable: Awaitable[object]) -> None:
    await awaitable


async def read(conn: Connection, source: RemoteRegion, target: bytearray) -> None:
    await conn.read(source, target)


async def write(conn: Connection, target: RemoteRegion, source: bytearray) -> None:
    await conn.write(source, target)


async def add(conn: Connection, target: RemoteRegion, _: bytearray) -> None:
    await conn.fetch_and_add(target[:8], 1)


async def batch(conn: Connection, source: RemoteRegion, target: bytearray) -> None:
    async with conn.batch() as together:
        together.read(source, target)
        together.fetch_and_add(source[:8], 1)


async def revoked_key(factory: ConnectionFactory) -> None:
    """Fail operations on a revoked key while the calling frame refers to the connection."""
    for call in (read, write, add, batch):
        for size in (64, 1 << 17):
            client, server = await pair(factory)
            with server.alloc(size) as memory, server.share(memory, access=ALL) as share:
                await share.ready()
                remote = client.open_region(share.token.pack())
                share.revoke()
                await fails(call(client, remote, bytearray(size)))
                await close(client, server)


async def progress_fails(factory: ConnectionFactory) -> None:
    """Raise in the progress callback while the last part of a write waits for a credit."""

    def progress(_: int) -> None:
        raise ValueError("meant")

    client, server = await pair(factory)
    size = TRANSFER_SIZE + 1
    with server.alloc(size) as memory, server.share(memory, access=ALL) as share:
        await share.ready()
        remote = client.open_region(share.token.pack())
        sends = [client.send_nowait(bytes(600)) for _ in range(20)]
        await fails(as_coroutine(client.write(bytes(size), remote, imm=5, progress=progress)))
        for _ in sends:
            (await server.recv()).release()
        await asyncio.gather(*sends)
        del sends
        await close(client, server)


async def given_up(factory: ConnectionFactory) -> None:
    client, server = await pair(factory)
    for call in (
        client.recv,
        server.recv_region,
        server.recv_buffer,
        lambda: as_coroutine(client.send(bytes(300_000))),
    ):
        task = asyncio.create_task(call())
        await yield_loop(1)
        task.cancel()
        await fails(task)
    client.abort()
    await close(client, server)


async def mistakes(factory: ConnectionFactory) -> None:
    client, server = await pair(factory)
    for wrong in (b"", object(), 3.5, memoryview(b"abcd")[::2]):
        with suppress(Exception):
            client.register(wrong)  # type: ignore[arg-type]
    await fails(client.write(b"abc", 5))  # type: ignore[arg-type]
    await close(client, server)
    await fails(client.recv())
    await fails(as_coroutine(client.send(b"x")))


async def of_a_queue_pair(factory: ConnectionFactory) -> None:
    with verbs.open_device(factory.device) as context:
        pd = context.alloc_pd()
        memory = pd.reg_mr(64)
        one = verbs.QPCapabilities(max_send_wr=1)
        async with AsyncQueuePair(pd, one) as queue, AsyncQueuePair(pd) as peer:
            here, there = queue.qp.endpoint(), peer.qp.endpoint()
            queue.qp.connect(here, there)
            peer.qp.connect(there, here)
            ring = queue.receives(2, 64)
            sends = [queue.send([memory.sge()]) for _ in range(2)]  # one waits for queue space
            calls = [*sends, queue.recv([memory.sge()]), ring.get()]
            tasks = [asyncio.create_task(call) for call in calls]
            await yield_loop(2)
            queue.fail(ValueError("meant"))
            await end(tasks)
            await fails(queue.send([memory.sge()]))


async def of_an_id(factory: ConnectionFactory) -> None:
    async with AsyncConnectionId(factory.device) as id:
        await id.resolve_addr((factory.host, 1))
        await id.resolve_route()
        id.create_qp()
        await fails(id.connect())


async def borrowed(factory: ConnectionFactory) -> None:
    """Close both ends while memory is still borrowed."""
    client, server = await pair(factory)
    region = await client.request_region(1 << 20)
    await client.write(b"x", region[:1])
    await close(client, server)


async def shared(factory: ConnectionFactory) -> None:
    client, server = await pair(factory)
    with server.alloc(1 << 16) as memory:
        await server.send_region(memory, lease=60)
        remote = await client.recv_region()
        await client.read(remote[:1], bytearray(1))
        server.abort()
        await client.wait_closed()
        await server.wait_closed()


async def listening(factory: ConnectionFactory) -> None:
    async with await factory.listen():
        pass


CALLS: tuple[Call, ...] = (
    refused, stream_refused, unanswered_request, cancelled, rejected, without_the_key, too_many,
    busy_address, of_a_handler, lost, revoked_key, progress_fails, given_up, mistakes,
    of_a_queue_pair, of_an_id, borrowed, shared, listening,
)  # fmt: skip

OURS = "aiordma"


@one_loop
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_calls_leave_no_reference_cycles(factory: ConnectionFactory, call: Call) -> None:
    """Neither errors nor objects or frames of the library may be left."""
    await call(factory)  # create objects that are made only once
    await yield_loop(10)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(3):
            await call(factory)
        await yield_loop(10)
        gc.collect()
        left = [describe(each) for each in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert [each for each in left if each] == []


def describe(thing: object) -> str:
    """Describe an exception or one of our objects. Return an empty string for anything else."""
    if isinstance(thing, BaseException) or type(thing).__module__.startswith(OURS):
        return f"{type(thing).__qualname__}: {thing!s:.80}"
    return ""
