"""A contender that uses asyncio protocols over TCP and Unix sockets.

The protocols receive into one reused buffer, which is the fastest method in asyncio. asyncio's
streams are built on such protocols.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from .ways import HOST, SYNC_MESSAGE, Place

LENGTH = struct.Struct("<Q")
READ = 256 << 10  # bytes to read at a time, as in asyncio, unless a longer frame is expected


def frame(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


@asynccontextmanager
async def serving(
    answering: Mapping[str, Any], make: Callable[..., Awaitable[asyncio.Server]], folder: str = ""
) -> AsyncIterator[dict[str, Place]]:
    """Start a server for each service, and yield the servers' addresses, keyed by service.

    If `folder` is given, each address is the path of a Unix socket in this folder. Otherwise, each
    address is a TCP port.
    """
    async with AsyncExitStack() as stack:
        places: dict[str, Place] = {}
        for name, answer in answering.items():
            path = str(Path(folder, name))
            where = (path,) if folder else (HOST, 0)
            server = await make(answer, *where, backlog=512)
            places[name] = path if folder else server.sockets[0].getsockname()[1]
            await stack.enter_async_context(server)
        yield places


class Frames(asyncio.BufferedProtocol):
    """A protocol that collects frames in one buffer and passes each complete frame to `whole`.

    When `whole` returns, the buffer is reused for the next frame.
    """

    def __init__(self) -> None:
        self.view = memoryview(bytearray(2 * READ))
        self.start = 0  # the offset of the first incomplete frame
        self.end = 0  # the end of the received data
        self.expected = 0  # the length of that frame, or 0 if not known yet
        self.loop = asyncio.get_running_loop()
        self.closed = self.loop.create_future()
        self.writable: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)

    def pause_writing(self) -> None:
        self.writable = self.loop.create_future()

    def resume_writing(self) -> None:
        assert self.writable is not None
        self.writable.set_result(None)
        self.writable = None

    def get_buffer(self, sizehint: int) -> memoryview:
        if self.expected > READ:
            if len(self.view) < self.expected:  # the first frame of this length, at offset 0
                longer = memoryview(bytearray(self.expected + READ))
                longer[: self.end] = self.view[: self.end]
                self.view = longer
            return self.view[self.end : self.start + self.expected]
        return self.view[self.end : self.end + READ]

    def buffer_updated(self, nbytes: int) -> None:
        self.end += nbytes
        while self.end - self.start >= LENGTH.size:
            if not self.expected:
                self.expected = LENGTH.size + LENGTH.unpack_from(self.view, self.start)[0]
            if self.end - self.start < self.expected:
                break
            start, self.start = self.start, self.start + self.expected
            self.expected = 0
            self.whole(self.view[start : self.start])
        if self.start:  # move the remainder, at most one read, to the front
            left = self.end - self.start
            self.view[:left] = self.view[self.start : self.end]
            self.start, self.end = 0, left

    def whole(self, frame: memoryview) -> None:
        raise NotImplementedError


class EchoProtocol(Frames):
    """A protocol that echoes one message at a time.

    The peer must not send anything else until it has received the echo.
    """

    def whole(self, frame: memoryview) -> None:
        self.transport.write(frame)


class EchoManyProtocol(Frames):
    def whole(self, frame: memoryview) -> None:
        self.transport.write(bytes(frame))


class SinkProtocol(Frames):
    def whole(self, frame: memoryview) -> None:
        if len(frame) == LENGTH.size + len(SYNC_MESSAGE):
            self.transport.write(bytes(frame))


class ClientProtocol(Frames):
    def __init__(self) -> None:
        super().__init__()
        self.arrived: Callable[[memoryview], None]

    def whole(self, frame: memoryview) -> None:
        self.arrived(frame)

    async def echo(self, data: bytes) -> memoryview:
        answer: asyncio.Future[memoryview] = self.loop.create_future()
        self.arrived = answer.set_result
        self.transport.write(data)
        return (await answer)[LENGTH.size :]

    async def echo_many(self, data: bytes, count: int, window: int) -> None:
        done = self.loop.create_future()
        left, to_send = count, count - window

        def arrived(_: memoryview) -> None:
            nonlocal left, to_send
            left -= 1
            if to_send:
                to_send -= 1
                self.transport.write(data)
            elif not left:
                done.set_result(None)

        self.arrived = arrived
        for _ in range(window):
            self.transport.write(data)
        await done

    async def send_many(self, data: bytes, count: int, window: int) -> None:
        for _ in range(count):
            self.transport.write(data)
            if self.writable:
                await self.writable
        await self.echo(frame(SYNC_MESSAGE))

    async def echo_tasks(self, data: bytes, count: int, window: int) -> None:
        waiting: deque[asyncio.Future[None]] = deque()
        self.arrived = lambda _: waiting.popleft().set_result(None)

        async def talk() -> None:
            for _ in range(count // window):
                answer: asyncio.Future[None] = self.loop.create_future()
                waiting.append(answer)
                self.transport.write(data)
                await answer

        await asyncio.gather(*(talk() for _ in range(window)))


PROTOCOLS: dict[str, Callable[[], Frames]] = {
    "echo": EchoProtocol,
    "echo_many": EchoManyProtocol,
    "sink": SinkProtocol,
}


@dataclass(frozen=True)
class OverProtocol:
    unix: bool = False

    def prepare(self, data: bytes) -> bytes:
        return frame(data)

    def serve(self, folder: str) -> AbstractAsyncContextManager[dict[str, Place]]:
        loop = asyncio.get_running_loop()
        if self.unix:
            return serving(PROTOCOLS, loop.create_unix_server, folder)
        return serving(PROTOCOLS, loop.create_server)

    @asynccontextmanager
    async def connect(self, place: Place) -> AsyncIterator[ClientProtocol]:
        loop = asyncio.get_running_loop()
        if isinstance(place, str):
            transport, protocol = await loop.create_unix_connection(ClientProtocol, place)
        else:
            transport, protocol = await loop.create_connection(ClientProtocol, HOST, place)
        yield protocol
        transport.close()
        await protocol.closed
