"""Test receiving into the caller's own memory."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest

from aiordma import Config, MessageTooLongError
from aiordma._core.frames import HEADER_SIZE
from aiordma.errors import ConnectionBrokenError

from .connection_factory import (
    ConnectionFactory,
    check_alive,
    ends,
    pattern,
    pool_statistics,
    yield_loop,
)
from .marks import on_pair

pytestmark = on_pair

T = TypeVar("T")
EAGER = Config().eager_size - HEADER_SIZE
STAGED = 64 << 10  # longer messages are read straight into their memory
READ_SIZE = 8 << 20
SIZES = [0, 1, EAGER, EAGER + 1, STAGED, STAGED + 1, 1 << 20, READ_SIZE + 1]


@pytest.mark.parametrize("early", [False, True], ids=["waiting", "late"])
@pytest.mark.parametrize("size", SIZES)
async def test_recv_into_and_recv_with_receive_messages_of_various_sizes(
    factory: ConnectionFactory, size: int, early: bool
) -> None:
    """With `early` the message arrives before the receiver starts, otherwise the receiver waits for
    it.
    """
    data = pattern(size)
    room = 10
    asked: list[int] = []

    def allocate(length: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        asked.append(length)
        return np.empty(length, np.uint8)

    async with factory.pair(Config()) as (client, server):

        async def received(begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
            sending = asyncio.create_task(client.send(data, imm=size)) if early else None
            if sending is not None:
                await yield_loop(30)
            receiving = asyncio.create_task(begin())
            await (sending or client.send(data, imm=size))
            return await receiving

        memory = bytearray(size + room)
        assert await received(lambda: server.recv_into(memory)) == (size, size)
        assert memory[:size] == data
        assert not any(memory[size:])
        assert server.statistics().bytes_received == size
        memory.clear()  # nothing holds it
        array, *rest = await received(lambda: server.recv_with(allocate))
        assert (array.tobytes(), rest, asked) == (data, [size, size], [size])
        with (await received(lambda: server.recv_with(server.alloc))).memory as buffer:
            assert buffer.view == data
        await check_alive(client, server)


async def test_failed_recv_into_does_not_leak_memory(factory: ConnectionFactory) -> None:
    """Neither the exception that the user keeps nor a reference cycle may hold the memory."""
    async with factory.pair() as (client, server):
        sending = asyncio.create_task(client.send(bytes(STAGED)))
        kept = await ends(server.recv_into(bytearray(1)), MessageTooLongError)
        collecting = gc.isenabled()
        gc.disable()
        try:
            await ends(server.recv_into(bytearray(1)), MessageTooLongError)
            server.abort()
            await server.wait_closed()
            await asyncio.wait([sending])
            await client.wait_closed()
            assert kept.__traceback__ is not None
            assert not pool_statistics(server).leases
        finally:
            if collecting:
                gc.enable()
        assert isinstance(sending.exception(), ConnectionBrokenError)
