"""What runs on simulated hosts, and must be true in the end, whatever the seed does."""

from __future__ import annotations

import asyncio
import contextlib
import io
import runpy
import struct
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NoReturn
from unittest.mock import patch

import aiordma
from aiordma import testing

EXAMPLES = Path(__file__).parents[2] / "examples"
PORT = 7471
KEY = b"sixteen or more random bytes"
ANY_ADDRESS = aiordma.Config(allow_other_addresses=True)  # as the further rails are at another one
BROKEN = (aiordma.RDMAError, ConnectionError)

# Programs bear what the network does; without hosts that stop, connections survive it.
LOSSY = testing.Link(loss=0.005, duplicate=0.005, reorder=0.02, jitter=50e-6)
ROUGH = testing.FaultPlan(LOSSY, partitions=0.3, pauses=0.3, kills=0.3, until=6)
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


# ---- the examples --------------------------------------------------------------------------------


def example(name: str, *words: str) -> Coroutine[Any, Any, Any]:
    """What the script would have asyncio run, with its command line."""
    found: list[Coroutine[Any, Any, Any]] = []

    def run(work: Coroutine[Any, Any, Any]) -> NoReturn:
        found.append(work)
        raise KeyboardInterrupt

    path = str(EXAMPLES / f"{name}.py")
    arguments = patch.object(sys, "argv", [path, *words])
    with arguments, patch.object(asyncio, "run", run), contextlib.suppress(KeyboardInterrupt):
        runpy.run_path(path, run_name="__main__")
    return found.pop()


async def examples(world: testing.World) -> None:
    keys = [f"key{i}" for i in range(3)]
    client, other = world.host("client"), world.host("other")
    with contextlib.redirect_stdout(io.StringIO()) as told:
        world.host("cache").serve(example_of("cache", "serve"))
        world.host("rpc").serve(example_of("rpc", "serve"))
        await asyncio.sleep(1)
        stores = [
            client.run(example_of("cache", "set", "cache", "7474", key, "x" * 500)) for key in keys
        ]
        await asyncio.gather(*stores)
        loads = [
            other.run(example_of("cache", "get", "cache", "7474", key)) for key in [*keys, "none"]
        ]
        await asyncio.gather(*loads, client.run(example_of("rpc", "call", "rpc", "7473")))
    lines = told.getvalue().splitlines()
    assert lines.count("stored") == 3
    assert {f"{key}: {'x' * 500}" for key in keys} | {"none: not in the cache"} <= {*lines}
    assert {"squares: [0, 1, 4, 9, 16]", "the server has given up waiting"} <= {*lines}


def example_of(*command: str) -> Callable[[], Coroutine[Any, Any, Any]]:
    return partial(example, *command)


# ---- a service that counts, once for each request ------------------------------------------------

REQUEST = struct.Struct("=QQ")  # client, number of the request


class Counting:
    """It remembers its last answer to each client, which may ask again."""

    def __init__(self) -> None:
        self.count = 0
        self.answers: dict[int, tuple[int, int]] = {}

    async def __call__(self, conn: aiordma.Connection) -> None:
        with contextlib.suppress(*BROKEN):
            async for message in conn:
                with message:
                    client, number = REQUEST.unpack(bytes(message))
                if self.answers.get(client, (0, 0))[0] != number:
                    self.count += 1
                    self.answers[client] = number, self.count
                await conn.send(struct.pack("=Q", self.answers[client][1]))

    async def serve(self) -> None:
        async with await aiordma.start_server(self, "", PORT) as server:
            await server.serve_forever()


async def count(client: int, times: int) -> list[int]:
    answers: list[int] = []
    async for conn in aiordma.reconnect("server", PORT, longest_delay=1):
        try:
            while len(answers) < times:
                await conn.send(REQUEST.pack(client, len(answers) + 1))
                with await conn.recv() as message:
                    answers += struct.unpack("=Q", bytes(message))
                await asyncio.sleep(0.05)
        except BROKEN:
            continue
        break
    return answers


async def counting(world: testing.World) -> None:
    """While hosts stand still and lose each other."""
    world.host("server").serve(Counting().serve)
    clients = [world.host(f"client{i}").run(count, i, 50) for i in range(3)]
    answers = await asyncio.gather(*clients)
    assert sorted(chain(*answers)) == [*range(1, 151)]


# ---- hosts that are killed and boot again --------------------------------------------------------


async def echo(via: Literal["cm", "tcp"] = "cm") -> None:
    async def answer(conn: aiordma.Connection) -> None:
        with contextlib.suppress(*BROKEN):
            async for message in conn:
                with message:
                    await conn.send(bytes(message))

    auth = KEY if via == "tcp" else None
    async with await aiordma.start_server(answer, "", PORT, via=via, auth=auth) as server:
        await server.serve_forever()


