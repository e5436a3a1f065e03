"""The client's end of one stream: pieces of one size, one after another."""

from __future__ import annotations

import asyncio
from time import perf_counter

from .client_ends import Run
from .contents import SERVER, contents, difference

# `drain` does not yield to the loop while the buffer has room: yield after so many writes.
YIELD_AFTER = 64


class Streams:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._sent = self._expected = self._last = b""
        self._mismatch = ""

    def prepare(self, seed: int, size: int) -> bytes:
        self._sent, self._expected = contents(seed, size), contents(seed + SERVER, size)
        self._mismatch = ""
        return b""

    def use(self, token: bytes) -> None:
        """Streams use no memory of the peer."""

    async def ping(self, run: Run) -> None:
        reader, writer, data, times = self._reader, self._writer, self._sent, run.times
        size = len(data)
        while run.done < run.limit:
            start = perf_counter()
            writer.write(data)
            await writer.drain()
            self._last = await reader.readexactly(size)
            times.append(perf_counter() - start)
            if (run.verify_all or not run.done) and not self._mismatch:
                self._mismatch = difference(self._last, self._expected)
            run.done += 1

    async def flood(self, run: Run) -> None:
        writer, data = self._writer, self._sent
        while run.done < run.limit:
            writer.write(data)
            await writer.drain()
            run.done += 1
            if not run.done % YIELD_AFTER:
                await asyncio.sleep(0)

    def verify(self, run: Run) -> str:
        if self._mismatch or not run.answered or not run.done:
            return self._mismatch
        return difference(self._last, self._expected)

    def release(self) -> None:
        self._last = b""
