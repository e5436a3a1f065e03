"""Test that messages arrive in order, within the memory limits of both sides."""

from __future__ import annotations

import asyncio

import pytest

from aiordma import Config, Connection, ConnectionClosedError, Message, MessageTooLongError
from aiordma._core.frames import HEADER_SIZE

from .connection_factory import SMALL, ConnectionFactory, check_alive, exchange, pattern, yield_loop
from .inside import Begun, figures
from .marks import on_device, on_pair

pytestmark = on_pair

EAGER = Config().eager_size - HEADER_SIZE  # the longest message that fits a receive
READ_SIZE = 8 << 20  # the longest single RDMA read of an offered message
SIZES = [0, 1, EAGER - 1, EAGER, EAGER + 1, 64 << 10]
LARGE_SIZES = [(1 << 20) + 1, READ_SIZE, READ_SIZE + 1]


# ---- one message ---------------------------------------------------------------------------------


@on_device
@pytest.mark.parametrize("sizes", [SIZES, LARGE_SIZES], ids=["short", "long"])
async def test_messages_of_various_sizes_are_received_intact(
    factory: ConnectionFactory, sizes: list[int]
) -> None:
    async with factory.pair(Config()) as (client, server):
        for size in sizes:
            await exchange(client, server, pattern(size))
            await exchange(server, client, pattern(size, 1))


async def test_large_message_is_not_copied_when_no_registration_is_needed(
    factory: ConnectionFactory,
) -> None:
    """A message that the device would have to pin first is copied, like short messages."""
    async with factory.pair(Config()) as (client, server):
        copies = not client._endpoint.driver.pool.local_dma_lkey
        for size, pinned in ((1000, False), (EAGER, not copies)):
            memory = bytearray(pattern(size))
            sending = client.send_nowait(memory)
            assert not sending.done()
            if pinned:
                with pytest.raises(BufferError):
                    memory.append(0)
            else:
                memory.append(0)
            with await server.recv() as message:
                assert message == pattern(size)
            await sending
            memory.append(0)


@pytest.mark.parametrize("imm", [-1, 1 << 32])
async def test_send_rejects_imm_out_of_range(factory: ConnectionFactory, imm: int) -> None:
    async with factory.pair() as (client, server):
        with pytest.raises(ValueError, match="imm must be an int from 0 to 4294967295"):
            await client.send(b"x", imm=imm)
        await check_alive(client, server)


async def test_send_raises_message_too_long_error_above_max_message(
    factory: ConnectionFactory,
) -> None:
    limited = Config(max_message=10_000)
    async with factory.pair(SMALL, server=limited) as (client, server):
        assert client.max_message == 10_000
        await exchange(client, server, pattern(10_000))
        with pytest.raises(MessageTooLongError) as caught:
            await client.send(bytes(10_001))
        assert (caught.value.amount, caught.value.limit) == (10_001, 10_000)
        await exchange(server, client, pattern(20_000))  # the limit is that of one side
        await check_alive(client, server)


# ---- bounds --------------------------------------------------------------------------------------


# ---- turns ---------------------------------------------------------------------------------------


# ---- reading ahead -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
async def test_later_recv_does_not_overtake_an_earlier_waiting_recv(
    factory: ConnectionFactory, count: int
) -> None:
    """The later receiver starts after a message has arrived, but before the task that waits for it
    runs.
    """
    async with factory.pair() as (client, server):
        late: list[Begun[Message]] = []

        def come_late() -> None:
            if not late:
                late.append(Begun(server.recv()))

        waiting = [Begun(server.recv(), come_late) for _ in range(count)]
        tasks = [asyncio.create_task(each.task()) for each in waiting]
        await yield_loop(2)
        for n in range(count + 1):
            await client.send(b"%d" % n)
        while not late:  # a send whose task polls takes no iteration of the loop
            await yield_loop(1)
        tasks.append(asyncio.create_task(late[0].task()))
        texts = [bytes(message) for message in await asyncio.gather(*tasks)]
        assert texts == [b"%d" % n for n in range(count + 1)]


async def recv(conn: Connection) -> bytes:
    return bytes(await conn.recv())


async def test_remaining_messages_are_received_in_order_after_close(
    factory: ConnectionFactory,
) -> None:
    """Messages that have arrived go to the receivers in order, and the remaining receivers get the
    error.
    """
    async with factory.pair() as (client, server):
        waiting = [asyncio.create_task(recv(server)) for _ in range(2)]
        await yield_loop(2)
        for n in range(3):
            await client.send(b"%d" % n)
        await client.close()
        await server.wait_closed()
        late = [asyncio.create_task(recv(server)) for _ in range(3)]
        assert await asyncio.gather(*waiting, late[0]) == [b"0", b"1", b"2"]
        for task in late[1:]:
            with pytest.raises(ConnectionClosedError):
                await task


@pytest.mark.parametrize(
    ("config", "sizes", "ahead"),
    [
        (Config(), [1 << 20] * 4, 4),
        (Config(), [READ_SIZE + 1], 1),  # of two reads
        (Config(fetch_ahead=3 << 20), [1 << 20] * 3, 3),
        (Config(fetch_ahead=3 << 20), [1 << 20] * 4, 3),
        (Config(fetch_ahead=0), [1 << 20], 0),
    ],
    ids=["some", "two reads", "all of it", "more than that", "nothing"],
)
async def test_messages_within_fetch_ahead_are_read_before_recv(
    factory: ConnectionFactory, config: Config, sizes: list[int], ahead: int
) -> None:
    """Only the first `ahead` messages are read before a task receives them."""
    messages = [pattern(size, seed) for seed, size in enumerate(sizes)]
    async with factory.pair(config) as (client, server):
        for _ in range(2):
            sending = [client.send_nowait(message) for message in messages]
            await asyncio.gather(*sending[:ahead])
            while figures(server)["arrived"] < len(messages):
                await yield_loop(1)
            assert not any(future.done() for future in sending[ahead:])
            assert figures(server)["unread"] == len(messages) - ahead
            assert figures(server)["read_ahead"] == sum(sizes[:ahead])
            for message in messages:
                with await server.recv() as received:
                    assert received == message
            await asyncio.gather(*sending)
            assert (figures(server)["unread"], figures(server)["read_ahead"]) == (0, 0)


async def test_fetch_ahead_does_not_read_past_a_message_that_does_not_fit(
    factory: ConnectionFactory,
) -> None:
    """A message that is short enough must not be read before a longer one, which might then wait
    forever.
    """
    sizes = [2 << 20, 2 << 20, 1 << 20]
    async with factory.pair(Config(fetch_ahead=3 << 20)) as (client, server):
        await exchange(client, server, pattern(1 << 20))  # now the pool has a block for it
        messages = [pattern(size, seed) for seed, size in enumerate(sizes)]
        sending = [client.send_nowait(message) for message in messages]
        while figures(server)["arrived"] < len(sizes):
            await yield_loop(1)
        assert (figures(server)["unread"], figures(server)["read_ahead"]) == (2, 2 << 20)
        for message in messages:
            with await server.recv() as received:
                assert received == message
        await asyncio.gather(*sending)
