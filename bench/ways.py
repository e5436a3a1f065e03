"""Ways to echo a message between two processes: a server and a client of each.

Every one of them echoes messages, not bytes: the server has the whole message before it answers.
Over TCP a message is an 8-byte length and its contents, and the client makes that frame before the
clock starts. The protocol receives into one buffer that it uses again and again, and sends from
there; the streams are used as their documentation has it.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import cast

import aiordma

HOST = "127.0.0.1"
DEVICE = "embedded0"
LENGTH = struct.Struct("<Q")
ROOM = 16 << 20  # the longest frame of the protocol

Echo = Callable[[bytes], Awaitable[bytes | memoryview]]
"""Sends what `Way.prepare` made and returns the contents of the message that came back."""


@dataclass(frozen=True)
class Way:
    """`serve` gives its port and serves until it is left; `connect` takes the port."""

    name: str
    prepare: Callable[[bytes], bytes]
    serve: Callable[[], AbstractAsyncContextManager[int]]
    connect: Callable[[int], AbstractAsyncContextManager[Echo]]


# ---- aiordma ------------------------------------------------------------------------------------


async def answer(conn: aiordma.Connection) -> None:
    async for message in conn:
        with message:
            await conn.send(message)


@asynccontextmanager
async def serve_aiordma() -> AsyncIterator[int]:
    async with await aiordma.start_server(answer, HOST, device=DEVICE) as server:
        yield server.port


@asynccontextmanager
async def connect_aiordma(port: int) -> AsyncIterator[Echo]:
    async with await aiordma.connect(HOST, port, device=DEVICE) as conn:

        async def echo(data: bytes) -> memoryview:
            await conn.send(data)
            with await conn.recv() as message:
                return message.data

        yield echo


# ---- asyncio streams ----------------------------------------------------------------------------


def frame(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


async def read_message(reader: asyncio.StreamReader) -> bytes:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return await reader.readexactly(length)


async def answer_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError):
        while True:
            data = await read_message(reader)
            writer.writelines([LENGTH.pack(len(data)), data])
            await writer.drain()
    writer.close()


@asynccontextmanager
async def serve_streams() -> AsyncIterator[int]:
    async with await asyncio.start_server(answer_stream, HOST, 0) as server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def connect_streams(port: int) -> AsyncIterator[Echo]:
    reader, writer = await asyncio.open_connection(HOST, port)

    async def echo(frame: bytes) -> bytes:
        writer.write(frame)
        await writer.drain()
        return await read_message(reader)

    yield echo
    writer.close()
    await writer.wait_closed()


# ---- asyncio protocol ---------------------------------------------------------------------------


class Frames(asyncio.BufferedProtocol):
    """Collects one frame at a time in one buffer and hands it to `whole`."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(ROOM))
        self.filled = 0
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.view[self.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self.filled += nbytes
        if self.filled >= LENGTH.size:
            length = LENGTH.size + LENGTH.unpack_from(self.view)[0]
            if self.filled == length:
                self.filled = 0
                self.whole(self.view[:length])

    def whole(self, frame: memoryview) -> None:
        raise NotImplementedError


class EchoProtocol(Frames):
    def whole(self, frame: memoryview) -> None:
        self.transport.write(frame)


class ClientProtocol(Frames):
    def whole(self, frame: memoryview) -> None:
        self.arrived.set_result(frame[LENGTH.size :])

    async def echo(self, frame: bytes) -> memoryview:
        self.arrived: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        self.transport.write(frame)
        return await self.arrived


@asynccontextmanager
async def serve_protocol() -> AsyncIterator[int]:
    server = await asyncio.get_running_loop().create_server(EchoProtocol, HOST, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def connect_protocol(port: int) -> AsyncIterator[Echo]:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_connection(ClientProtocol, HOST, port)
    yield protocol.echo
    transport.close()
    await protocol.closed


WAYS = {
    way.name: way
    for way in (
        Way("aiordma", bytes, serve_aiordma, connect_aiordma),
        Way("streams", frame, serve_streams, connect_streams),
        Way("protocol", frame, serve_protocol, connect_protocol),
    )
}
