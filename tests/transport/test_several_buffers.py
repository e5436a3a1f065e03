"""Test messages of several buffers, and receivers that supply memory when they know the length."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aiordma import (
    Config,
    Connection,
    ConnectionBrokenError,
    ConnectionClosedError,
    Message,
    MessageTooLongError,
)
from aiordma.errors import BufferStateError

from .connection_factory import ALONE, SMALL, ConnectionFactory, check_alive, ends, pattern
from .marks import on_pair

pytestmark = on_pair

KIB = 1 << 10
# The lengths of each message's buffers. Short messages fit into one frame, and long ones use
# rendezvous. For some long messages, the short buffers or all buffers are copied into one.
LENGTHS = [
    (),
    (0,),
    (0, 0, 5, 0),
    (4, 60),
    (10, 6 * KIB),
    (6 * KIB, 10),
    (100, 300 * KIB),
    (300 * KIB, 100, 0, 200, 5 * KIB, 7),
    (0, 200 * KIB, 0, 200 * KIB, 0),
    (9 << 20, 1, 9 << 20),
    (5 * KIB,) * 100,
    (5 * KIB,) * 300,
    (3,) * 5000,
]


def pieces(lengths: tuple[int, ...]) -> list[bytes]:
    return [pattern(length, seed) for seed, length in enumerate(lengths)]


def name(lengths: tuple[int, ...]) -> str:
    return f"{len(lengths)} of {sum(lengths)}"


@pytest.mark.parametrize("lengths", LENGTHS, ids=name)
async def test_several_buffers_arrive_as_one_message(
    factory: ConnectionFactory, lengths: tuple[int, ...]
) -> None:
    buffers = pieces(lengths)
    data = b"".join(buffers)
    async with factory.pair(Config()) as (client, server):
        for sent in (buffers, tuple(bytearray(each) for each in buffers)):
            sending = asyncio.create_task(client.send(sent, imm=7))
            with await server.recv() as message:
                assert message == data
                assert message.imm == 7
            await sending
        memory = bytearray(len(data) + 1)
        sending = asyncio.create_task(client.send(buffers))
        assert await server.recv_into(memory) == (len(data), None)
        assert memory[:-1] == data
        await sending
        assert client.statistics().messages_sent == 3
        assert client.statistics().bytes_sent == 3 * len(data)
        await check_alive(client, server)


async def test_send_joins_buffers_of_different_types_in_order(factory: ConnectionFactory) -> None:
    """The messages keep the order of the calls, including those of one buffer."""
    async with factory.pair() as (client, server):
        array = np.arange(100_000, dtype=np.int32)
        with client.alloc(5000) as leased, client.register(bytearray(50_000)) as region:
            leased.view[:] = pattern(5000)
            region.view[:] = pattern(50_000)
            expected = b"head" + array.tobytes() + pattern(5000) + pattern(50_000)[10:20_000]
            sending = [
                client.send_nowait([b"head", array, leased, region[10:20_000]]),
                client.send_nowait(b"between"),
                client.send_nowait((memoryview(b"head"), array, leased[:], region[10:20_000])),
            ]
            for data in (expected, b"between", expected):
                with await server.recv() as message:
                    assert message == data
            await asyncio.gather(*sending)
        with await received(client, server, pattern(70)) as first:
            sending = [client.send_nowait([first, first])]
            with await server.recv() as message:
                assert message == pattern(70) * 2
            await sending[0]


async def received(conn: Connection, peer: Connection, data: bytes) -> Message:
    """Send `data` from the peer and return the message received."""
    sending = asyncio.create_task(peer.send(data))
    message = await conn.recv()
    await sending
    return message


async def test_send_releases_all_buffers_when_one_is_invalid(factory: ConnectionFactory) -> None:
    async with factory.pair(replace(SMALL, max_message=100_000)) as (client, server):
        held = bytearray(60_000)
        with pytest.raises(TypeError, match="cannot be used as memory"):
            client.send_nowait([held, 5])
        with pytest.raises(MessageTooLongError):
            client.send_nowait([held, held])
        held.clear()
        with client.alloc(10) as buffer:
            pass
        await ends(client.send([b"1", buffer]), BufferStateError)
        await check_alive(client, server)


async def test_send_accepts_hundreds_of_thousands_of_buffers(factory: ConnectionFactory) -> None:
    """Each buffer refers to the next one, but releasing them must not recurse through the whole
    chain.
    """
    many = [b"x"] * 300_000
    async with factory.pair(replace(SMALL, max_message=len(many))) as (client, server):
        sending = client.send_nowait(many)
        with await server.recv() as message:
            assert bytes(message) == b"x" * len(many)
        await sending
        with pytest.raises(TypeError, match="cannot be used as memory"):
            client.send_nowait([*many, 5])
        with pytest.raises(MessageTooLongError):
            client.send_nowait([*many, b"x"])
        await check_alive(client, server)


@pytest.mark.skipif("ASAN_OPTIONS" in os.environ, reason="its allocator ends the process")
async def test_only_the_message_whose_buffers_cannot_be_joined_fails(
    factory: ConnectionFactory,
) -> None:
    """The message fails while it waits for its turn, and the messages around it arrive."""
    async with factory.pair() as (client, server):
        first = [client.send_nowait(pattern(ALONE, n)) for n in range(SMALL.data_receives)]
        large = client.send_nowait([bytes(60 << 20)] * 16)
        last = client.send_nowait(b"last")
        with no_more_memory(30 << 20):
            for n in range(SMALL.data_receives):
                assert await server.recv() == pattern(ALONE, n)
            await ends(large, MemoryError)
        assert await server.recv() == b"last"
        await asyncio.gather(*first, last)
        await check_alive(client, server)


@contextmanager
def no_more_memory(margin: int) -> Iterator[None]:
    """Limit the process to `margin` more bytes of address space inside the block."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + margin, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# ---- memory that the receiver supplies ----------------------------------------------------------


