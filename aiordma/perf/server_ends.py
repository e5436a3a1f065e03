"""The server's end of one connection, for each operation: it answers or receives, and compares."""

from __future__ import annotations

import asyncio
from typing import Protocol

import aiordma
from aiordma import Message

from .contents import SERVER, contents, difference


class Tally:
    """Counts and checks the operations of a part."""

    def __init__(self) -> None:
        self.count: int = 0
        self.mismatch: str = ""
        self._awaited = -1
        self._there = asyncio.Event()

    def add(self, wrong: str = "") -> None:
        if wrong and not self.mismatch:
            self.mismatch = f"number {self.count}: {wrong}"
        self.count += 1
        if self.count == self._awaited:
            self._there.set()

    def fail(self, reason: str) -> None:
        """Record that no further operation will arrive."""
        self.mismatch = self.mismatch or reason
        self._there.set()

    async def reach(self, count: int) -> None:
        self._awaited = count
        if self.count < count and not self.mismatch:
            await self._there.wait()


class ServerEnd(Protocol):
    @property
    def hears(self) -> bool:
        """Whether the server's program notices operations that it does not answer."""

    def prepare(self, seed: int, size: int, token: bytes) -> bytes:
        """Allocate the part's memory; returns a token of it if the client accesses it."""

    async def answer(self, tally: Tally, verify_all: bool) -> None:
        """Answer each operation with the same operation, until cancelled."""

    async def sink(self, tally: Tally, verify_all: bool) -> None:
        """Receive until cancelled."""

    def verify(self, count: int) -> str:
        """The first error after so many operations; empty: none."""

    def release(self) -> None:
        """Release the part's memory; a second call does nothing."""


class Sends:
    hears = True

    def __init__(self, conn: aiordma.Connection, imm: bool) -> None:
        self._conn = conn
        self._imm = imm
        self._reply = self._expected = b""
        self._last: Message | None = None

    def prepare(self, seed: int, size: int, token: bytes) -> bytes:
        self._expected, self._reply = contents(seed, size), contents(seed + SERVER, size)
        return b""

    async def answer(self, tally: Tally, verify_all: bool) -> None:
        conn, reply = self._conn, self._reply
        while True:
            imm = await self._take(tally, verify_all)
            await conn.send(reply, imm=imm)

    async def sink(self, tally: Tally, verify_all: bool) -> None:
        while True:
            await self._take(tally, verify_all)

    async def _take(self, tally: Tally, verify_all: bool) -> int | None:
        message = await self._conn.recv()
        if self._last is not None:
            self._last.release()
        self._last = message
        wrong = ""
        if verify_all or not tally.count or len(message) != len(self._expected):
            wrong = difference(message.data, self._expected)
        if self._imm and message.imm != tally.count & 0xFFFF_FFFF:
            wrong = f"immediate data {message.imm}"
        tally.add(wrong)
        return message.imm

    def verify(self, count: int) -> str:
        return "" if self._last is None else difference(self._last.data, self._expected)

    def release(self) -> None:
        if self._last is not None:
            self._last.release()
            self._last = None
