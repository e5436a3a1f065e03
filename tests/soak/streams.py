"""Byte streams in both directions, written and read in pieces of any size, some of them over TLS.

TLS as asyncio has it cannot end one direction: there the reader knows how much there will be.
"""

from __future__ import annotations

import asyncio
import random

from .pattern import Patterns, Wrong
from .plan import CLIENT, SERVER, Plan
from .tally import Tally

PIECE = 256 << 10


class EndedEarly(ConnectionError):
    """The peer's client left, and closed its stream in order, as a TCP socket is closed."""


class Stream:
    """The part of one end."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        plan: Plan,
        side: str,
        patterns: Patterns,
        tally: Tally,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._plan = plan
        self._side = side
        self._peer = SERVER if side == CLIENT else CLIENT
        self._patterns = patterns
        self._tally = tally

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send())
            tasks.create_task(self._receive())

    def _data(self, side: str) -> memoryview:
        return self._patterns.of(self._plan.number("stream", side), self._plan.size("stream", side))

    def _piece(self, chance: random.Random) -> int:
        return int(2 ** chance.uniform(0, 18))

    async def _send(self) -> None:
        chance = self._plan.chance("stream sends", self._side)
        data = self._data(self._side)
        while data:
            piece = self._piece(chance)
            self._writer.write(data[:piece])
            data = data[piece:]
            if chance.random() < 0.5:
                await self._writer.drain()
        if self._writer.can_write_eof():
            self._writer.write_eof()

    async def _receive(self) -> None:
        chance = self._plan.chance("stream receives", self._side)
        expected = self._data(self._peer)
        size = len(expected)
        at = 0
        while self._writer.can_write_eof() or at < size:
            data = await self._reader.read(self._piece(chance))
            if not data:
                break
            if data != bytes(expected[at : at + len(data)]):
                raise Wrong(f"a stream differs within {at} and {at + len(data)}")
            at += len(data)
        if at != size:
            kind = EndedEarly if self._plan.leaves else Wrong
            raise kind(f"a stream ended after {at} of {size} bytes")
        self._tally.count("stream", size)

    async def close(self, *, abort: bool) -> None:
        if abort:
            self._writer.transport.abort()
        else:
            self._writer.close()
        await self._writer.wait_closed()
