"""The ends of measured connections, which work alike on both sides, and the state of a part.

There are four kinds of work:

- `ping` runs one operation at a time, which the peer's program answers with the same operation. The
  round trip is timed.
- `alone` runs one operation at a time without a response. The await is timed.
- `flood` keeps as many operations outstanding as the depth allows. It is not timed.
- `both` is like `flood`, but the peer answers each operation, which is outstanding until then.

The peer's program does not notice reads and atomics and cannot answer them, so they have no `ping`
and no `both`. A stream does not report when a piece has arrived, so it has no `alone`.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Awaitable, Coroutine, Iterable, MutableSequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import aiordma

from . import wire
from .contents import SERVER, contents

U32 = 0xFFFF_FFFF

ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True)
class Load:
    """The bytes that one side sends in a part, and those that it expects from the peer."""

    sent: bytes
    expected: bytes
    numbered: bool
    """Whether operations carry their numbers as immediate data."""

    @classmethod
    def of(cls, opened: wire.Open, way: str, seed: int, size: int, *, serving: bool) -> Load:
        client, server = contents(seed, size), contents(seed + SERVER, size)
        # The peer's program only notices writes with immediate data.
        numbered = opened.imm or (way != "flood" and opened.operation == "write")
        return cls(*((server, client) if serving else (client, server)), numbered)


async def devices_of(conn: aiordma.Connection) -> str:
    """Wait until no rail of a connection is connecting, and return the devices of all rails."""
    while any(rail.state == "connecting" for rail in conn.rails):  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.01)
    return ", ".join(rail.device for rail in conn.rails)


def misnumbered(imm: int | None, wanted: int | None) -> str:
    return "" if imm == wanted else f"immediate data {imm} instead of {wanted}"


class End:
    """One end of a connection.

    Each part begins with `prepare` and `use`, and ends with `release`.
    """

    lossy: bool = False
    """Whether operations may be lost."""
    numbered: bool = False
    """Whether operations carry their numbers as immediate data."""

    def count(self, load: Load) -> None:
        self.numbered = load.numbered

    def imm(self, number: int) -> int | None:
        return number & U32 if self.numbered else None

    def prepare(self, load: Load) -> bytes:
        """Allocate the part's memory. Returns a token for it if the peer accesses it."""
        raise NotImplementedError

    def use(self, token: bytes) -> None:
        """Set the peer's memory, if operations access it."""

    def operate(self, number: int) -> Awaitable[object]:
        """Return an awaitable that performs one operation when it is awaited."""
        raise NotImplementedError

    def begin(self, number: int) -> asyncio.Future[Any]:
        """Start one operation."""
        return asyncio.ensure_future(self.operate(number))

    def reply(self, number: int) -> Awaitable[object]:
        """Perform one operation in response to the peer's."""
        return self.operate(number)

    def receive(self) -> Awaitable[Any]:
        """Receive one operation of the peer."""
        raise NotImplementedError

    def check(self, arrived: Any, number: int | None, compared: bool) -> str:
        """Return the error in a received operation, or an empty text.

        `number` is None if it is unknown because operations may be lost.
        """
        raise NotImplementedError

    async def ping(self, run: Run) -> None:
        operate, receive, times = self.operate, self.receive, run.times
        while run.done < run.limit:
            start = perf_counter()
            await operate(run.done)
            arrived = await receive()
            times.append(perf_counter() - start)
            run.take(self, arrived)

    async def alone(self, run: Run) -> None:
        operate, times = self.operate, run.times
        while run.done < run.limit:
            start = perf_counter()
            await operate(run.done)
            times.append(perf_counter() - start)
            run.done += 1

    async def flood(self, run: Run) -> None:
        waiting: deque[asyncio.Future[Any]] = deque()
        while run.started < run.limit or waiting:
            while len(waiting) < run.depth and run.started < run.limit:
                waiting.append(self.begin(run.started))
                run.started += 1
            await waiting.popleft()
            run.done += 1
            while waiting and waiting[0].done():
                waiting.popleft().result()
                run.done += 1

    async def both(self, run: Run) -> None:
        under_way: deque[asyncio.Future[Any]] = deque()
        try:
            while True:
                while len(under_way) < run.depth and run.started < run.limit:
                    under_way.append(self.begin(run.started))
                    run.started += 1
                if not under_way:
                    return
                run.take(self, await self.receive())
                await under_way.popleft()
        finally:
            for operation in under_way:
                operation.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    def verify(self, own: int, others: int) -> str:
        """Return the first error in memory, or an empty text.

        `own` is the number of operations of this side, `others` that of the peer.
        """
        return ""

    def release(self) -> None:
        """Release the part's memory. A second call has no effect."""


@dataclass(slots=True)
class Run:
    """One part on one connection. Setting `limit` to 0 ends it after the outstanding operations."""

    limit: int
    depth: int = 1
    batch: int = 1
    verify_all: bool = False
    started: int = 0
    done: int = 0
    times: MutableSequence[float] = field(default_factory=lambda: array("d"))
    mismatch: str = ""

    def take(self, end: End, arrived: Any) -> None:
        """Check and count a response."""
        wrong = end.check(arrived, self.done, self.verify_all or not self.done)
        if wrong and not self.mismatch:
            self.mismatch = f"response {self.done}: {wrong}"
        self.done += 1


async def together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all works concurrently. If one fails, cancel the others and raise only its error."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


class Tally:
    """The number of operations that the server received in a part, and the first error in them."""

    def __init__(self, verify_all: bool = False) -> None:
        self.count: int = 0
        self.mismatch: str = ""
        self._verify_all = verify_all
        self._awaited = -1
        self._there = asyncio.Event()

    def take(self, end: End, arrived: Any) -> None:
        # After a lost message, the numbers no longer match.
        number = None if end.lossy else self.count
        wrong = end.check(arrived, number, self._verify_all or not self.count)
        if wrong and not self.mismatch:
            self.mismatch = f"operation {self.count}: {wrong}"
        self.count += 1
        if self.count == self._awaited:
            self._there.set()

    def fail(self, reason: str) -> None:
        """Record that no further operation will arrive."""
        self.mismatch = self.mismatch or reason
        self._there.set()

    async def reach(self, count: int, patience: float | None = None) -> None:
        """Wait for `count` operations, or until none has arrived for `patience` seconds."""
        self._awaited = count
        while self.count < count and not self.mismatch:
            before = self.count
            try:
                async with asyncio.timeout(patience):
                    await self._there.wait()
            except TimeoutError:
                if patience is None or self.count == before:
                    return
