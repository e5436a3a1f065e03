"""Simulations of the store with slow clients, faults and planted bugs.

All blocks have different contents. The reads and writes of each key must be linearizable: a block
that is read is complete, and the last one that was stored under its key. A miss is always allowed,
because the server may evict any block.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from aiordma_kv import Client, Store, start_server
from aiordma_kv.arena import (
    ALIGNMENT,
    LOCK_SECONDS,
    Arena,
    Holder,
    Place,
    memory_length,
    pack_trailer,
)

import aiordma
from aiordma import rpc, testing

SERVER = "server"
PORT = 7480
CLIENT_HOSTS = 3
BLOCKS = 6  # that fit into the arena
SIZE = 24 * ALIGNMENT  # longer than the congestion window, so that reading takes several trips
HALF = SIZE // 2
SETTLING_SECONDS = 10 * LOCK_SECONDS  # longer than an operation of a slow client takes
SEEDS = range(20)
BROKEN = (aiordma.RDMAError, OSError, TimeoutError)


def contents(number: int) -> bytes:
    return number.to_bytes(8, "little") * (SIZE // 8)


def numbers_in(data: memoryview) -> int | tuple[int, ...]:
    """Return the number of the block, or all numbers in data that mixes several blocks."""
    first, *others = dict.fromkeys(data.cast("Q"))
    return (first, *others) if others else first


def draw_delay(limits: tuple[float, ...]) -> float:
    return random.choice(limits) * random.random()


class UnknownOutcomeError(Exception):
    """Ends the block of a history's operation whose effect is unknown."""


@dataclass(frozen=True)
class Scenario:
    """The behaviour of the clients, and the faults. Times are in seconds."""

    keys: int
    slow_writers: int  # per client host
    idle: float  # maximum time between two operations of a task
    # Maximum times between the steps of an operation. One of them is drawn for each step.
    read_delays: tuple[float, ...]
    write_delays: tuple[float, ...]
    duration: float
    faults: testing.FaultPlan
    is_reliable: bool = False  # whether every block that was located must be readable

    async def main(self, world: testing.World) -> None:
        cluster = Cluster(world, self)
        world.host(SERVER).serve(cluster.serve)
        for number in range(CLIENT_HOSTS):
            world.host(f"client{number}").serve(cluster.use)
        await asyncio.sleep(self.duration + SETTLING_SECONDS)
        cluster.history.check()
        assert not (self.is_reliable and cluster.unreadable), "a locked block was not readable"
        await cluster.check_all_blocks_are_released()