@pytest.mark.parametrize("size", [5, 300 * KIB])
async def test_message_can_be_received_after_allocate_fails(
    factory: ConnectionFactory, size: int
) -> None:
    async with factory.pair() as (client, server):
        sending = asyncio.create_task(client.send(pattern(size)))
        error = LookupError("no memory today")

        def fail(_: int) -> bytearray:
            raise error

        assert await ends(server.recv_with(fail), LookupError) is error
        await ends(server.recv_with(lambda length: bytearray(length - 1)), MessageTooLongError)
        await ends(server.recv_with(lambda _: b"not writable"), ValueError)
        await ends(server.recv_with(lambda length: np.zeros(length, object)), TypeError)
        await ends(server.recv_with(lambda _: None), TypeError)  # type: ignore[arg-type,return-value]
        with pytest.raises(TypeError, match="allocate must be a function"):
            server.recv_with(bytearray(5))  # type: ignore[arg-type, unused-coroutine]
        with await server.recv() as message:
            assert message == pattern(size)
        await sending
        await check_alive(client, server)


async def test_recv_with_fails_when_allocate_aborts_the_connection(
    factory: ConnectionFactory,
) -> None:
    async with factory.pair() as (client, server):
        sending = asyncio.create_task(client.send(pattern(300 * KIB)))

        def end(length: int) -> bytearray:
            server.abort()
            return bytearray(length)

        await ends(server.recv_with(end), ConnectionClosedError)
        await ends(sending, ConnectionBrokenError)


# ---- never awaited -----------------------------------------------------------------------------


async def test_unawaited_operation_raises_never_awaited_warning(factory: ConnectionFactory) -> None:
    async with factory.sharing(5) as (client, server, _, remote):
        with client.alloc(5) as here:
            for forget, method in (
                (lambda: client.send(b"lost"), "send"),
                (client.recv, "recv"),
                (lambda: client.recv_into(bytearray(5)), "recv_into"),
                (lambda: client.recv_with(bytearray), "recv_with"),
                (lambda: aiter(client).__anext__(), "recv"),
                (lambda: client.write(here, remote), "write"),
                (lambda: client.read(remote, here), "read"),
                (lambda: client.read(remote, bytearray(5)), "read"),
            ):
                with pytest.warns(
                    RuntimeWarning, match=rf"'Connection\.{method}' was never awaited"
                ):
                    forget()
            for unused in (client.send(b"lost"), client.recv(), client.write(here, remote)):
                unused.close()
            await check_alive(client, server)
