"""What runs on simulated hosts, and must be true in the end, whatever the seed does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import traceback
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import aiordma
from aiordma import testing

PORT = 7471
KEY = b"sixteen or more random bytes"
ANY_ADDRESS = aiordma.Config(allow_other_addresses=True)  # as the further rails are at another one
BROKEN = (aiordma.RDMAError, ConnectionError)

# Programs bear what the network does; without hosts that stop, connections survive it.
LOSSY = testing.Link(loss=0.005, duplicate=0.005, reorder=0.02, jitter=50e-6)
ROUGH = testing.FaultPlan(LOSSY, partitions=0.3, pauses=0.3, kills=0.3, until=6)
FAR = replace(LOSSY, latency=0.005)  # so there is time for faults
CALM = testing.FaultPlan(LOSSY)

Main = Callable[[testing.World], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Scenario:
    """`main` checks what has to be true."""

    main: Main
    hosts: Mapping[str, Callable[[], Coroutine[Any, Any, Any]]] = field(default_factory=dict)
    faults: testing.FaultPlan = CALM
    devices: int = 1

    def run(self, seed: int) -> str:
        """The trace."""

        async def main(world: testing.World) -> str:
            await self.main(world)
            return world.trace

        return testing.simulate(
            main, seed=seed, hosts=self.hosts, faults=self.faults, devices=self.devices, limit=1000
        )


async def serve(
    handler: Callable[[aiordma.Connection], Coroutine[Any, Any, None]], **options: Any
) -> None:
    """Whose errors end the simulation, unlike those of the handlers of a server."""
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
    """Whose end is that of its host, or its own."""

    async def run(host: testing.Host) -> None:
        with contextlib.suppress(testing.KilledError):
            await host.run(program)

    await asyncio.gather(*(run(world.host(f"client{i}")) for i in range(2)))


# ---- hosts that are killed and boot again --------------------------------------------------------


EXECUTED = Counter[bytes]()
"""The messages that a server has had, whatever became of it."""


async def echo(via: Literal["cm", "tcp"] = "cm") -> None:
    async def answer(conn: aiordma.Connection) -> None:
        with contextlib.suppress(*BROKEN):
            async for message in conn:
                with message:
                    EXECUTED[bytes(message)] += 1
                    await conn.send(bytes(message))

    auth = KEY if via == "tcp" else None
    async with await aiordma.start_server(answer, "", PORT, via=via, auth=auth) as server:
        await server.serve_forever()


async def restarts(world: testing.World, via: Literal["cm", "tcp"] = "cm") -> None:
    """Clients come back each time; what they send once is executed once at most."""
    auth = KEY if via == "tcp" else None
    answered = set[bytes]()
    EXECUTED.clear()

    async def ask(until: float) -> None:
        async for conn in aiordma.reconnect(
            "server", PORT, via=via, auth=auth, first_delay=0.1, longest_delay=0.5
        ):
            try:
                while True:
                    data = world.random.randbytes(world.random.choice((16, 100, 5000, 100_000)))
                    await conn.send(data)
                    with await conn.recv() as message:
                        assert bytes(message) == data
                    answered.add(data)
                    if world.now >= until:
                        return
                    await asyncio.sleep(0.3)
            except BROKEN:
                continue

    await on_two_hosts(world, partial(ask, 7))
    await asyncio.sleep(max(0, 10 - world.now))
    await ask(0)
    assert max(EXECUTED.values()) == 1
    assert answered <= EXECUTED.keys()


# ---- leases --------------------------------------------------------------------------------------


async def leases(world: testing.World) -> None:
    """No write arrives after the end of its lease, by the clock of the owner."""
    lent = []

    async def lend(conn: aiordma.Connection) -> None:
        memory = bytearray(1 << 16)
        for length in (0.01, 0.1, 0.5):
            with conn.register(memory) as region:
                share = await conn.send_region(region, access=aiordma.Rights.WRITE, lease=length)
                await asyncio.sleep(length + world.random.uniform(0, 0.1))
                assert share.revoked
                seen = bytes(memory)
                await asyncio.sleep(world.random.uniform(0, 1))
                assert bytes(memory) == seen
                lent.append(length)

    async def use() -> None:
        with contextlib.suppress(*BROKEN):
            async with await aiordma.connect("server", PORT) as conn:
                for number in range(1, 4):
                    remote = await conn.recv_region()
                    with contextlib.suppress(aiordma.LeaseEndedError):
                        while True:
                            await conn.write(bytes([number]) * len(remote), remote)
                            await asyncio.sleep(0.001)

    world.host("server").serve(serve, lend)
    await on_two_hosts(world, use)


# ---- streams -------------------------------------------------------------------------------------


async def streams(world: testing.World) -> None:
    """asyncio's streams over the TCP bootstrap, encrypted."""
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
"""Lengths around which the implementation changes; the memory of each task has the longest."""
LANES = 3


