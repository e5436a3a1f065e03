"""One-way messages over aiordma, in each style of sending and receiving."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

import aiordma

from .ways import SYNC_MESSAGE

WINDOW = 8
"""The number of messages in flight, except in the `one` and `tasks` styles."""
TASKS = 64

Memory = Any
"""A value accepted by `send` or `recv_into`."""


# ---- memory --------------------------------------------------------------------------------------


def touched(size: int) -> bytearray:
    """Return a buffer whose pages are all resident."""
    return bytearray(b"\xff") * size


MEMORIES: dict[str, Callable[[aiordma.Connection, int], Memory]] = {
    "none": lambda conn, size: None,
    "bytes": lambda conn, size: bytes(touched(size)),
    "bytearray": lambda conn, size: touched(size),
    "alloc": lambda conn, size: conn.alloc(size),
    "register": lambda conn, size: conn.register(touched(size)),
}


@contextmanager
def memory(kind: str, conn: aiordma.Connection, size: int) -> Iterator[Memory]:
    made = MEMORIES[kind](conn, size)
    if isinstance(made, aiordma.Buffer | aiordma.Region):
        with made:
            yield made
    else:
        yield made


# ---- senders -------------------------------------------------------------------------------------


async def window(conn: aiordma.Connection, data: Memory, count: int) -> None:
    under_way: deque[asyncio.Future[None]] = deque()
    for _ in range(count):
        if len(under_way) == WINDOW:
            await under_way.popleft()
        under_way.append(conn.send_nowait(data))
    for future in under_way:
        await future


async def one(conn: aiordma.Connection, data: Memory, count: int) -> None:
    for _ in range(count):
        await conn.send(data)


async def gather(conn: aiordma.Connection, data: Memory, count: int) -> None:
    for _ in range(count // WINDOW):
        await asyncio.gather(*(conn.send(data) for _ in range(WINDOW)))


async def task_group(conn: aiordma.Connection, data: Memory, count: int) -> None:
    for _ in range(count // WINDOW):
        async with asyncio.TaskGroup() as group:
            for _ in range(WINDOW):
                group.create_task(conn.send(data))


async def tasks(conn: aiordma.Connection, data: Memory, count: int) -> None:
    under_way: deque[asyncio.Task[None]] = deque()
    for _ in range(count):
        if len(under_way) == TASKS:
            await under_way.popleft()
        under_way.append(asyncio.create_task(conn.send(data)))
    await asyncio.gather(*under_way)


SENDERS: dict[str, Callable[[aiordma.Connection, Memory, int], Awaitable[None]]] = {
    sender.__name__: sender for sender in (window, one, gather, task_group, tasks)
}


# ---- receivers -----------------------------------------------------------------------------------


async def recv(conn: aiordma.Connection, _: Memory, count: int) -> int:
    for _ in range(count):
        with await conn.recv() as message:
            length = len(message)
    return length


async def iterate(conn: aiordma.Connection, _: Memory, count: int) -> int:
    left = count
    async for message in conn:
        with message:
            length = len(message)
        left -= 1
        if not left:
            break
    return length


async def recv_into(conn: aiordma.Connection, target: Memory, count: int) -> int:
    for _ in range(count):
        length, _ = await conn.recv_into(target)
    return length


RECEIVERS: dict[str, Callable[[aiordma.Connection, Memory, int], Awaitable[int]]] = {
    receiver.__name__: receiver for receiver in (recv, iterate, recv_into)
}
"""The receivers, by name. Each returns the length of the last message."""


# ---- both sides ----------------------------------------------------------------------------------


async def serve(conn: aiordma.Connection) -> None:
    """Receive messages in the style requested by the client.

    The client starts each measurement with a message that specifies the style. The server responds
    once when its receiver is ready, and again when all messages have arrived.
    """
    with suppress(aiordma.ConnectionClosedError):
        while True:
            with await conn.recv() as message:
                receiver, kind, size, count = json.loads(bytes(message))
            with memory(kind, conn, size) as target:
                await conn.send(SYNC_MESSAGE)
                length = await RECEIVERS[receiver](conn, target, count)
                await conn.send(str(length).encode())


async def stream(
    conn: aiordma.Connection,
    sender: str,
    source: str,
    receiver: str,
    target: str,
    size: int,
    count: int,
) -> float:
    """Send messages in one style, and return the time per message in seconds.

    `source` and `target` are keys of `MEMORIES`.
    """
    with memory(source, conn, size) as data:
        await conn.send(json.dumps([receiver, target, size, count]).encode())
        (await conn.recv()).release()
        start = perf_counter()
        await SENDERS[sender](conn, data, count)
        with await conn.recv() as message:
            taken = perf_counter() - start
            if int(bytes(message)) != size:
                raise ValueError(
                    f"the peer received messages of {int(bytes(message))} bytes, expected {size}"
                )
    return taken / count
