"""The server's end of one connection, for each operation: it answers or receives, and compares."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Protocol

import aiordma
from aiordma import Message

from . import wire
from .contents import SERVER, contents, difference


class Tally:
    """Counts and checks the operations of a part."""

    def __init__(self, verify_all: bool = False, answered: bool = False) -> None:
        self.verify_all: bool = verify_all
        self.answered: bool = answered
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

    async def reach(self, count: int, patience: float | None = None) -> None:
        """Wait for so many operations, or until none has arrived for `patience` seconds."""
        self._awaited = count
        while self.count < count and not self.mismatch:
            before = self.count
            try:
                async with asyncio.timeout(patience):
                    await self._there.wait()
            except TimeoutError:
                if patience is None or self.count == before:
                    return


class ServerEnd(Protocol):
    lossy: bool
    """Whether operations may be lost."""

    @property
    def hears(self) -> bool:
        """Whether the server's program notices operations that it does not answer."""

    def prepare(self, seed: int, size: int, token: bytes) -> bytes:
        """Allocate the part's memory; returns a token of it if the client accesses it."""

    def receive(self) -> Awaitable[Any]:
        """Receive one operation."""

    def took(self, arrived: Any, tally: Tally) -> int | None:
        """Check and count what was received; returns its immediate data."""

    def reply(self, imm: int | None) -> Awaitable[object]:
        """Answer an operation with the same operation."""

    def verify(self, count: int) -> str:
        """The first error after so many operations; empty: none."""

    def release(self) -> None:
        """Release the part's memory; a second call does nothing."""


class Sends:
    hears = True
    lossy = False

    def __init__(self, conn: aiordma.Connection, opened: wire.Open) -> None:
        self._conn = conn
        self._imm = opened.imm
        self._reply = self._expected = b""
        self._last: Message | None = None

    def prepare(self, seed: int, size: int, token: bytes) -> bytes:
        self._expected, self._reply = contents(seed, size), contents(seed + SERVER, size)
        return b""

    def reply(self, imm: int | None) -> Awaitable[object]:
        return self._conn.send_nowait(self._reply, imm=imm)

    def receive(self) -> Awaitable[Message]:
        return self._conn.recv()

    def took(self, message: Message, tally: Tally) -> int | None:
        if self._last is not None:
            self._last.release()
        self._last = message
        wrong = ""
        if tally.verify_all or not tally.count or len(message) != len(self._expected):
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
