"""A message comes after what was written before it, however full the send queue is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from aiordma import Connection, RemoteRegion
from aiordma._transport.remote_memory import RemoteSlice

from .connection_factory import (
    SMALL,
    ConnectionFactory,
    at_rest,
    barrier,
    check_alive,
    leases,
    pattern,
    yield_loop,
)
from .marks import on_pair

pytestmark = on_pair

# The shortest send queue that there can be, and more room at the peer than that.
SHORT = replace(SMALL, send_queue=8, data_receives=64)

CELL = 256
CELLS = 400
FILLED = b"x" * CELL
LAST = 0xFFFFFFFF

STEPS = st.one_of(
    st.tuples(st.just("write"), st.booleans()),
    st.tuples(st.just("write"), st.booleans()),
    st.tuples(st.just("batch"), st.integers(1, 6)),
    st.tuples(st.just("with_imm"), st.just(1)),
    st.tuples(st.just("send"), st.sampled_from([1, 100, 5000])),
    st.tuples(st.just("cancel"), st.integers(0, 100)),
    st.tuples(st.just("turns"), st.integers(1, 4)),
)
FULL = [("write", True)] * 12
EACH = [*FULL, ("send", 1), *FULL, ("with_imm", 1), *FULL, ("batch", 6), ("send", 5000), *FULL]


class Writer:
    """Fills the peer's memory cell by cell, and says now and then how far it is."""

    def __init__(self, conn: Connection, remote: RemoteRegion) -> None:
        self.conn = conn
        self.remote = remote
        self.region = conn.register(bytearray(FILLED))
        self.cells = 0
        self.tasks: list[asyncio.Task[None]] = []
        self.writes: list[tuple[asyncio.Task[None], int, int]] = []

    def step(self, name: str, argument: int) -> None:
        match name:
            case "write":
                self.fill(self.conn.write(self.region if argument else FILLED, self.cell(0)), 1)
            case "batch":
                self.fill(self.batch([self.cell(n) for n in range(argument)]), argument)
            case "with_imm":
                self.fill(self.conn.write(FILLED, self.cell(0), imm=self.cells + 1), 1)
            case "send":
                self.start(self.conn.send(bytes(argument), imm=self.cells))
            case "cancel":
                running = [task for task in self.tasks if not task.done()]
                if running:
                    running[argument % len(running)].cancel()

    def cell(self, ahead: int) -> RemoteSlice:
        start = CELL * (self.cells + ahead)
        return self.remote[start : start + CELL]

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    def fill(self, work: Coroutine[Any, Any, None], cells: int) -> None:
        self.writes.append((self.start(work), self.cells, self.cells + cells))
        self.cells += cells

    async def batch(self, targets: list[RemoteSlice]) -> None:
        async with self.conn.batch() as batch:
            for target in targets:
                batch.write(self.region, target)

    def missing(self, memory: memoryview, cells: int) -> list[int]:
        """The first cells of writes that should be there by now, and are not."""
        return [
            first
            for task, first, last in self.writes
            if last <= cells
            and not (task.cancelling() or task.cancelled())
            and memory[CELL * first : CELL * last] != FILLED * (last - first)
        ]


async def run_program(factory: ConnectionFactory, program: list[tuple[str, int]]) -> None:
    async with factory.sharing(CELL * CELLS, config=SHORT) as (client, server, there, remote):
        writer = Writer(client, remote)

        async def receive() -> None:
            async for message in server:
                with message:
                    if message.imm == LAST:
                        return
                    assert message.imm is not None
                    assert not writer.missing(there.view, message.imm), f"of {message.imm}"

        receiving = asyncio.create_task(receive())
        for name, argument in program:
            if name == "turns":
                await yield_loop(argument)
            else:
                writer.step(name, argument)
        for ended in await asyncio.gather(*writer.tasks, return_exceptions=True):
            assert ended is None or isinstance(ended, asyncio.CancelledError), ended
        await client.send(b"", imm=LAST)
        await receiving
        assert not writer.missing(there.view, writer.cells)
        writer.region.close()
        await at_rest(client)
        assert client._queue.free == client._queue.capacity