async def restarts(world: testing.World, via: Literal["cm", "tcp"] = "cm") -> None:
    """Connections break, none answers wrongly, and in the end all is well again."""
    auth = KEY if via == "tcp" else None

    async def ask() -> None:
        async with await aiordma.connect("server", PORT, via=via, auth=auth) as conn:
            for size in world.random.choices((1, 100, 5000, 100_000), k=3):
                data = world.random.randbytes(size)
                await conn.send(data)
                with await conn.recv() as message:
                    assert bytes(message) == data

    async def ask_again_and_again() -> None:
        while world.now < 7:
            with contextlib.suppress(*BROKEN):
                await ask()
            await asyncio.sleep(0.5)

    clients = [world.host(f"client{i}") for i in range(2)]
    with contextlib.suppress(testing.KilledError):
        await asyncio.gather(*(client.run(ask_again_and_again) for client in clients))
    await asyncio.sleep(max(0, 10 - world.now))
    await ask()


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
    await asyncio.gather(*(world.host(f"client{i}").run(use) for i in range(2)))


# ---- random traffic ------------------------------------------------------------------------------


async def traffic(world: testing.World) -> None:
    """Messages of both sides, some of them cancelled, come in order and once each."""
    draw = world.random
    sizes = (0, 8, 1000, 4000, 70_000, 300_000)

    async def talk(conn: aiordma.Connection, name: int) -> None:
        sent: list[asyncio.Task[None]] = []

        async def send_all() -> None:
            for number in range(25):
                data = struct.pack("=II", name, number) + bytes(draw.choice(sizes))
                sent.append(asyncio.ensure_future(conn.send(data)))
                if draw.random() < 0.1:
                    sent[-1].cancel()
                if draw.random() < 0.5:
                    await asyncio.sleep(draw.expovariate(1000))
            await asyncio.gather(*sent, return_exceptions=True)
            await conn.send(b"last")

        async def receive_all() -> None:
            numbers = []
            async for message in conn:
                with message:
                    data = bytes(message)
                if data == b"last":
                    break
                who, number = struct.unpack("=II", data[:8])
                assert who != name
                assert data[8:].count(0) == len(data) - 8
                numbers.append(number)
            assert numbers == sorted(set(numbers))
            assert len(numbers) > 10

        await asyncio.gather(send_all(), receive_all())

    async def answer(conn: aiordma.Connection) -> None:
        await talk(conn, 1)
        await conn.wait_closed()

    async def call() -> None:
        async with await aiordma.connect("server", PORT) as conn:
            await talk(conn, 2)

    world.host("server").serve(serve, answer)
    await asyncio.gather(*(world.host(f"client{i}").run(call) for i in range(2)))


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


# ---- two cables ----------------------------------------------------------------------------------


async def cables(world: testing.World) -> None:
    """Long messages go on over one cable while the other one is cut, and both carry them later."""
    end = world.now + world.random.uniform(1, 4)
    options: dict[str, Any] = {"device": "all", "config": ANY_ADDRESS}

    async def answer(conn: aiordma.Connection) -> None:
        async for message in conn:
            with message:
                await conn.send(bytes(message))

    async def ask(conn: aiordma.Connection) -> None:
        data = world.random.randbytes(world.random.choice((1, 2, 4)) << 20)
        await conn.send(data)
        with await conn.recv() as message:
            assert bytes(message) == data

    async def call() -> None:
        async with await aiordma.connect("server", PORT, **options) as conn:
            while world.now < end or conn.rails[-1].state != "up":
                await ask(conn)
                await asyncio.sleep(world.random.uniform(0, 0.2))
            await ask(conn)

    world.host("server").serve(partial(serve, answer, **options))
    calling = asyncio.ensure_future(world.host("client").run(call))
    while world.now < end:
        await asyncio.sleep(world.random.uniform(0, 0.5))
        world.partition("server", network=1)
        await asyncio.sleep(world.random.uniform(0, 1))
        world.heal(network=1)
    await calling


SCENARIOS = {
    "examples": Scenario(examples),
    "counting": Scenario(counting, {}, testing.FaultPlan(LOSSY, partitions=1, pauses=1, until=20)),
    "restarts": Scenario(restarts, {"server": echo}, ROUGH),
    "restarts over TCP": Scenario(
        partial(restarts, via="tcp"), {"server": partial(echo, "tcp")}, ROUGH
    ),
    "leases": Scenario(
        leases, {}, testing.FaultPlan(LOSSY, partitions=0.5, pauses=2, duration=0.3)
    ),
    "traffic": Scenario(traffic),
    "streams": Scenario(streams),
    "cables": Scenario(cables, devices=2),
}


def of_seed(seed: int) -> tuple[str, Scenario]:
    names = list(SCENARIOS)
    name = names[seed % len(names)]
    return name, SCENARIOS[name]


def failure(seed: int) -> str:
    """Of the scenario of a seed; empty if there is none."""
    name, scenario = of_seed(seed)
    try:
        scenario.run(seed)
    except Exception:
        again = f"python -m tests.simulation 1 {seed}"
        return f"{traceback.format_exc()}\n{name}, seed {seed}; again: {again}"
    return ""
