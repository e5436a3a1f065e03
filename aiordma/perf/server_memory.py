"""The server's end of one connection for one-sided operations: write, read, atomic."""

from __future__ import annotations

import sys
from collections.abc import Awaitable

import aiordma
from aiordma import Buffer, Message, RemoteRegion, Rights, Share

from . import wire
from .contents import SERVER, contents, difference
from .server_ends import Tally


class Memory:
    """The server's memory for one part, with the rights that the operation needs."""

    hears: bool = False
    lossy = False
    rights: Rights

    def __init__(self, conn: aiordma.Connection, opened: wire.Open) -> None:
        self._conn = conn
        self._memory: Buffer | None = None
        self._share: Share | None = None

    @property
    def memory(self) -> Buffer:
        assert self._memory is not None
        return self._memory

    def open_up(self, size: int, filling: bytes) -> bytes:
        self._memory = self._conn.alloc(size)
        self._memory.view[:] = filling
        self._share = self._conn.share(self._memory, access=self.rights, lease=None)
        return self._share.token.pack()

    def receive(self) -> Awaitable[Message]:
        raise aiordma.ProtocolError(
            "only send, write and stream can be answered, but the client wants answers"
        )

    def took(self, message: Message, tally: Tally) -> int | None:
        raise NotImplementedError

    def reply(self, imm: int | None) -> Awaitable[object]:
        raise NotImplementedError

    def release(self) -> None:
        if self._share is not None:
            self._share.revoke()
            self._share = None
        if self._memory is not None:
            self._memory.release()
            self._memory = None


class Writes(Memory):
    rights = Rights.WRITE

    def __init__(self, conn: aiordma.Connection, opened: wire.Open) -> None:
        super().__init__(conn, opened)
        self.hears: bool = opened.imm
        self._reply: Buffer | None = None
        self._remote: RemoteRegion | None = None
        self._expected = b""

    def prepare(self, seed: int, size: int, token: bytes) -> bytes:
        self._expected = contents(seed, size)
        self._remote = self._conn.open_region(token)
        self._reply = self._conn.alloc(size)
        self._reply.view[:] = contents(seed + SERVER, size)
        return self.open_up(size, bytes(size))

    def reply(self, imm: int | None) -> Awaitable[object]:
        assert self._reply is not None
        assert self._remote is not None
        return self._conn.write(self._reply, self._remote, imm=imm)

    def receive(self) -> Awaitable[Message]:
        return self._conn.recv()

    def took(self, message: Message, tally: Tally) -> int | None:
        with message:
            imm = message.imm
        tally.add("" if imm == tally.count & 0xFFFF_FFFF else f"immediate data {imm}")
        return imm

    def verify(self, count: int) -> str:
        return difference(self.memory.view, self._expected) if count else ""

    def release(self) -> None:
        super().release()
        if self._reply is not None:
            self._reply.release()
            self._reply = None


class Reads(Memory):
    rights = Rights.READ

    def prepare(self, seed: int, size: int, token: bytes) -> bytes:
        return self.open_up(size, contents(seed + SERVER, size))

    def verify(self, count: int) -> str:
        return ""  # the client compares


class Atomics(Memory):
    rights = Rights.ATOMIC

    def prepare(self, seed: int, size: int, token: bytes) -> bytes:
        return self.open_up(8, bytes(8))

    def verify(self, count: int) -> str:
        there = int.from_bytes(self.memory.view, sys.byteorder)
        return "" if there == count else f"the sum of {count} additions of one is {there}"
