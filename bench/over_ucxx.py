"""A contender that uses ucxx, the asyncio package of UCX, over shared memory.

Both processes poll. A receiver must know a message's length in advance, so the client sends the
length first. Messages are received into the program's own memory, as with `recv_into`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from typing import Any

import numpy as np

from .ways import HOST, Place

for name, value in {
    "UCX_TLS": "posix,sysv,cma,self,tcp",  # tcp is for connecting
    "UCX_LOG_LEVEL": "error",  # warnings go to stdout
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCXPY_PROGRESS_MODE": "polling",
}.items():
    os.environ.setdefault(name, value)

ucxx: Any = import_module("ucxx")  # reads the environment; has no type hints

DONE = np.ones(1, np.uint8)


async def answer(endpoint: Any) -> None:
    """Receive the message length, and then echo each message."""
    length = np.empty(1, np.uint64)
    with suppress(ucxx.exceptions.UCXError):
        await endpoint.recv(length)
        memory = np.empty(int(length[0]), np.uint8)
        while True:
            await endpoint.recv(memory)
            await endpoint.send(memory)


async def sink(endpoint: Any) -> None:
    """Receive batches of messages, and acknowledge each batch.

    Each batch starts with the message length and the number of messages.
    """
    numbers = np.empty(2, np.uint64)
    memory = np.empty(0, np.uint8)
    with suppress(ucxx.exceptions.UCXError):
        while True:
            await endpoint.recv(numbers)
            length, count = map(int, numbers)
            if len(memory) != length:
                memory = np.empty(length, np.uint8)
            for _ in range(count):
                await endpoint.recv(memory)
            await endpoint.send(DONE)


SERVICES = {"echo": answer, "echo_many": answer, "sink": sink}


class UCXXClient:
    """A client that uses one echo connection per message length."""

    def __init__(self, endpoint: Any, place: Place) -> None:
        self._endpoint = endpoint
        self._place = place
        self._echoing: dict[int, Any] = {}

    async def _of_length(self, length: int) -> Any:
        if length not in self._echoing:
            endpoint = self._endpoint
            if self._echoing:
                endpoint = await ucxx.create_endpoint(HOST, self._place)
            self._echoing[length] = endpoint
            await endpoint.send(np.array([length], np.uint64))
        return self._echoing[length]

    async def echo(self, data: bytes) -> bytes:
        endpoint = await self._of_length(len(data))
        back = np.empty(len(data), np.uint8)
        await endpoint.send(np.frombuffer(data, np.uint8))
        await endpoint.recv(back)
        return back.tobytes()

    async def echo_tasks(self, data: bytes, count: int, window: int) -> None:
        await self._of_length(len(data))

        async def talk() -> None:
            for _ in range(count // window):
                await self.echo(data)

        await asyncio.gather(*(talk() for _ in range(window)))

    async def send_gather(self, data: bytes, count: int, window: int) -> None:
        endpoint, message = self._endpoint, np.frombuffer(data, np.uint8)
        await endpoint.send(np.array([len(data), count], np.uint64))
        for _ in range(count // window):
            await asyncio.gather(*(endpoint.send(message) for _ in range(window)))
        await endpoint.recv(np.empty(1, np.uint8))

    async def close(self) -> None:
        for endpoint in {self._endpoint, *self._echoing.values()}:
            await endpoint.close()


class OverUCXX:
    def prepare(self, data: bytes) -> bytes:
        return data

    @asynccontextmanager
    async def serve(self, folder: str) -> AsyncIterator[dict[str, Place]]:
        listeners = {name: ucxx.create_listener(service) for name, service in SERVICES.items()}
        yield {name: listener.port for name, listener in listeners.items()}

    @asynccontextmanager
    async def connect(self, place: Place) -> AsyncIterator[UCXXClient]:
        client = UCXXClient(await ucxx.create_endpoint(HOST, place), place)
        try:
            yield client
        finally:
            await client.close()
