"""Receiving into memory of the caller's own."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from aiordma import Config, Message, MessageTooLongError
from aiordma._core.frames import HEADER_SIZE
from aiordma.errors import ConnectionBrokenError

from .connection_factory import (
    SMALL,
    ConnectionFactory,
    check_alive,
    ends,
    pattern,
    pool_statistics,
    yield_loop,
)
from .inside import Begun
from .marks import on_pair

pytestmark = on_pair

T = TypeVar("T")
EAGER = Config().eager_size - HEADER_SIZE
STAGED = 64 << 10  # longer messages are read straight into their memory
READ_SIZE = 8 << 20
SIZES = [0, 1, EAGER, EAGER + 1, STAGED, STAGED + 1, 1 << 20, READ_SIZE + 1]


@pytest.mark.parametrize("early", [False, True], ids=["waiting", "late"])
@pytest.mark.parametrize("size", SIZES)
async def test_sizes(factory: ConnectionFactory, size: int, early: bool) -> None:
    """Whether it waits for the message or the message for it."""
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


async def test_more_than_the_pool_holds(factory: ConnectionFactory) -> None:
    small_pool = replace(SMALL, pool_limit=4 << 20)
    size = 24 << 20
    data = pattern(size)
    async with factory.pair(small_pool) as (client, server):
        memory = bytearray(size)
        receiving = asyncio.create_task(server.recv_into(memory))
        await client.send(data)
        assert (await receiving).length == size
        assert memory == data
        assert pool_statistics(server).registered_bytes <= 4 << 20


@pytest.mark.parametrize("size", [100, EAGER + 1, STAGED + 1, 1 << 20])
async def test_a_message_that_does_not_fit_stays(factory: ConnectionFactory, size: int) -> None:
    async with factory.pair(replace(SMALL, fetch_ahead=0)) as (client, server):
        data = pattern(size)
        sending = asyncio.create_task(client.send(data))
        first = asyncio.create_task(server.recv_into(bytearray(size - 1)))
        second = asyncio.create_task(server.recv_into(bytearray(1)))
        third = asyncio.create_task(server.recv())
        for task, limit in ((first, size - 1), (second, 1)):
            error = await ends(task, MessageTooLongError)
            assert isinstance(error, MessageTooLongError)
            assert (error.amount, error.limit) == (size, limit)
        assert await third == data
        await sending


async def test_who_comes_just_then_waits_for_the_next(factory: ConnectionFactory) -> None:
    """Between being told that a message has landed and taking it, no other task can take it."""
    size = 1 << 20
    async with factory.pair(Config()) as (client, server):
        late: list[Begun[Message]] = []
        memory = bytearray(size)
        begun = Begun(server.recv_into(memory), lambda: late.append(Begun(server.recv())))
        first = asyncio.create_task(begun.task())
        await client.send(pattern(size))
        assert (await first).length == size
        assert memory == pattern(size)
        await client.send(b"the next")
        assert await late[0] == b"the next"


async def test_who_was_refused_keeps_no_memory(factory: ConnectionFactory) -> None:
    """Neither by the exception that the user keeps, nor by a cycle that only a collector ends."""
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


async def test_one_that_is_too_short_before_one_that_is_not(factory: ConnectionFactory) -> None:
    """The first is told before the message is read into the memory of the second.

    The second message comes before the first receiver has looked.
    """
    long = 200_000
    async with factory.pair(SMALL) as (client, server):
        short = asyncio.create_task(server.recv_into(bytearray(1)))
        fits = asyncio.create_task(server.recv_into(bytearray(long)))
        await yield_loop(3)
        sends = [client.send_nowait(bytes(long)), client.send_nowait(bytes(long))]
        with pytest.raises(MessageTooLongError):
            await short
        assert (await fits).length == long
        assert len(await server.recv()) == long
        await asyncio.gather(*sends)