class Cluster:
    """A server and its clients, which record their operations in one history."""

    memory_type = bytearray

    def __init__(self, world: testing.World, scenario: Scenario) -> None:
        self.world, self.scenario = world, scenario
        self.history = testing.History(initial=None)
        self.keys = [b"key %d" % number for number in range(scenario.keys)]
        self.blocks = 0
        self.unreadable = 0

    def next_number(self) -> int:
        self.blocks += 1
        return self.blocks

    async def serve(self) -> None:
        store = Store(self.memory_type(memory_length(BLOCKS * SIZE)))
        async with await start_server(store, "", PORT) as server:
            await server.serve_forever()

    async def use(self) -> None:
        memory = memoryview(bytearray(4 * SIZE))
        servers = [f"{SERVER}:{PORT}"]
        async with Client(servers, memory=memory) as client, asyncio.TaskGroup() as group:
            for part in (memory[: 2 * SIZE], memory[2 * SIZE :]):
                group.create_task(self.call(client, [part[:SIZE], part[SIZE:]]))
            for _ in range(self.scenario.slow_writers):
                group.create_task(self.call_slowly())

    async def next_operation(self) -> bool:
        """Wait until the next operation begins. Return False if there is none."""
        await asyncio.sleep(random.uniform(0, self.scenario.idle))
        return self.world.now < self.scenario.duration

    async def call(self, client: Client, memory: list[memoryview]) -> None:
        """Operate on one or two keys at a time through the package's client.

        The memory has room for two adjacent blocks.
        """
        operations = random.choices((self.get, self.put, self.delete), (6, 2, 1), k=10_000)
        while await self.next_operation():
            keys = random.sample(self.keys, random.randint(1, min(2, len(self.keys))))
            await operations.pop()(client, keys, memory)

    async def get(self, client: Client, keys: list[bytes], memory: list[memoryview]) -> None:
        with ExitStack() as reads:
            reading = {key: reads.enter_context(self.history.read(key)) for key in keys}
            for key, is_stored in zip(keys, await client.locate(keys), strict=True):
                if not is_stored:
                    reading.pop(key).refused()
            await asyncio.sleep(draw_delay(self.scenario.read_delays))
            targets = memory[: len(reading)]
            hits = await client.get([*reading], targets)
            for read, hit, target in zip(reading.values(), hits, targets, strict=True):
                if hit:
                    read.result = numbers_in(target)
                else:
                    self.unreadable += 1
                    read.refused()
        await client.unlock([*reading])

    async def put(self, client: Client, keys: list[bytes], memory: list[memoryview]) -> None:
        with suppress(UnknownOutcomeError), ExitStack() as writes:
            sources = memory[: len(keys)]
            for key, source in zip(keys, sources, strict=True):
                number = self.next_number()
                source[:] = contents(number)
                writes.enter_context(self.history.write(key, number))
            await client.put(keys, sources)
            raise UnknownOutcomeError  # because True may mean that another block is stored

    async def delete(self, client: Client, keys: list[bytes], _: list[memoryview]) -> None:
        for key in keys:
            with suppress(UnknownOutcomeError), self.history.write(key, None):
                if await client.delete([key]) == [False]:
                    raise UnknownOutcomeError  # because the server may be lost

    async def call_slowly(self) -> None:
        """Write blocks with long delays, as a client on an overloaded machine would."""
        while await self.next_operation():
            with suppress(*BROKEN):
                async with await rpc.connect(SERVER, PORT) as calls:
                    while await self.next_operation():
                        await self.put_slowly(calls)

    async def put_slowly(self, calls: rpc.Client) -> None:
        write, delay = calls.connection.write, partial(draw_delay, self.scenario.write_delays)
        key, number = random.choice(self.keys), self.next_number()
        with self.history.write(key, number) as operation:
            reply = await calls.call("reserve", [[key, SIZE]])
            if not reply["tokens"]:
                operation.refused()
                return
            [[*_, generation]], [token] = reply["places"], reply["tokens"]
            region, data = calls.connection.open_region(token), contents(number)
            await asyncio.sleep(delay())
            await write(data[:HALF], region[:HALF])
            await asyncio.sleep(delay())
            await write(data[HALF:], region[HALF:SIZE])
            await asyncio.sleep(delay())
            if await calls.call("commit", [generation]) == [False]:
                operation.refused()
        if random.random() < 0.2:  # write data that nobody may ever read
            await write(contents(self.next_number()), region[:SIZE])

    async def check_all_blocks_are_released(self) -> None:
        """Check that the arena has room for new blocks when no other client is left."""
        async with Client([f"{SERVER}:{PORT}"]) as client:
            keys = [b"new %d" % number for number in range(BLOCKS)]
            for number, key in enumerate(keys):
                put = await client.put([key], [contents(number)])
                assert put == [True], "a block is still held"
            for number, key in enumerate(keys):
                target = bytearray(SIZE)
                assert await client.locate([key]) == [True], "a block is still held"
                assert await client.get([key], [target]) == [True]
                assert target == contents(number)
                await client.unlock([key])


FAR = testing.Link(latency=0.005, loss=0.01, duplicate=0.005, reorder=0.02)
CONTENTION = Scenario(
    keys=1,
    slow_writers=0,
    idle=0.1,
    read_delays=(0.2,),
    write_delays=(),
    duration=8,
    faults=testing.FaultPlan(FAR),
    is_reliable=True,
)
WITH_MISSES = replace(CONTENTION, is_reliable=False)
FAULTS = Scenario(
    keys=6,
    slow_writers=1,
    idle=2,
    read_delays=(*[0] * 4, 1, 2 * LOCK_SECONDS),
    write_delays=(0, 1, 2 * LOCK_SECONDS),
    duration=5 * LOCK_SECONDS,
    faults=testing.FaultPlan(
        FAR,
        partitions=0.004,
        pauses=0.004,
        kills=0.004,
        duration=1.5 * LOCK_SECONDS,
        until=5 * LOCK_SECONDS,
    ),
)


@pytest.fixture(scope="module", autouse=True)
def imported_libraries() -> None:
    """Run a simulation before the leak check, because the first one imports numpy."""

    async def main(_: testing.World) -> None:
        pass

    testing.simulate(main, seed=0)


@pytest.mark.parametrize("scenario", [CONTENTION, FAULTS], ids=["contention", "faults"])
def test_reads_are_linearizable_and_all_blocks_are_released(scenario: Scenario) -> None:
    testing.simulate(scenario.main, seeds=SEEDS, faults=scenario.faults)


def test_timeout_applies_to_each_part_of_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiordma_kv.session.MAX_BLOCKS", 1)
    keys, blocks, timeout = [b"%d" % number for number in range(8)], [bytes(SIZE)] * 8, 2.0

    async def serve() -> None:
        store = Store(bytearray(memory_length(16 * SIZE)))
        async with await start_server(store, "", PORT) as server:
            await server.serve_forever()

    async def main(world: testing.World) -> None:
        world.host(SERVER).serve(serve)
        await asyncio.sleep(1)
        async with Client([f"{SERVER}:{PORT}"], timeout=timeout) as client:
            start = world.now
            assert await client.put(keys, blocks) == [True] * 8
            assert world.now - start > timeout
            assert await client.locate(keys) == [True] * 8
            start = world.now
            assert await client.get(keys, [bytearray(SIZE) for _ in keys]) == [True] * 8
            assert world.now - start > timeout

    testing.simulate(main, seed=0, faults=testing.FaultPlan(testing.Link(latency=0.1)))


