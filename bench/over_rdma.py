"""A contender that uses aiordma's connections, measured with `aiordma.perf` on both sides.

This module adds measurements not supported by `aiordma.perf`: messages sent by tasks, and the
styles defined in `streaming`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Literal

import aiordma
from aiordma import arrays
from aiordma.perf.client import PerfClient, Result
from aiordma.perf.server import PerfServer
from aiordma.perf.settings import Settings

from . import streaming
from .ways import DEVICE, HOST, SYNC_MESSAGE, Measuring, Place

KEY = b"of both sides of a measurement"


async def answer(conn: aiordma.Connection) -> None:
    """Echo each message without waiting for earlier echoes to be sent.

    The client limits the number of messages in flight.
    """

    def reply(message: aiordma.Message) -> None:
        conn.send_nowait(message).add_done_callback(lambda _: message.release())

    async for message in conn:
        reply(message)


async def sink(conn: aiordma.Connection) -> None:
    async for message in conn:
        with message:
            if len(message) == len(SYNC_MESSAGE):
                await conn.send(message)


async def stay_awake() -> None:
    """Keep the event loop busy by scheduling a call in each iteration."""
    for _ in repeat(None):
        await asyncio.sleep(0)


async def take_arrays(conn: aiordma.Connection) -> None:
    with suppress(aiordma.ConnectionClosedError):
        while True:
            await arrays.recv(conn)
            await conn.send(SYNC_MESSAGE)


async def take_arrays_into(conn: aiordma.Connection) -> None:
    """Receive each set of arrays into the same memory, overwriting the previous set."""
    memory = bytearray(b"\xff") * (1 << 27)
    with suppress(aiordma.ConnectionClosedError):
        while True:
            length, _ = await conn.recv_into(memory)
            arrays.unpack(memoryview(memory)[:length])
            await conn.send(SYNC_MESSAGE)


SERVICES = {
    **{"echo": answer, "echo_many": answer, "sink": sink, "styles": streaming.serve},
    **{"arrays": take_arrays, "arrays into": take_arrays_into},
}


class RDMAClient:
    def __init__(self, conn: aiordma.Connection) -> None:
        self.conn = conn

    async def echo(self, data: bytes) -> memoryview:
        await self.conn.send(data)
        with await self.conn.recv() as message:
            return message.data

    async def echo_many(self, data: bytes, count: int, window: int) -> None:
        conn = self.conn
        for _ in range(window):
            conn.send_nowait(data)
        for left in range(count, 0, -1):
            (await conn.recv()).release()
            if left > window:
                conn.send_nowait(data)

    async def send_many(self, data: bytes, count: int, window: int) -> None:
        await streaming.window(self.conn, data, count)
        await self.echo(SYNC_MESSAGE)

    async def echo_tasks(self, data: bytes, count: int, window: int) -> None:
        async def talk() -> None:
            for _ in range(count // window):
                await self.echo(data)

        await asyncio.gather(*(talk() for _ in range(window)))

    async def arrays(self, named: dict[str, Any]) -> None:
        await arrays.send(self.conn, named)
        (await self.conn.recv()).release()

    async def stream(self, **style: Any) -> float:
        return await streaming.stream(self.conn, **style)


@dataclass(frozen=True)
class OverRDMA:
    """The aiordma transport with the given options.

    `polling` is in seconds, or None for the default. If `awake` is True, the server's event loop
    never sleeps. `links` is the value of AIORDMA_EMBEDDED_LINKS, which is set before the device
    starts.
    """

    via: Literal["cm", "tcp"] = "cm"
    polling: float | None = None
    in_band: bool = True
    encrypt: bool = False
    awake: bool = False
    links: str = ""

    def __post_init__(self) -> None:
        if self.links:
            os.environ["AIORDMA_EMBEDDED_LINKS"] = self.links

    @property
    def options(self) -> dict[str, Any]:
        config = aiordma.Config(in_band=self.in_band)
        if self.polling is not None:
            config = replace(config, polling=self.polling)
        security = {"auth": KEY, "encrypt": True} if self.encrypt else {}
        return {"device": DEVICE, "via": self.via, "config": config, **security}

    def prepare(self, data: bytes) -> bytes:
        return data

    @asynccontextmanager
    async def serve(self, folder: str) -> AsyncIterator[dict[str, Place]]:
        async with AsyncExitStack() as stack:
            places: dict[str, Place] = {}
            for name, service in SERVICES.items():
                server = await aiordma.start_server(service, HOST, **self.options)
                places[name] = (await stack.enter_async_context(server)).port
            perf = await stack.enter_async_context(await PerfServer.start(HOST, 0, **self.options))
            places["perf"] = perf.listening.port
            if self.awake:
                stack.callback(asyncio.create_task(stay_awake()).cancel)
            yield places

    @asynccontextmanager
    async def connect(self, place: Place) -> AsyncIterator[RDMAClient]:
        assert isinstance(place, int)
        async with await aiordma.connect(HOST, place, **self.options) as conn:
            yield RDMAClient(conn)

    def measuring(self, places: dict[str, Place], stack: AsyncExitStack) -> Measuring:
        return ByPerf(self, places, stack)


class ByPerf(Measuring):
    """The jobs measured with `aiordma.perf`."""

    _way: OverRDMA

    async def _perf(
        self, operation: str, metric: str, size: int, count: int, **more: Any
    ) -> Result:
        port, options = self._places["perf"], self._way.options
        assert isinstance(port, int)
        settings = Settings(
            operation=operation, metric=metric, sizes=(size,), iterations=count, **more
        )
        async with PerfClient.connect(settings, HOST, port, **options) as client:
            result = await client.measure(size)
        if result is None or result.mismatch:
            raise ValueError(f"{operation} of {size} bytes failed: {result and result.mismatch}")
        return result

    async def _each(self, operation: str, size: int, count: int, **more: Any) -> float:
        """Run operations concurrently, and return the time per operation in seconds."""
        result = await self._perf(operation, "bw", size, count, **more)
        return result.seconds / result.operations

    async def echo(self, size: int, count: int) -> float:
        result = await self._perf("send", "lat", size, count)
        assert result.latency is not None
        return 2 * result.latency.median

    async def echo_many(self, size: int, count: int, window: int) -> float:
        return 2 * await self._each("send", size, count, depth=window, bidirectional=True)

    async def echo_together(self, size: int, count: int, connections: int) -> float:
        more = {"connections": connections, "bidirectional": True}
        return 2 * await self._each("send", size, count, **more)

    async def send_many(self, size: int, count: int, window: int) -> float:
        return await self._each("send", size, count, depth=window)

    async def _awaited(self, operation: str, size: int, count: int) -> float:
        result = await self._perf(operation, "lat", size, count)
        assert result.completion is not None
        return result.completion.median

    async def write(self, size: int, count: int) -> float:
        return await self._awaited("write", size, count)

    async def read(self, size: int, count: int) -> float:
        return await self._awaited("read", size, count)

    async def write_many(self, size: int, count: int, window: int) -> float:
        return await self._each("write", size, count, depth=window)

    async def read_many(self, size: int, count: int, window: int) -> float:
        return await self._each("read", size, count, depth=window)

    async def write_batch(self, size: int, count: int, window: int) -> float:
        return await self._each("write", size, count, depth=window, batch=window)
