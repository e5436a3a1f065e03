"""What connections cost that have nothing to do: memory and CPU on both ends, and when all talk.

The server is a process of its own. Memory is what belongs to a process alone (Private_Dirty), less
what of the pool is in memory; the pool's share is what a connection's receives need.

python -m bench.many          the server: prints its port, then a report for each line of its input
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import aiordma

from .end import allow_files, pool_of
from .footprint import KIB, footprint

IDLE_SECONDS = 2.0

Report = dict[str, float]


def report(pool: aiordma.MemoryPool) -> Report:
    """Bytes of this process and of its pool, its open files, and its seconds of CPU: before this
    was found out, and after."""
    cpu = time.process_time()
    found = footprint(pool)
    return {
        "pool": found["registered"],
        "memory": found["private"] - found["pool"],
        "files": found["files"],
        "before": cpu,
        "after": time.process_time(),
    }


async def serve() -> None:
    allow_files()
    pools = []

    async def echo(conn: aiordma.Connection) -> None:
        pools.append(pool_of(conn))
        async for message in conn:
            with message:
                await conn.send(message)

    async with await aiordma.start_server(echo, "127.0.0.1", 0) as server:
        print(server.port, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(report(pools[0])), flush=True)


class Server:
    """The other process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.many"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def report(self) -> Report:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        found: Report = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.communicate()


async def talk(conn: aiordma.Connection) -> None:
    await conn.send(b"a small message")
    with await conn.recv():
        pass


async def measure(count: int) -> Table:
    server = Server()
    one = await aiordma.connect("127.0.0.1", server.port)
    await talk(one)
    ends: list[Callable[[], Report]] = [lambda: report(pool_of(one)), server.report]
    before = [end() for end in ends]
    start = time.perf_counter()
    conns = [await aiordma.connect("127.0.0.1", server.port) for _ in range(count)]
    made = (time.perf_counter() - start) / count
    for conn in conns:
        await talk(conn)
    costs = [(end(), was) for end, was in zip(ends, before, strict=True)]
    rested = [end() for end in ends]
    await asyncio.sleep(IDLE_SECONDS)
    idle = [end()["before"] - was["after"] for end, was in zip(ends, rested, strict=True)]
    talked = [end() for end in ends]
    for _ in range(3):
        await asyncio.gather(*(talk(conn) for conn in conns))
    busy = [end()["before"] - was["after"] for end, was in zip(ends, talked, strict=True)]
    await asyncio.gather(*(conn.close() for conn in conns))
    await one.close()
    server.close()

    table = Table(box=SIMPLE_HEAD, caption=f"{count} connections, made in {made * 1e3:.1f} ms each")
    for name in ("of one connection", "client", "server"):
        table.add_column(name, justify="left" if name.startswith("of") else "right")
    for name, key in (("memory of its own, KiB", "memory"), ("receives in the pool, KiB", "pool")):
        table.add_row(name, *(f"{(now[key] - was[key]) / count / KIB:.0f}" for now, was in costs))
    table.add_row(
        "open files", *(f"{(now['files'] - was['files']) / count:.2f}" for now, was in costs)
    )
    table.add_row(
        "CPU while all are idle, us a second",
        *(f"{spent / IDLE_SECONDS / count * 1e6:.1f}" for spent in idle),
    )
    table.add_row(
        "CPU of a message and its echo, us", *(f"{spent / 3 / count * 1e6:.0f}" for spent in busy)
    )
    return table


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench many", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="connections (%(default)s)")
    options = parser.parse_args(arguments)
    allow_files()
    Console().print(asyncio.run(measure(options.count)))


if __name__ == "__main__":
    asyncio.run(serve())
