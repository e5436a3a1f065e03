"""Stores and servers, in this process and in others, on AIORDMA_DEVICE (default: embedded0)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiordma_kv import Client, Store, server

import aiordma
from aiordma import rpc, testing, verbs

DEVICE = os.environ.get("AIORDMA_DEVICE", "embedded0")
PAGE = 4096


def address_of(name: str) -> str:
    [device] = [device for device in verbs.devices() if device.name == name]
    with device.open() as context:
        return str(context.choose_gid().gid.ip)


HOST = "127.0.0.1" if DEVICE == "embedded0" else address_of(DEVICE)

uvloop.new_event_loop().close()  # libuv keeps a pipe that it creates for its first loop


@pytest.fixture(autouse=True)
def tested_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIORDMA_DEVICE", DEVICE)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


@pytest.fixture(autouse=True)
def leak_check(tested_device: None) -> Iterator[None]:
    with testing.check_leaks():
        yield


@dataclass
class Clock:
    """The clock of a store, which only a test advances."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Served:
    """A store and its server in this process."""

    store: Store
    server: aiordma.Server
    clock: Clock

    @property
    def name(self) -> str:
        return f"{HOST}:{self.server.port}"

    async def end_sessions(self) -> None:
        """Wait until the sessions that exist now have ended and released what they held."""
        for session in list(self.store._sessions):
            await session.released


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def serve(
    stack: AsyncExitStack,
    pages: int = 16,
    *,
    auth: bytes | None = None,
    encrypt: bool = False,
    memory: bytearray | None = None,
) -> Served:
    """Serve a store of this size, or in this memory, in this process until the test ends."""
    clock = Clock()
    store = Store(memory or server.allocate(pages * PAGE), encrypt=encrypt)
    store.clock = clock
    stack.callback(store.close)
    started = await server.start_server(store, HOST, auth=auth)
    return Served(store, await stack.enter_async_context(started), clock)


async def wait_connected(client: Client) -> None:
    """Wait until all servers are connected."""
    async with asyncio.timeout(30):
        while not all(client.connected.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def raw_client(stack: AsyncExitStack, served: Served, **options: Any) -> rpc.Client:
    """Connect without the package's client, as a hostile program would."""
    calls = await rpc.connect(HOST, served.server.port, **options)
    return await stack.enter_async_context(calls)


class Process:
    """A server in a process, started by the command line."""

    def __init__(self, *options: str, port: int = 0) -> None:
        command = [sys.executable, "-m", "aiordma_kv", "serve", HOST, str(port), *options]
        self.popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self.popen.stdout is not None
        self.ready = self.popen.stdout.readline()
        assert self.ready.startswith("serving"), self.ready + self.popen.stdout.read()
        self.port = int(self.ready.rsplit(":", 1)[1])
        self.name = f"{HOST}:{self.port}"

    def end(self) -> None:
        assert self.popen.stdout is not None
        self.popen.kill()
        self.popen.wait()
        self.popen.stdout.close()


@pytest.fixture
def start_process() -> Iterator[Callable[..., Process]]:
    with ExitStack() as stack:

        def start(*options: str, port: int = 0) -> Process:
            process = Process(*options, port=port)
            stack.callback(process.end)
            return process

        yield start
