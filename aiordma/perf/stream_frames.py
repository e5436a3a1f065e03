"""The first message on a stream: its length in two bytes, then the message of `wire`."""

from __future__ import annotations

import asyncio

from . import wire

# The limit of a reader's buffer, in bytes.
STREAM_LIMIT = 1 << 20


def send_over(writer: asyncio.StreamWriter, message: wire.Wire) -> None:
    data = wire.pack(message)
    writer.write(len(data).to_bytes(2, "big") + data)


async def receive_from(reader: asyncio.StreamReader) -> wire.Wire:
    length = int.from_bytes(await reader.readexactly(2), "big")
    return wire.unpack(await reader.readexactly(length))


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()