@settings(
    max_examples=min(15, settings().max_examples),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(program=st.lists(STEPS, max_size=40))
@example(program=EACH)
async def test_writes_are_there_before_word_of_them(
    factory: ConnectionFactory, program: list[tuple[str, int]]
) -> None:
    async with factory.within(10):
        await run_program(factory, program)


async def test_borrowed_memory_is_handed_over_after_what_was_written(
    factory: ConnectionFactory,
) -> None:
    """Its key would work no more for what comes later, which would cost the connection."""
    async with factory.pair(SHORT) as (client, server):
        remote = await client.request_region(CELL * 30)
        writes = [
            asyncio.create_task(client.write(FILLED, remote[CELL * n : CELL * (n + 1)]))
            for n in range(30)
        ]
        handing = asyncio.create_task(client.hand_over(remote))
        await asyncio.gather(*writes, handing)
        with await server.recv_buffer() as buffer:
            assert buffer.view == FILLED * 30
        await check_alive(client, server)


async def test_long_write_with_immediate_keeps_its_turn(factory: ConnectionFactory) -> None:
    """It is several work requests, and the message after it comes after the last of them."""
    size = (8 << 20) + 1
    done: list[int] = []
    async with factory.sharing(size) as (client, server, there, remote):
        data = pattern(size)
        writing = asyncio.create_task(client.write(data, remote, imm=1, progress=done.append))
        sending = asyncio.create_task(client.send(b"after it"))
        first = await server.recv()
        assert (first.imm, first.written) == (1, 1)
        assert there.view == data
        assert bytes(await server.recv()) == b"after it"
        await asyncio.gather(writing, sending)
        assert done == [8 << 20, size]


# ---- what is not awaited any more ----------------------------------------------------------------


@pytest.mark.parametrize("operation", ["write", "imm", "progress", "atomic", "batch"])
async def test_cancelled_before_it_was_posted_is_not_done(
    factory: ConnectionFactory, operation: str
) -> None:
    """Nor does it keep the memory, or anything of the pool, or those behind it."""
    async with factory.sharing(512, config=SHORT) as (client, server, there, there_):
        before = await leases(client, server)
        memory = bytearray(b"y" * 8)
        region = client.register(memory)
        target = there_[:8]

        async def work() -> None:
            match operation:
                case "write":
                    await client.write(region, target)
                case "imm":
                    await client.write(region, target, imm=1)
                case "progress":
                    await client.write(region, target, progress=lambda done: None)
                case "atomic":
                    await client.fetch_and_add(target, 1)
                case _:
                    async with client.batch() as batch:
                        batch.write(region, target)
                        batch.fetch_and_add(target, 1)

        ahead = [asyncio.create_task(client.read(there_[256:], bytearray(256))) for _ in range(20)]
        doomed = [asyncio.create_task(work()) for _ in range(3)]
        last = asyncio.create_task(client.write(b"z" * 8, there_[8:16]))
        await yield_loop(1)
        assert client._queue.backlogged
        for task in doomed:
            task.cancel()
        region.close()
        await asyncio.wait(doomed)
        with suppress(asyncio.CancelledError):
            await doomed[0]
        del task
        doomed.clear()
        memory.extend(b"it is not pinned any more")
        await asyncio.gather(*ahead, last)
        ahead.clear()
        assert bytes(there.view[:16]) == bytes(8) + b"z" * 8
        assert await leases(client, server) == before
        assert client._queue.free == client._queue.capacity
        await check_alive(client, server)


# Atomics that a send queue of SHORT takes hundreds of turns for.
MANY = 2000


async def test_batch_cancelled_when_half_of_it_was_posted(factory: ConnectionFactory) -> None:
    async with factory.sharing(512, config=SHORT) as (client, server, there, remote):
        before = await leases(client, server)
        olds: list[asyncio.Future[int]] = []

        async def work() -> None:
            async with client.batch() as batch:
                olds.extend(batch.fetch_and_add(remote[:8], 1) for _ in range(MANY))

        doomed = asyncio.create_task(work())
        await yield_loop(1)
        doomed.cancel()
        await asyncio.wait([doomed])
        assert all(old.cancelled() for old in olds)
        await barrier(client)
        posted = int.from_bytes(there.view[:8], "little")
        assert 0 < posted < MANY
        assert await leases(client, server) == before
        await check_alive(client, server)


async def test_progress_that_raises_is_heard_of(factory: ConnectionFactory) -> None:
    """By its await; the connection goes on."""
    async with factory.sharing(64) as (client, server, _, remote):

        def fail(done: int) -> None:
            raise LookupError(done)

        for imm in (None, 1):
            with pytest.raises(LookupError, match="64"):
                await client.write(bytes(64), remote, imm=imm, progress=fail)
        with pytest.raises(LookupError, match="64"):
            await client.read(remote, bytearray(64), progress=fail)
        (await server.recv()).release()
        await check_alive(client, server)


async def test_region_whose_sharing_was_cancelled_in_time_is_not_heard_of(
    factory: ConnectionFactory,
) -> None:
    """Its key works no more, so the peer must not come by it."""
    async with factory.sharing(256, config=SHORT) as (client, server, _, remote):
        with client.alloc(8) as first, client.alloc(16) as second:
            ahead = [asyncio.create_task(client.read(remote, bytearray(256))) for _ in range(20)]
            doomed = asyncio.create_task(client.send_region(first))
            await yield_loop(1)
            doomed.cancel()
            await asyncio.wait([doomed])
            share = await client.send_region(second)
            assert len(await server.recv_region()) == 16
            share.revoke()
            assert not client._sharing.shared
            await asyncio.gather(*ahead)
        await check_alive(client, server)
