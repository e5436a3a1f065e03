"""Programs for simulated hosts, with conditions that must hold at the end for every seed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import aiordma
from aiordma import testing

PORT = 7471
KEY = b"sixteen or more random bytes"
CHANNEL = 8
"""Length of a channel's name in bytes."""
ANY_ADDRESS = aiordma.Config(allow_other_addresses=True)  # used by further rails
BROKEN = (aiordma.RDMAError, ConnectionError)

# Programs must cope with all of these faults. Connections survive network faults, but break when a
# host is killed.
LOSSY = testing.Link(loss=0.005, duplicate=0.005, reorder=0.02, jitter=50e-6)
ROUGH = testing.FaultPlan(LOSSY, partitions=0.3, pauses=0.3, kills=0.3, until=6)
FAR = replace(LOSSY, latency=0.005)  # slow enough for faults to occur during operations
CALM = testing.FaultPlan(LOSSY)

Main = Callable[[testing.World], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Scenario:
    """A simulated program, its faults and devices. `main` contains the checks."""

    main: Main
    faults: testing.FaultPlan = CALM
    devices: int = 1

    def run(self, seed: int) -> str:
        """Run the scenario and return its trace."""

        async def main(world: testing.World) -> str:
            await self.main(world)
            return world.trace

        return testing.simulate(
            main, seed=seed, faults=self.faults, devices=self.devices, limit=1000
        )


async def serve(
    handler: Callable[[aiordma.Connection], Coroutine[Any, Any, None]], **options: Any
) -> None:
    """Serve connections. Unlike with a `Server`, a handler's error ends the simulation."""
    listening = aiordma.listen("", PORT, **options)
    async with await listening as listener, asyncio.TaskGroup() as group:
        async for conn in listener:
            group.create_task(handled(conn, handler))


async def handled(
    conn: aiordma.Connection, handler: Callable[[aiordma.Connection], Coroutine[Any, Any, None]]
) -> None:
    with contextlib.suppress(*BROKEN):
        async with conn:
            await handler(conn)


async def on_two_hosts(
    world: testing.World, program: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Run a program on each of two client hosts until it finishes or its host is killed."""

    async def run(host: testing.Host) -> None:
        with contextlib.suppress(testing.KilledError):
            await host.run(program)

    await asyncio.gather(*(run(world.host(f"client{i}")) for i in range(2)))


# ---- hosts that are killed and boot again --------------------------------------------------------


async def echo(history: testing.History, via: Literal["cm", "tcp"]) -> None:
    async def answer(conn: aiordma.Connection) -> None:
        with contextlib.suppress(*BROKEN):
            async for message in conn:
                with message:
                    data = bytes(message)
                history.received(data[:CHANNEL], data)
                await conn.send(data)

    auth = KEY if via == "tcp" else None
    async with await aiordma.start_server(answer, "", PORT, via=via, auth=auth) as server:
        await server.serve_forever()


async def restarts(world: testing.World, via: Literal["cm", "tcp"] = "cm") -> None:
    """Check that clients reconnect after every restart and that no message is executed twice."""
    auth = KEY if via == "tcp" else None
    history = testing.History()

    async def ask(until: float) -> None:
        channel = world.random.randbytes(CHANNEL)
        async for conn in aiordma.reconnect(
            "server", PORT, via=via, auth=auth, first_delay=0.1, longest_delay=0.5
        ):
            try:
                while True:
                    length = world.random.choice((16, 100, 5000, 100_000))
                    data = channel + world.random.randbytes(length)
                    with history.send(channel, data):
                        await conn.send(data)
                        with await conn.recv() as message:
                            assert bytes(message) == data
                    if world.now >= until:
                        return
                    await asyncio.sleep(0.3)
            except BROKEN:
                continue

    world.host("server").serve(echo, history, via)
    await on_two_hosts(world, partial(ask, 7))
    await asyncio.sleep(max(0, 10 - world.now))
    await ask(0)
    history.check()


# ---- leases --------------------------------------------------------------------------------------


async def leases(world: testing.World) -> None:
    """Check that no write arrives after the lease has ended by the owner's clock."""
    history = testing.History()

    async def lend(conn: aiordma.Connection) -> None:
        memory = bytearray(1 << 16)
        for length in (0.01, 0.1, 0.5):
            with conn.register(memory) as region:
                share = await conn.send_region(region, access=aiordma.Rights.WRITE, lease=length)
                await asyncio.sleep(length)
                history.lease_ended(share.region_id)
                await asyncio.sleep(world.random.uniform(0, 0.1))
                assert share.revoked
                seen = bytes(memory)
                await asyncio.sleep(world.random.uniform(0, 1))
                assert bytes(memory) == seen

    async def use() -> None:
        with contextlib.suppress(*BROKEN):
            async with await aiordma.connect("server", PORT) as conn:
                for number in range(1, 4):
                    remote = await conn.recv_region()
                    with contextlib.suppress(aiordma.LeaseEndedError):
                        while True:
                            with history.access(remote.token.region_id):
                                await conn.write(bytes([number]) * len(remote), remote)
                            await asyncio.sleep(0.001)

    world.host("server").serve(serve, lend)
    world.host("client0").slowness = 1000  # it learns of a lease after its start
    await on_two_hosts(world, use)
    history.check()


# ---- streams -------------------------------------------------------------------------------------


async def streams(world: testing.World) -> None:
    """Send and receive through asyncio streams with the TCP bootstrap and encryption."""
    options: dict[str, Any] = {"via": "tcp", "auth": KEY, "encrypt": True}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(world.random.randrange(1, 1 << 16)):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def listen() -> None:
        async with await aiordma.start_stream_server(answer, "0.0.0.0", PORT, **options) as server:
            await server.serve_forever()

    world.host("server").serve(listen)
    await asyncio.sleep(0.1)
    reader, writer = await aiordma.open_connection("server", PORT, **options)
    data = world.random.randbytes(300_000)
    writer.write(data)
    writer.write_eof()
    assert await reader.read() == data
    writer.close()
    await writer.wait_closed()


# ---- messages and memory -------------------------------------------------------------------------

SMALL = aiordma.Config(
    eager_size=1024, data_receives=4, control_receives=4, send_queue=16, fetch_ahead=64 << 10
)
SECURITY: list[dict[str, Any]] = [{}, {"auth": KEY}, {"auth": KEY, "encrypt": "messages"}]
SIZES = (1, 1016, 1024, 8184, 8192, 1 << 16)
"""Lengths at which the implementation changes. Each task's memory has the longest one."""
LANES = 3


def some_bytes(chance: random.Random) -> bytes:
    return chance.randbytes(max(1, chance.choice(SIZES) - chance.choice((0, 1, 500))))


async def cut_short(chance: random.Random, work: Coroutine[Any, Any, Any]) -> bool:
    """Cancel `work` after a random delay unless it has finished. Return whether it finished."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=chance.choice((0, 1e-4, 1e-3, 1e-2)) * chance.random())
    finally:
        task.cancel()
        await asyncio.wait([task])
        failed = None if task.cancelled() else task.exception()
    if failed:
        raise failed
    return not task.cancelled()


async def talk(conn: aiordma.Connection, chance: random.Random) -> None:
    """Check that messages are echoed in order. Only those with a cancelled send may be missing."""
    sent, back = deque[tuple[bytes, bool]](), list[bytes]()

    async def take() -> None:
        last = False
        while not last:
            with await conn.recv() as message:
                back.append(bytes(message))
                last = message.imm == 0

    async with asyncio.TaskGroup() as group:
        group.create_task(take())
        for left in reversed(range(chance.randrange(1, 9))):
            sent.append((some_bytes(chance), not left or chance.random() < 0.8))
            sending = conn.send(sent[-1][0], imm=left)
            await (sending if sent[-1][1] else cut_short(chance, sending))
    for data in back:
        while (next_ := sent.popleft())[0] != data:
            assert not next_[1]
    assert not sent


async def use(conn: aiordma.Connection, chance: random.Random, counter: Any, place: Any) -> None:
    """Check that a cancelled write or atomic never takes effect after a later operation."""
    least = most = 0
    for _ in range(chance.randrange(1, 9)):
        data = some_bytes(chance)
        if chance.random() < 0.4:
            other = some_bytes(chance)
            await cut_short(chance, conn.write(other, place[: len(other)]))
        lent = await conn.request_region(len(data)) if chance.random() < 0.2 else None
        there, got = (lent or place)[: len(data)], bytearray(len(data))
        async with conn.batch() as batch:
            batch.write(data, there)
            adding = batch.fetch_and_add(counter, 1)
        assert least <= adding.result() <= most
        least = most = adding.result() + 1
        await conn.read(there, got)
        assert got == data
        if lent:
            await lent.release()
        if chance.random() < 0.4:
            least += await cut_short(chance, conn.fetch_and_add(counter, 1))
            most += 1
    assert least <= await conn.fetch_and_add(counter, 0) <= most


async def operations(world: testing.World, *, strict: bool) -> None:
    """Run messages, memory operations and loans. Some operations and connections are cut short."""
    draw = world.random
    options: dict[str, Any] = {
        "via": draw.choice(("cm", "tcp")),
        "config": draw.choice((aiordma.Config(), SMALL)),
        **draw.choice(SECURITY),
    }

    async def answer(conn: aiordma.Connection) -> None:
        rights = aiordma.Rights.READ | aiordma.Rights.WRITE | aiordma.Rights.ATOMIC
        memory = bytearray(LANES * (8 + SIZES[-1]))
        with conn.register(memory) as region:
            await conn.send_region(region, access=rights)
            async for message in conn:
                with message:
                    await conn.send(bytes(message), imm=message.imm)

    async def call() -> None:
        async with await aiordma.connect("server", PORT, **options) as conn:
            remote = await conn.recv_region()
            places = remote[8 * LANES :]
            leaves = draw.random() < 0.3
            try:
                async with (
                    asyncio.timeout(0.01 * draw.random() if leaves else 100),
                    asyncio.TaskGroup() as group,
                ):
                    group.create_task(talk(conn, draw))
                    for lane in range(LANES):
                        counter = remote[8 * lane : 8 * lane + 8]
                        place = places[lane * SIZES[-1] : (lane + 1) * SIZES[-1]]
                        group.create_task(use(conn, draw, counter, place))
            except TimeoutError:
                if not leaves:
                    raise
            if draw.random() < 0.3:
                conn.abort()

    async def call_again_and_again() -> None:
        for _ in range(4):
            try:
                await call()
            except* BROKEN:
                if strict:
                    raise

    world.host("server").serve(partial(serve, answer, **options))
    await on_two_hosts(world, call_again_and_again)


# ---- two cables ----------------------------------------------------------------------------------


SERVER, CLIENT = "server", "client"
LENGTHS = 100, 1 << 20, 4 << 20


async def cables(world: testing.World, via: Literal["cm", "tcp"] = "cm") -> None:
    """Check that messages arrive although cables are cut, and that both are used again later."""
    end = world.now + world.random.uniform(1, 4)
    options: dict[str, Any] = {"device": "all", "config": ANY_ADDRESS, "via": via}
    conns: list[aiordma.Connection] = []
    history = testing.History()

    async def take(conn: aiordma.Connection, side: str) -> bytes:
        with await conn.recv() as message:
            history.received(side, data := bytes(message))
            return data

    async def send(conn: aiordma.Connection, side: str, data: bytes) -> None:
        with history.send(side, data):
            await conn.send(data)

    async def answer(conn: aiordma.Connection) -> None:
        conns.append(conn)
        while True:
            await send(conn, CLIENT, await take(conn, SERVER))

    async def ask(conn: aiordma.Connection) -> None:
        await send(conn, SERVER, world.random.randbytes(world.random.choice(LENGTHS)))
        await take(conn, CLIENT)

    def whole() -> bool:
        """Return whether both rails are up on both sides. One side may notice a break later."""
        states = sorted(rail.state for conn in conns for rail in conn.rails)
        return states == ["lead", "lead", "up", "up"]

    async def call() -> None:
        async with await aiordma.connect("server", PORT, **options) as conn:
            conns.append(conn)
            while world.now < end or not whole():
                await ask(conn)
                await asyncio.sleep(world.random.uniform(0, 0.2))
            before = [rail.bytes_received for rail in conn.rails]
            while any(map(int.__ge__, before, (rail.bytes_received for rail in conn.rails))):
                await ask(conn)

    world.host("server").serve(partial(serve, answer, **options))
    calling = asyncio.ensure_future(world.host("client").run(call))
    while world.now < end and not calling.done():
        await asyncio.sleep(world.random.uniform(0, 0.5))
        if whole():
            network = world.random.choice((0, 1))
            world.partition("server", network=network)
            await asyncio.sleep(world.random.uniform(0, 1))
            world.heal(network=network)
            await asyncio.sleep(0.5)  # a rail may detect the cut only with its last retry
    try:
        await calling
    finally:  # a history error says more than a broken connection
        history.check()


# ---- atomics -------------------------------------------------------------------------------------


async def atomics(world: testing.World) -> None:
    """Check that each atomic runs exactly once, or at most once if its outcome is unknown."""
    options: dict[str, Any] = {"device": "all", "config": ANY_ADDRESS}
    history, memory, draw = testing.History(), bytearray(8), world.random

    async def lend(conn: aiordma.Connection) -> None:
        with conn.register(memory) as region:
            rights = aiordma.Rights.READ | aiordma.Rights.ATOMIC
            await conn.send_region(region, access=rights, lease=None)
            await conn.wait_closed()

    async def use_once(conn: aiordma.Connection, remote: aiordma.RemoteRegion, seen: int) -> int:
        kind, number = draw.choice(("read", "swap", "add")), draw.getrandbits(64)
        if kind == "swap":
            with history.compare_and_swap("it", seen, number) as op:
                op.result = before = await conn.compare_and_swap(remote, seen, number)
        elif kind == "add":
            with history.fetch_and_add("it", number) as op:
                op.result = before = await conn.fetch_and_add(remote, number)
        else:
            with history.read("it") as op:
                await conn.read(remote, data := bytearray(8))
                op.result = before = int.from_bytes(data, sys.byteorder)
        return before

    async def use() -> None:
        seen = 0
        async for conn in aiordma.reconnect("server", PORT, **options):
            with contextlib.suppress(*BROKEN):
                remote = await conn.recv_region()
                while world.now < 8:
                    with contextlib.suppress(aiordma.OutcomeUnknownError, aiordma.BufferStateError):
                        seen = await use_once(conn, remote, seen)
                    await asyncio.sleep(draw.uniform(0, 0.02))
                return

    world.host("server").serve(partial(serve, lend, **options))
    await on_two_hosts(world, use)
    history.check(steps=2_000_000)


SCENARIOS = {
    "restarts": Scenario(restarts, ROUGH),
    "restarts over TCP": Scenario(partial(restarts, via="tcp"), ROUGH),
    "leases": Scenario(leases, testing.FaultPlan(LOSSY, partitions=0.5, pauses=2, duration=0.3)),
    "streams": Scenario(streams),
    "operations": Scenario(partial(operations, strict=True)),
    "broken operations": Scenario(
        partial(operations, strict=False), testing.FaultPlan(FAR, partitions=3, pauses=2, kills=2)
    ),
    "atomics": Scenario(
        atomics,
        testing.FaultPlan(FAR, partitions=0.1, cables=1, kills=0.1, until=8, duration=2),
        devices=2,
    ),
    "cables": Scenario(cables, devices=2),
    "cables over TCP": Scenario(partial(cables, via="tcp"), devices=2),
}


def of_seed(seed: int) -> tuple[str, Scenario]:
    names = list(SCENARIOS)
    name = names[seed % len(names)]
    return name, SCENARIOS[name]


def failure(seed: int) -> str:
    """Run the scenario for a seed and return its error report, or an empty string on success."""
    name, scenario = of_seed(seed)
    logging.getLogger("aiordma").setLevel(logging.ERROR)  # the failures are intended
    try:
        scenario.run(seed)
    except Exception:
        again = f"python -m tests.simulation 1 {seed}"
        return f"{traceback.format_exc()}\n{name}, seed {seed}; again: {again}"
    return ""
