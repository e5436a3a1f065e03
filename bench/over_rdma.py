"""aiordma's connections, used as its documentation has it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Literal

import aiordma

from . import streaming
from .ways import DEVICE, ENOUGH, HOST, Place

AWAKE, ASLEEP = b"awake", b"asleep"
KEY = b"of both sides of a measurement"
MEMORY = 1 << 20  # bytes that the server lets its clients reach


async def answer(conn: aiordma.Connection) -> None:
    async for message in conn:
        with message:
            await conn.send(message)


async def answer_at_once(conn: aiordma.Connection) -> None:
    """Takes the next message while answers are under way, of which its client bounds the number."""

    def answer(message: aiordma.Message) -> None:
        conn.send_nowait(message).add_done_callback(lambda _: message.release())

    async for message in conn:
        answer(message)


async def sink(conn: aiordma.Connection) -> None:
    async for message in conn:
        with message:
            if len(message) == len(ENOUGH):
                await conn.send(message)


async def lend(conn: aiordma.Connection) -> None:
    """Memory for one-sided operations.  Messages say AWAKE, or that the loop may sleep again."""
    rights = aiordma.Rights.READ | aiordma.Rights.WRITE
    awake: asyncio.Task[None] | None = None
    with conn.alloc(MEMORY) as buffer:
        await conn.send_region(buffer, access=rights, lease=None)
        async for message in conn:
            if awake:
                awake.cancel()
            awake = asyncio.create_task(stay_awake()) if bytes(message) == AWAKE else None
            await conn.send(message)


async def stay_awake() -> None:
    """A program that has something to do in every iteration of its loop."""
    for _ in repeat(None):
        await asyncio.sleep(0)


SERVICES = {
    "echo": answer,
    "echo_many": answer_at_once,
    "sink": sink,
    "memory": lend,
    "styles": streaming.serve,
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
        conn = self.conn
        under_way: deque[asyncio.Future[None]] = deque()
        for _ in range(count):
            if len(under_way) == window:
                await under_way.popleft()
            under_way.append(conn.send_nowait(data))
        await self.echo(ENOUGH)

    async def send_gather(self, data: bytes, count: int, window: int) -> None:
        conn = self.conn
        for _ in range(count // window):
            await asyncio.gather(*(conn.send(data) for _ in range(window)))
        await self.echo(ENOUGH)

    async def echo_tasks(self, data: bytes, count: int, window: int) -> None:
        async def talk() -> None:
            for _ in range(count // window):
                await self.echo(data)

        await asyncio.gather(*(talk() for _ in range(window)))

    async def stream(self, **style: Any) -> float:
        return await streaming.stream(self.conn, **style)

    async def wake(self, awake: int) -> None:
        await self.echo(AWAKE if awake else ASLEEP)


@dataclass(frozen=True)
class OverRDMA:
    """`via`, `polling` (seconds; None: as it comes), `in_band` and `encrypt` are those of aiordma.

    What encrypts shares no memory, so it has no service for that.
    """

    via: Literal["cm", "tcp"] = "cm"
    polling: float | None = None
    in_band: bool = True
    encrypt: bool = False

    @property
    def config(self) -> aiordma.Config:
        config = aiordma.Config(in_band=self.in_band)
        return config if self.polling is None else replace(config, polling=self.polling)

    @property
    def options(self) -> dict[str, Any]:
        security = {"auth": KEY, "encrypt": True} if self.encrypt else {}
        return {"device": DEVICE, "via": self.via, "config": self.config, **security}

    def prepare(self, data: bytes) -> bytes:
        return data

    @asynccontextmanager
    async def serve(self, folder: str) -> AsyncIterator[dict[str, Place]]:
        async with AsyncExitStack() as stack:
            places: dict[str, Place] = {}
            for name, service in SERVICES.items():
                server = await aiordma.start_server(service, HOST, **self.options)
                places[name] = (await stack.enter_async_context(server)).port
            yield places

    @asynccontextmanager
    async def connect(self, place: Place) -> AsyncIterator[RDMAClient]:
        assert isinstance(place, int)
        async with await aiordma.connect(HOST, place, **self.options) as conn:
            yield RDMAClient(conn)
