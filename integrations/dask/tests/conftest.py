"""Fixtures for the tests of dask-aiordma: the embedded device, and pairs of comms."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from dask_aiordma.backend import RDMA, RDMAListener
from distributed.comm.core import connect, listen

# A cluster's processes inherit this variable.
os.environ["AIORDMA_DEVICE"] = "embedded0"

Pair = tuple[RDMA, RDMA]


async def connected(
    listen_with: dict[str, Any], connect_with: dict[str, Any], **named: Any
) -> Pair:
    """Return the connecting end and the accepting end of a new connection."""
    accepted: asyncio.Queue[RDMA] = asyncio.Queue()
    async with listen("rdma://127.0.0.1:0", accepted.put, **listen_with, **named) as listener:
        comm = await connect(listener.contact_address, **connect_with, **named)
        return comm, await accepted.get()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    ends = await connected({}, {})
    yield ends
    for comm in ends:
        await comm.close()


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[RDMAListener]]]:
    """Provide a function that starts a listener. All listeners are stopped after the test."""
    async with AsyncExitStack() as stack:

        async def start(handler: Callable[[RDMA], Awaitable[None]], **named: Any) -> RDMAListener:
            address = named.pop("address", "rdma://127.0.0.1:0")
            return await stack.enter_async_context(listen(address, handler, **named))

        yield start


async def echo(comm: RDMA) -> None:
    """Echo each message until the peer closes the comm."""
    try:
        while True:
            await comm.write(await comm.read())
    except OSError:
        await comm.close()
