"""The ends of measured connections, and the state of a measurement's parts.

Operations can be run in four ways:

- `ping` runs one operation at a time. The peer's program responds to each with the same operation,
  and the round trip is timed.
- `alone` runs one operation at a time without a response. The time spent awaiting the operation is
  measured.
- `flood` keeps as many operations outstanding as the depth allows. Individual operations are not
  timed.
- `both` is like `flood`, but the peer responds to each operation with one of its own. An operation
  counts as outstanding until the response has arrived.

The peer's program does not notice reads and atomics, so it cannot respond to them. Reads and
atomics therefore do not support `ping` and `both`. Streams do not report when a piece has arrived,
so they do not support `alone`.
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

UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Load:
    """The bytes that one side sends during a part, and the bytes it expects from the peer."""

    sent: bytes
    expected: bytes
    numbered: bool
    """Whether each operation carries its number as immediate data."""

    @classmethod
    def of(cls, opened: wire.Open, way: str, seed: int, size: int, *, serving: bool) -> Load:
        """Return one side's load. Both sides compute the same contents from the seed."""
        client, server = contents(seed, size), contents(seed + SERVER, size)
        # A write notifies the peer's program only if it carries immediate data.
        numbered = opened.imm or (way != "flood" and opened.operation == "write")
        return cls(*((server, client) if serving else (client, server)), numbered)


async def device_names(conn: aiordma.Connection) -> str:
    """Wait for all rails to finish connecting, then return the names of their devices."""
    while any(rail.state == "connecting" for rail in conn.rails):  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.01)
    return ", ".join(rail.device for rail in conn.rails)


def imm_mismatch(imm: int | None, wanted: int | None) -> str:
    return "" if imm == wanted else f"immediate data {imm} instead of {wanted}"


class End:
    """One end of a measured connection.

    For each part of a measurement, call `prepare` first, then `use`, and finally `release`.
    """

    lossy: bool = False
    """Whether operations can be lost."""
    numbered: bool = False
    """Whether each operation carries its number as immediate data."""

    def set_numbered(self, load: Load) -> None:
        self.numbered = load.numbered

    def imm(self, number: int) -> int | None:
        return number & U32 if self.numbered else None

    def prepare(self, load: Load) -> bytes:
        """Allocate the memory for a part.

        Returns a token for the peer's `use` method. The token can be empty.
        """
        raise NotImplementedError

    def use(self, token: bytes) -> None:
        """Prepare for operations on the peer memory identified by `token`."""

    def operate(self, number: int) -> Awaitable[object]:
        """Return an awaitable that performs one operation."""
        raise NotImplementedError

    def begin(self, number: int) -> asyncio.Future[Any]:
        """Start one operation in the background."""
        return asyncio.ensure_future(self.operate(number))

    def reply(self, number: int) -> Awaitable[object]:
        """Return an awaitable that performs one operation in response to the peer's operation."""
        return self.operate(number)

    def receive(self) -> Awaitable[Any]:
        """Return an awaitable that waits for the peer's next operation to arrive."""
        raise NotImplementedError

    def check(self, arrived: Any, number: int | None, compare_payload: bool) -> str:
        """Describe the error in a received operation, or return an empty string.

        Args:
            arrived: The result of `receive`.
            number: The expected operation number, or None if earlier operations may have been lost.
            compare_payload: Whether to compare the entire payload.
        """
        raise NotImplementedError

    async def ping(self, run: Run) -> None:
        """Time round trips, one after the other: an operation and the peer's response to it."""
        operate, receive, times = self.operate, self.receive, run.times
        while run.done < run.limit:
            start = perf_counter()
            await operate(run.done)
            arrived = await receive()
            times.append(perf_counter() - start)
            run.record_response(self, arrived)

    async def alone(self, run: Run) -> None:
        """Time operations to which the peer does not respond, one after the other."""
        operate, times = self.operate, run.times
        while run.done < run.limit:
            start = perf_counter()
            await operate(run.done)
            times.append(perf_counter() - start)
            run.done += 1

    async def flood(self, run: Run) -> None:
        """Keep as many operations outstanding as the depth allows, without timing them."""
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
        """Keep operations outstanding as in `flood`, each until the peer has responded to it."""
        in_flight: deque[asyncio.Future[Any]] = deque()
        try:
            while True:
                while len(in_flight) < run.depth and run.started < run.limit:
                    in_flight.append(self.begin(run.started))
                    run.started += 1
                if not in_flight:
                    return
                run.record_response(self, await self.receive())
                await in_flight.popleft()
        finally:
            for operation in in_flight:
                operation.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)

    def verify(self, own_operations: int, peer_operations: int) -> str:
        """Describe the first error in the memory contents, or return an empty string.

        `own_operations` is the number of operations performed by this side, and `peer_operations`
        is the number performed by the peer.
        """
        return ""

    def release(self) -> None:
        """Release the part's memory. A second call has no effect."""


@dataclass(slots=True)
class Run:
    """One connection's work during a part.

    Setting `limit` to 0 ends the run as soon as the outstanding operations have completed.
    """

    limit: int
    depth: int = 1
    batch: int = 1
    verify_all: bool = False
    started: int = 0
    done: int = 0
    times: MutableSequence[float] = field(default_factory=lambda: array("d"))
    mismatch: str = ""

    def record_response(self, end: End, arrived: Any) -> None:
        """Check and count a response from the peer."""
        wrong = end.check(arrived, self.done, self.verify_all or not self.done)
        if wrong and not self.mismatch:
            self.mismatch = f"response {self.done}: {wrong}"
        self.done += 1


async def run_concurrently(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines concurrently. If one fails, cancel the rest and re-raise the exception."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


class Tally:
    """The server's count of operations received during a part, and the first error found."""

    def __init__(self, verify_all: bool = False) -> None:
        self.count: int = 0
        self.mismatch: str = ""
        self._verify_all = verify_all
        self._expected_count = -1
        self._reached_or_failed = asyncio.Event()

    def record_operation(self, end: End, arrived: Any) -> None:
        """Check and count an operation of the client."""
        # If messages can be lost, the count does not tell which operation number comes next.
        number = None if end.lossy else self.count
        wrong = end.check(arrived, number, self._verify_all or not self.count)
        if wrong and not self.mismatch:
            self.mismatch = f"operation {self.count}: {wrong}"
        self.count += 1
        if self.count == self._expected_count:
            self._reached_or_failed.set()

    def fail(self, reason: str) -> None:
        """Record that no further operations will arrive."""
        self.mismatch = self.mismatch or reason
        self._reached_or_failed.set()

    async def reach(self, count: int, idle_timeout: float | None = None) -> None:
        """Wait until `count` operations have arrived.

        If `idle_timeout` is given, stop waiting when no operation has arrived for that many
        seconds.
        """
        self._expected_count = count
        while self.count < count and not self.mismatch:
            before = self.count
            try:
                async with asyncio.timeout(idle_timeout):
                    await self._reached_or_failed.wait()
            except TimeoutError:
                if self.count == before:
                    return
