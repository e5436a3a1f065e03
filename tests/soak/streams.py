"""Byte streams in both directions, written and read in pieces of any size, some of them over TLS.

TLS as asyncio has it cannot end one direction: there the reader knows how much there will be.
"""

from __future__ import annotations

import asyncio
import random

from .part import Part
from .pattern import Wrong


class EndedEarly(ConnectionError):
    """The peer's client left, and closed its stream in order, as a TCP socket is closed."""


def piece_of(chance: random.Random) -> int:
    return int(2 ** chance.uniform(0, 18))


class Stream(Part[tuple[asyncio.StreamReader, asyncio.StreamWriter]]):
    """The part of one end."""

    def __post_init__(self) -> None:
        self._reader, self._writer = self.conn

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send())
            tasks.create_task(self._receive())

    def _data(self, side: str) -> memoryview:
        return self.patterns.of(self.plan.number("stream", side), self.plan.size("stream", side))

    async def _send(self) -> None:
        chance = self.plan.chance("stream sends", self.side)
        data = self._data(self.side)
        while data:
            piece = piece_of(chance)
            self._writer.write(data[:piece])
            data = data[piece:]
            if chance.random() < 0.5:
                await self._writer.drain()
        if self._writer.can_write_eof():
            self._writer.write_eof()

    async def _receive(self) -> None:
        chance = self.plan.chance("stream receives", self.side)
        expected = self._data(self.peer)
        size = len(expected)
        at = 0
        while self._writer.can_write_eof() or at < size:
            data = await self._reader.read(piece_of(chance))
            if not data:
                break
            if data != bytes(expected[at : at + len(data)]):
                raise Wrong(f"a stream differs within {at} and {at + len(data)}")
            at += len(data)
        if at != size:
            kind = EndedEarly if self.plan.leaves else Wrong
            raise kind(f"a stream ended after {at} of {size} bytes")
        self.tally.count("stream", size)

    async def close(self, *, abort: bool) -> None:
        if abort:
            self._writer.transport.abort()
        else:
            self._writer.close()
        await self._writer.wait_closed()