def test_timeout_does_not_include_the_wait_for_other_transfers() -> None:
    async def serve() -> None:
        store = Store(bytearray(memory_length(64 * SIZE)))
        async with await start_server(store, "", PORT) as server:
            await server.serve_forever()

    async def main(world: testing.World) -> None:
        world.host(SERVER).serve(serve)
        await asyncio.sleep(1)
        async with Client([f"{SERVER}:{PORT}"], timeout=2.0) as client:
            start = world.now
            puts = [client.put([b"%d" % number], [bytes(ALIGNMENT)]) for number in range(32)]
            assert await asyncio.gather(*puts) == [[True]] * 32
            assert world.now - start > 2.0

    testing.simulate(main, seed=0, faults=testing.FaultPlan(testing.Link(latency=0.1)))


# ---- planted bugs --------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def commit_without_ending_writes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(aiordma.Share, "revoke", lambda _: None)


def release_slow_sessions_without_ending_access(patch: pytest.MonkeyPatch) -> None:
    plant_release_of_expired_holders(patch, lambda _: True)


def release_expired_locks_without_ending_access(patch: pytest.MonkeyPatch) -> None:
    plant_release_of_expired_holders(patch, lambda holder: not holder.reserved_bytes)


def plant_release_of_expired_holders(
    patch: pytest.MonkeyPatch, is_affected: Callable[[Holder], bool]
) -> None:
    original = Arena.suspend_expired

    def suspend_expired(self: Arena, now: float) -> None:
        before = [holder for holder in self._holders if not holder.is_suspended]
        original(self, now)
        for holder in before:
            if holder.is_suspended and is_affected(holder):
                self.release(holder)
                holder.is_suspended = False  # so that the store does not end the session

    patch.setattr(Arena, "suspend_expired", suspend_expired)


def keep_blocks_of_ended_sessions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arena, "release", lambda _, holder: None)


def ignore_locks(patch: pytest.MonkeyPatch) -> None:
    original = Arena.locate

    def locate(self: Arena, holder: Holder, key: bytes, now: float) -> Place | None:
        place = original(self, holder, key, now)
        if place is not None:
            self.unlock(holder, place.generation)
        return place

    patch.setattr(Arena, "locate", locate)


def ignore_deadlines(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("aiordma_kv.client.HOLD_SECONDS", 1e6)


def keep_trailers_of_freed_blocks(patch: pytest.MonkeyPatch) -> None:
    class Memory(bytearray):
        def __setitem__(self, index: Any, value: Any) -> None:
            if any(value):
                super().__setitem__(index, value)

    patch.setattr(Cluster, "memory_type", Memory)


def accept_every_trailer(patch: pytest.MonkeyPatch) -> None:
    replace_trailer(patch, lambda key, size, generation: bytes(32))


def omit_generation_from_trailers(patch: pytest.MonkeyPatch) -> None:
    replace_trailer(patch, lambda key, size, generation: key.ljust(32))


def replace_trailer(patch: pytest.MonkeyPatch, pack: Callable[[bytes, int, int], bytes]) -> None:
    # Replacing the code affects all modules that have imported the function.
    patch.setattr(pack_trailer, "__code__", pack.__code__)


PLANTED_BUGS: dict[str, tuple[Scenario, list[Plant]]] = {
    "commit without ending writes": (FAULTS, [commit_without_ending_writes]),
    "release without ending access": (FAULTS, [release_slow_sessions_without_ending_access]),
    "no release": (FAULTS, [keep_blocks_of_ended_sessions]),
    "no locks": (CONTENTION, [ignore_locks]),
    # Several rules protect readers, which get wrong data only if all rules of a group are broken.
    "no locks, trailers not checked": (WITH_MISSES, [ignore_locks, accept_every_trailer]),
    "no locks, trailers not cleared": (WITH_MISSES, [ignore_locks, keep_trailers_of_freed_blocks]),
    "no locks, no generations": (WITH_MISSES, [ignore_locks, omit_generation_from_trailers]),
    "expired locks, trailers not checked, no deadlines": (
        FAULTS,
        [release_expired_locks_without_ending_access, accept_every_trailer, ignore_deadlines],
    ),
}


@pytest.mark.parametrize("bug", PLANTED_BUGS)
def test_simulation_finds_planted_bug(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    scenario, plants = PLANTED_BUGS[bug]
    for plant in plants:
        plant(monkeypatch)

    def run_until_failure() -> None:
        for seed in SEEDS:
            testing.simulate(scenario.main, seed=seed, faults=scenario.faults)

    found = r"no order of these operations|a block is still held|a locked block was not readable"
    with pytest.raises(AssertionError, match=found):
        run_until_failure()
