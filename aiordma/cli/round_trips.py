"""The `aiordma echo` measurement: one round trip at a time, comparing every byte."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter

import aiordma
from aiordma.perf.contents import difference
from aiordma.perf.ends import imm_mismatch
from aiordma.perf.statistics import Summary

# The number of untimed messages per size that warm up memory and caches. Their echoes are checked.
WARM_UP = 2

# By default, send messages of each size for SECONDS, but no fewer than LEAST and no more than MOST.
# MOST is enough for a 99th percentile.
MOST, LEAST, SECONDS = 1000, 3, 1.0

# Random messages are slices of a single random block. Each slice starts at a random offset smaller
# than MAX_OFFSET.
MAX_OFFSET = 1 << 12


@dataclass(slots=True)
class Result:
    """The measured round trips for one message size. Times are in seconds."""

    size: int
    whole_file: bool = False
    times: list[float] = field(default_factory=list)
    payload: int = 0
    """The total size of all timed messages in one direction, in bytes."""
    mismatch: str = ""
    """The first difference between a message and its echo, or empty if there is none."""

    @property
    def us(self) -> Summary:
        """Round-trip time statistics in microseconds."""
        return Summary.of(self.times).scaled(1e6)

    @property
    def throughput(self) -> float:
        return 2 * self.payload / sum(self.times)


@dataclass(frozen=True, slots=True)
class Plan:
    """The messages to send for one row of the report.

    ``size`` is the message size in bytes. Contents are random, unless they come from ``file``.
    """

    size: int
    file: bytes | None = None

    @property
    def whole_file(self) -> bool:
        return self.file is not None and self.size == len(self.file)

    def messages(self) -> Iterator[bytes]:
        """Yield message contents endlessly.

        A file is split into pieces of ``size`` bytes, and the pieces are yielded over and over. The
        last piece of the file may be shorter.
        """
        block = os.urandom(self.size + MAX_OFFSET) if self.file is None else b""
        while self.file is None:
            # A new offset changes the contents, and is faster than new random bytes.
            start = random.randrange(MAX_OFFSET)
            yield block[start : start + self.size]
        while True:
            for start in range(0, max(1, len(self.file)), max(1, self.size)):
                yield self.file[start : start + self.size]


def plans(sizes: list[int], file: bytes | None) -> list[Plan]:
    """Return a plan for each message size.

    If `file` is given, use only positive sizes smaller than the file, and add a plan for sending
    the whole file.
    """
    if file is None:
        return [Plan(size) for size in sizes]
    return [Plan(size, file) for size in sizes if 0 < size < len(file)] + [Plan(len(file), file)]


async def measure(
    conn: aiordma.Connection, plan: Plan, count: int | None, time_limit: float
) -> Result:
    """Send messages to an echo server and verify the echoes.

    Args:
        conn: The connection to the server.
        plan: The messages to send.
        count: The number of messages. If None, send messages for SECONDS, but no fewer than LEAST
            and no more than MOST messages.
        time_limit: The maximum duration of a round trip, in seconds.

    Raises:
        TimeoutError: If a round trip takes longer than `time_limit`.
    """
    result = Result(plan.size, plan.whole_file)
    contents = plan.messages()
    for number in range(WARM_UP):
        await round_trip(conn, next(contents), number, result, time_limit)
    result.times.clear()
    result.payload = 0
    begin = perf_counter()
    for number in range(count or MOST):
        await round_trip(conn, next(contents), number, result, time_limit)
        if count is None and number + 1 >= LEAST and perf_counter() - begin > SECONDS:
            break
    return result


async def round_trip(
    conn: aiordma.Connection, data: bytes, number: int, result: Result, time_limit: float
) -> None:
    """Send one message, and record the time until its echo and any difference in `result`."""
    async with asyncio.timeout(time_limit):
        start = perf_counter()
        await conn.send(data, imm=number)
        message = await conn.recv()
        result.times.append(perf_counter() - start)
    result.payload += len(data)
    with message:
        echo, imm = bytes(message), message.imm
    if wrong := imm_mismatch(imm, number) or difference(echo, data):
        result.mismatch = result.mismatch or f"message {number}: {wrong}"