def some_bytes(chance: random.Random) -> bytes:
    return chance.randbytes(max(1, chance.choice(SIZES) - chance.choice((0, 1, 500))))


async def cut_short(chance: random.Random, work: Coroutine[Any, Any, Any]) -> bool:
    """Cancels it at once, in the middle or after its end; whether it ended."""
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
    """What comes back is what was sent, in order; what was cancelled may lack."""
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
    """What was cancelled has been done or not, but not later than what was asked for after it."""
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
    """Messages, memory and loans, some cancelled; the ends of connections, also in the middle."""
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


async def cables(world: testing.World, via: Literal["cm", "tcp"] = "cm") -> None:
    """Long messages go on over one cable while the other one is cut, and both carry them later."""
    end = world.now + world.random.uniform(1, 4)
    options: dict[str, Any] = {"device": "all", "config": ANY_ADDRESS, "via": via}
    conns: list[aiordma.Connection] = []

    async def answer(conn: aiordma.Connection) -> None:
        conns.append(conn)
        async for message in conn:
            with message:
                await conn.send(bytes(message))

    async def ask(conn: aiordma.Connection) -> None:
        data = world.random.randbytes(world.random.choice((1, 2, 4)) << 20)
        await conn.send(data)
        with await conn.recv() as message:
            assert bytes(message) == data

    def whole() -> bool:
        """At both sides: one may know of a rail that broke, and the other one not yet."""
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
            await asyncio.sleep(0.5)  # a rail may find out by its last retry that it was cut
    await calling


SCENARIOS = {
    "restarts": Scenario(restarts, {"server": echo}, ROUGH),
    "restarts over TCP": Scenario(
        partial(restarts, via="tcp"), {"server": partial(echo, "tcp")}, ROUGH
    ),
    "leases": Scenario(
        leases, {}, testing.FaultPlan(LOSSY, partitions=0.5, pauses=2, duration=0.3)
    ),
    "streams": Scenario(streams),
    "operations": Scenario(partial(operations, strict=True)),
    "broken operations": Scenario(
        partial(operations, strict=False),
        {},
        testing.FaultPlan(FAR, partitions=3, pauses=2, kills=2),
    ),
    "cables": Scenario(cables, devices=2),
    "cables over TCP": Scenario(partial(cables, via="tcp"), devices=2),
}


def of_seed(seed: int) -> tuple[str, Scenario]:
    names = list(SCENARIOS)
    name = names[seed % len(names)]
    return name, SCENARIOS[name]


def failure(seed: int) -> str:
    """Of the scenario of a seed; empty if there is none."""
    name, scenario = of_seed(seed)
    logging.getLogger("aiordma").setLevel(logging.ERROR)  # what breaks is meant to
    try:
        scenario.run(seed)
    except Exception:
        again = f"python -m tests.simulation 1 {seed}"
        return f"{traceback.format_exc()}\n{name}, seed {seed}; again: {again}"
    return ""
