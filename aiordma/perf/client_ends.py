"""The client's end of one connection, for each operation: what it does and what it times.

There are four kinds of work.  `ping`: one operation at a time, which the peer's program answers
with the same operation; the round trip is timed.  `alone`: one operation at a time without an
answer; the await is timed.  `flood`: as many operations outstanding as the depth allows; untimed.
`both`: the same, each of which the peer answers, and which is outstanding until then.

The peer's program does not notice reads and atomics and cannot answer them: no `ping`, no `both`.
A stream does not report when a piece has arrived, so it has no `alone`.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import aiordma
from aiordma import Message

from .contents import SERVER, contents, difference

U32 = 0xFFFF_FFFF

ENDLESS = 1 << 62


@dataclass(slots=True)
class Run:
    """One part on one connection.  A limit of 0 ends it after the outstanding operations."""

    limit: int
    depth: int = 1
    batch: int = 1
    imm: bool = False
    verify_all: bool = False
    answered: bool = False
    """Whether the peer answers each operation."""
    started: int = 0
    done: int = 0
    times: array[float] = field(default_factory=lambda: array("d"))


class ClientEnd(Protocol):
    """One connection.  Each part begins with `prepare` and ends with `verify` and `release`.

    `ping` and `alone`, where the operation has them, have the signature of `flood`.
    """

    def prepare(self, seed: int, size: int) -> bytes:
        """Allocate the part's memory; returns a token for the peer if the peer writes to it."""

    def use(self, token: bytes) -> None:
        """Set the peer's memory."""

    async def flood(self, run: Run) -> None: ...

    def verify(self, run: Run) -> str:
        """The first error in the received data; empty: none."""

    def release(self) -> None:
        """Release the part's memory; a second call does nothing."""


async def time_each(operate: Callable[[], Awaitable[object]], run: Run) -> None:
    times = run.times
    while run.done < run.limit:
        start = perf_counter()
        await operate()
        times.append(perf_counter() - start)
        run.done += 1


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises the first error alone."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all of it; when one fails, cancel the others."""
    async with task_group() as group:
        for work in works:
            group.create_task(work)


class Sends:
    """Messages from unregistered memory, as most programs send them."""

    def __init__(self, conn: aiordma.Connection) -> None:
        self._conn = conn
        self._sent = self._expected = b""
        self._last: Message | None = None
        self._mismatch = ""

    def prepare(self, seed: int, size: int) -> bytes:
        self._sent, self._expected = contents(seed, size), contents(seed + SERVER, size)
        self._mismatch = ""
        return b""

    def use(self, token: bytes) -> None:
        """Messages use no memory of the peer."""

    async def ping(self, run: Run) -> None:
        conn, data, times = self._conn, self._sent, run.times
        while run.done < run.limit:
            imm = run.done & U32 if run.imm else None
            start = perf_counter()
            await conn.send(data, imm=imm)
            message = await conn.recv()
            times.append(perf_counter() - start)
            self._arrived(run, message)

    async def both(self, run: Run) -> None:
        conn = self._conn
        for _ in range(min(run.depth, run.limit)):
            self._begin(run)
        while run.done < run.started:
            self._arrived(run, await conn.recv())
            if run.started < run.limit:
                self._begin(run)

    def _begin(self, run: Run) -> asyncio.Future[None]:
        imm = run.started & U32 if run.imm else None
        run.started += 1
        return self._conn.send_nowait(self._sent, imm=imm)

    def _arrived(self, run: Run, message: Message) -> None:
        imm = run.done & U32 if run.imm else None
        if self._last is not None:
            self._last.release()
        self._last = message
        if run.verify_all or not run.done or message.imm != imm:
            self._compare(message, imm, run.done)
        run.done += 1

    def _compare(self, message: Message, imm: int | None, number: int) -> None:
        wrong = difference(message.data, self._expected)
        if message.imm != imm:
            wrong = f"immediate data {message.imm} instead of {imm}"
        if wrong and not self._mismatch:
            self._mismatch = f"answer {number}: {wrong}"

    async def alone(self, run: Run) -> None:
        conn, data = self._conn, self._sent
        if run.imm:
            await time_each(lambda: conn.send(data, imm=run.done & U32), run)
        else:
            await time_each(lambda: conn.send(data), run)

    async def flood(self, run: Run) -> None:
        waiting: deque[asyncio.Future[None]] = deque()
        while run.started < run.limit or waiting:
            while len(waiting) < run.depth and run.started < run.limit:
                waiting.append(self._begin(run))
            await waiting.popleft()
            run.done += 1
            while waiting and waiting[0].done():
                waiting.popleft().result()
                run.done += 1

    def verify(self, run: Run) -> str:
        if self._last is not None:
            self._compare(self._last, self._last.imm, run.done - 1)
        return self._mismatch

    def release(self) -> None:
        if self._last is not None:
            self._last.release()
            self._last = None
