"""The ends of measured connections and streams that transfer messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import aiordma
from aiordma import Message

from . import wire
from .contents import difference
from .ends import End, Load, Run, imm_mismatch

# The size limit of a stream reader's buffer, in bytes.
STREAM_LIMIT = 1 << 20

# The number of writes after which a sender yields to the loop. `drain` does not yield while the
# buffer has room.
YIELD_AFTER = 64


class Sends(End):
    """An end that sends messages from ordinary, unregistered memory."""

    def __init__(self, conn: aiordma.Connection) -> None:
        self._conn = conn
        self._last: Message | None = None

    def prepare(self, load: Load) -> bytes:
        self._sent, self._expected = load.sent, load.expected
        self.set_numbered(load)
        return b""

    def operate(self, number: int) -> Awaitable[None]:
        return self._conn.send(self._sent, imm=self.imm(number))

    def begin(self, number: int) -> asyncio.Future[None]:
        return self._conn.send_nowait(self._sent, imm=self.imm(number))

    def reply(self, number: int) -> asyncio.Future[None]:
        return self.begin(number)

    def receive(self) -> Awaitable[Message]:
        return self._conn.recv()

    def check(self, arrived: Message, number: int | None, compare_payload: bool) -> str:
        # Keep the last message until the part ends, because `verify` compares its contents.
        if self._last is not None:
            self._last.release()
        self._last = arrived
        imm = None if number is None else self.imm(number)
        if arrived.imm != imm:
            return imm_mismatch(arrived.imm, imm)
        if compare_payload or len(arrived) != len(self._expected):
            return difference(arrived.data, self._expected)
        return ""

    def verify(self, own_operations: int, peer_operations: int) -> str:
        return "" if self._last is None else difference(self._last.data, self._expected)

    def release(self) -> None:
        if self._last is not None:
            self._last.release()
            self._last = None


class Streams(End):
    """An end that sends equal-sized chunks of data over a stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._last: bytes | None = None

    def prepare(self, load: Load) -> bytes:
        self._sent, self._expected = load.sent, load.expected
        return b""

    async def operate(self, number: int) -> None:
        self._writer.write(self._sent)
        await self._writer.drain()

    def receive(self) -> Awaitable[bytes]:
        return self._reader.readexactly(len(self._expected))

    def check(self, arrived: bytes, number: int | None, compare_payload: bool) -> str:
        self._last = arrived
        return difference(arrived, self._expected) if compare_payload else ""

    async def flood(self, run: Run) -> None:
        """Write chunks without timing them. The stream's buffers limit the data in flight."""
        writer, data = self._writer, self._sent
        while run.done < run.limit:
            writer.write(data)
            await writer.drain()
            run.done += 1
            if not run.done % YIELD_AFTER:
                await asyncio.sleep(0)

    def verify(self, own_operations: int, peer_operations: int) -> str:
        return "" if self._last is None else difference(self._last, self._expected)

    def release(self) -> None:
        self._last = None


# ---- the first message on a stream: its length in two bytes, then a `wire` message ---------------


def send_over(writer: asyncio.StreamWriter, message: wire.Wire) -> None:
    data = wire.pack(message)
    writer.write(len(data).to_bytes(2, "big") + data)


async def receive_from(reader: asyncio.StreamReader) -> wire.Wire:
    length = int.from_bytes(await reader.readexactly(2), "big")
    return wire.unpack(await reader.readexactly(length))


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()
