"""The server's end of one stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from .contents import SERVER, contents, difference
from .server_ends import Tally


class Streams:
    hears = True
    lossy = False

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._reply = self._expected = self._last = b""

    def prepare(self, seed: int, size: int, token: bytes) -> bytes:
        self._expected, self._reply = contents(seed, size), contents(seed + SERVER, size)
        return b""

    async def reply(self, imm: int | None) -> None:
        self._writer.write(self._reply)
        await self._writer.drain()

    def receive(self) -> Awaitable[bytes]:
        return self._reader.readexactly(len(self._expected))

    def took(self, data: bytes, tally: Tally) -> None:
        self._last = data
        compared = tally.verify_all or not tally.count
        tally.add(difference(self._last, self._expected) if compared else "")

    def verify(self, count: int) -> str:
        return difference(self._last, self._expected) if count else ""

    def release(self) -> None:
        self._last = b""
