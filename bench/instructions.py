"""A performance check without a clock, which counts the instructions executed by an operation.

    python -m bench instructions             compare with instructions.json; fail if higher
    python -m bench instructions --record    record the counts for this Python and compiler
    python -m bench instructions --parts     print the counts by part of the program

A fixed amount of work runs under valgrind's callgrind, in a single process with both ends of a
connection. Only instructions in the event loop's thread are counted. Hashes, addresses, random
numbers and the garbage collector are fixed, so that the counts of two runs differ little.

Scheduling is fixed as far as possible. All threads share one processor, and polling is off unless
it is being measured. How often a loop polls before it sleeps depends on the clock, and one
additional poll per batch of writes adds 3 % to the instruction count.

The counts also depend on the Python and compiler versions, so they are recorded separately for each
combination. If there is no record for this environment, the first record is used, with a larger
tolerance. It is scaled by the ratio of the counts for a workload that only uses asyncio.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from . import device
from .machine import command_output

if TYPE_CHECKING:
    from .over_rdma import OverRDMA, RDMAClient

RECORDS = Path(__file__).with_name("instructions.json")

SAME, OTHER = 0.05, 0.25
"""The tolerances for a count in the environment of the record, and in other environments."""

COUNT = 256
BATCHED = 40 * 64  # many batches, because each executes few instructions
LONG = 32
REPEATED = 5
"""The number of times each workload is counted. The lowest count is used.

A loop executes more instructions if it wakes up once for each half of its work, or if it polls
while the device's thread is waiting for the processor.
"""
TRIES = 4
"""The maximum number of times all workloads are counted while a count is too high.

The lowest count is used. Each process first creates a different number of types. Python's attribute
cache is indexed by a type's version and a name's address. Two attributes with the same index add
500 to 2,000 instructions to each operation.
"""
CALIBRATION = "asyncio alone: a future set by a callback, awaited"

SLEEPING = [
    ("64 B echo", COUNT, "send", "ping", 64, 1, 1),
    ("64 KiB message", COUNT, "send", "flood", 64 << 10, 16, 1),
    ("256 KiB message", COUNT, "send", "flood", 256 << 10, 4, 1),
    ("1 MiB message", LONG, "send", "flood", 1 << 20, 1, 1),
    ("64 B write", COUNT, "write", "alone", 64, 1, 1),
    ("64 B write in a batch of 64", BATCHED, "write", "flood", 64, 64, 64),
]
"""The `aiordma.perf` workloads to count without polling.

The columns are the parameters of `both_ends`.
"""
POLLING = [
    ("64 B echo, polling", COUNT, "send", "ping", 64, 1, 1),
    ("64 B write, polling", COUNT, "write", "alone", 64, 1, 1),
]
"""The `aiordma.perf` workloads to count with the default polling."""

Counts = dict[str, float]
"""The number of instructions per operation, by workload."""

PARTS = {
    "copy": "memcpy|memmove",
    "verbs": "_lib.* (_cffi|aiordma)_",
    "device": "_lib",
    "session": "/_datapath/",
    "C library": "/libc",
    "Python": "",
}
"""The parts of the program, with patterns for the names of their objects and functions.

The first matching pattern is used.
"""
LOOP, KERNEL = "the loop's turns", "calls of the kernel"
COLUMNS = [LOOP, *reversed(PARTS), KERNEL]
"""The output columns.

Valgrind counts each byte copied by `rep movsb` as an instruction.
"""


# ---- counting, inside valgrind ------------------------------------------------------------------


async def futures(count: int) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(count):
        future = loop.create_future()
        loop.call_soon(future.set_result, None)
        await future


@dataclass(frozen=True)
class Work:
    """A fixed number of identical operations."""

    name: str
    count: int
    do: Callable[[int], Awaitable[object]]


async def works() -> AsyncGenerator[Work, None]:
    """Yield each workload. Its connections stay open until the next workload is requested."""
    from .over_rdma import OverRDMA  # noqa: PLC0415 - starting valgrind needs none of it

    yield Work(CALIBRATION, COUNT, futures)
    for way, table in ((OverRDMA(polling=0), SLEEPING), (OverRDMA(), POLLING)):
        async with way.serve("") as places, AsyncExitStack() as stack:
            for name, count, operation, kind, size, depth, batch in table:
                ends = both_ends(way, operation, kind, size, depth, batch)
                yield Work(name, count, await stack.enter_async_context(ends))
            if table is POLLING:
                continue
            echo = await stack.enter_async_context(way.connect(places["echo"]))
            for how, do in (("outstanding", echo.echo_many), ("tasks", echo.echo_tasks)):
                yield Work(f"64 B echo, 64 {how}", COUNT, partial(do, bytes(64), window=64))
            client = await stack.enter_async_context(way.connect(places["styles"]))
            for name, sender in (("gather of 8", "gather"), ("one at a time", "one")):
                yield Work(f"64 KiB message, {name}", COUNT, partial(stream, client, sender))


async def stream(client: RDMAClient, sender: str, count: int) -> None:
    style = {"source": "bytes", "receiver": "recv", "target": "none", "size": 64 << 10}
    await client.stream(sender=sender, count=count, **style)


@asynccontextmanager
async def both_ends(
    way: OverRDMA, operation: str, kind: str, size: int, depth: int, batch: int
) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """Open both ends of a connection the way `aiordma.perf` does, but do not report anything.

    Yields:
        A coroutine function that performs the given number of operations.
    """
    import aiordma  # noqa: PLC0415
    from aiordma.perf import client, ends, server, wire  # noqa: PLC0415

    opened = wire.Open(wire.VERSION, operation, 1, False, "", depth, 0, 1)
    served = kind if kind in wire.WAYS else "flood"
    sides = (ends.Load.of(opened, served, 1, size, serving=side) for side in (False, True))
    async with await aiordma.listen("127.0.0.1", 0, **way.options) as listener:
        connecting = aiordma.connect("127.0.0.1", listener.port, **way.options)
        conn, peer = await asyncio.gather(connecting, listener.accept())
        async with conn, peer:
            here, there = client.ENDS[operation](conn), server.ENDS[operation](peer)
            tokens = [end.prepare(load) for end, load in zip((here, there), sides, strict=True)]
            for end, token in zip((there, here), tokens, strict=True):
                end.use(token)

            async def do(count: int) -> None:
                run, tally = ends.Run(count, depth, batch), ends.Tally()
                serving = asyncio.create_task(server.receive_operations(there, tally, served))
                await getattr(here, kind)(run)
                await tally.reach(count)
                serving.cancel()
                await asyncio.wait({serving})

            async def do_unnoticed(count: int) -> None:
                await getattr(here, kind)(ends.Run(count, depth, batch))

            yield do if operation == "send" else do_unnoticed
            here.release()
            there.release()


async def count(library: str, types: str) -> None:
    callgrind = ctypes.CDLL(library)
    for _ in range(int(types)):
        hasattr(type("", (), {}), "")  # uses up a type version
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    gc.disable()
    async with aclosing(works()) as all_works:
        async for work in all_works:
            await work.do(work.count)  # a warm-up, which does all one-time work
            for _ in range(REPEATED):
                gc.collect()
                callgrind.begin()
                await work.do(work.count)
                callgrind.end(f"{work.count} x {work.name}".encode())


# ---- counting, from outside ---------------------------------------------------------------------

VALGRIND = [
    "valgrind",
    "--tool=callgrind",
    "--instr-atstart=no",
    "--separate-threads=yes",
    "--collect-systime=yes",
    "--quiet",
]


def counts(types: int = 0) -> Counts:
    """Count the instructions per operation in a new process.

    The process first creates `types` Python classes, so that classes created later get different
    type versions. The versions affect the counts (see TRIES).
    """
    return {name: parts[""] for name, parts in counts_by_part(types).items()}


def counts_by_part(types: int) -> dict[str, Counts]:
    """Return the instructions per operation, broken down by part of the program."""
    library = device.compiled("instructions.c", "instructions.so", ["-shared", "-fPIC"], [])
    with TemporaryDirectory() as folder:
        out = Path(folder, "out")
        command = ["setarch", "-R", *VALGRIND, f"--callgrind-out-file={out}", sys.executable]
        command += ["-m", "bench.instructions", str(library), str(types)]
        # Do not pass on the caller's environment. Its size affects the memory layout, which changes
        # some counts by 5 %.
        environment = {"PATH": os.defpath, "PYTHONHASHSEED": "0", "AIORDMA_DEVICE": "embedded0"}
        environment["LD_PRELOAD"] = str(library)
        try:
            subprocess.run(command, check=True, cwd=device.HERE.parent, env=environment)
        except FileNotFoundError as error:
            sys.exit(f"{error.filename} is missing: valgrind counts (Debian: apt install valgrind)")
        found: dict[str, Counts] = {}
        for name, parts in filter(None, map(parse_profile, Path(folder).glob("out.*-01"))):
            found[name] = min(parts, found.get(name, parts), key=itemgetter(""))
        return dict(sorted(found.items()))


LINE = re.compile(r"(?m)^(?:(c?ob|c?fn|calls)=(?:\((\d+)\))? ?(.*)|[-+*\d]\S* (\d+) ?(\d*).*)$")


def parse_profile(path: Path) -> tuple[str, Counts] | None:
    """Parse a Callgrind dump, and return the workload's name and counts.

    Valgrind's manual describes the format. The result is None if the dump contains no workload.
    """
    text = path.read_text()
    work = re.search(r"^desc: Trigger: Client Request: (\d+) x (.*)$", text, re.MULTILINE)
    if work is None:
        return None
    parts, here, of_callee = Counter[str](), {"ob": "", "fn": "", "cfn": ""}, False
    names: dict[tuple[str, str], str] = {}
    for key, number, name, cost, calls in LINE.findall(text):
        if key == "calls":
            of_callee = True
        elif key:
            here[key] = names.setdefault((key[-2:], number), name)
        elif of_callee:  # the cost of a call, which the callee's lines include
            of_callee = False
            if here["cfn"] == "context_run":  # the loop's function for running callbacks
                parts[LOOP] -= int(cost)
        else:
            place = f"{here['ob']} {here['fn']}"
            part = next(part for part in PARTS if re.search(PARTS[part], place))
            parts.update({"": int(cost), part: int(cost), LOOP: int(cost)})
            if "clock_gettime" not in place:  # a system call only under valgrind
                parts[KERNEL] += int(calls or 0)
    parts["Python"] -= parts[LOOP]
    return work[2], {part: parts[part] / int(work[1]) for part in parts}


def environment() -> str:
    python = f"{platform.python_implementation()} {platform.python_version()}"
    compiler = platform.python_compiler().partition(" (")[0]
    return f"{python} by {compiler}, {command_output('cc', '--version')}, {platform.machine()}"


# ---- comparing ----------------------------------------------------------------------------------


def compare(here: Counts, records: dict[str, Counts], where: str) -> tuple[list[str], bool]:
    """Return the lines of the report, and whether all counts are within tolerance."""
    if where in records:
        record, room, lines = records[where], SAME, [f"As recorded for {where}:"]
    else:
        origin, record = next(iter(records.items()))
        times, room = here[CALIBRATION] / record[CALIBRATION], OTHER
        record = {name: number * times for name, number in record.items()}
        lines = [
            f"Nothing is recorded for {where}; compared with {origin}, {times:.2f} times as much:"
        ]
    good = True
    for name, number in here.items():
        if name not in record:
            lines.append(f"{number:10,.0f}  {name}: not recorded (--record)")
            good = False
            continue
        change = number / record[name] - 1
        verdict = "MORE than it may be" if change > room else ""
        if change < -room:
            verdict = "less: record it (--record)"
        good = good and change <= room
        lines.append(f"{number:10,.0f}  {change:+7.1%}  {name}  {verdict}".rstrip())
    lines.append(f"instructions of one operation; up to {room:+.0%} is taken for the same")
    return lines, good


def table(found: dict[str, Counts]) -> None:
    print("".join(f"{part:>20}" for part in ("", "all", *COLUMNS)))
    for name, parts in found.items():
        numbers = (f"{parts.get(part, 0):20,.0f}" for part in ("", *COLUMNS))
        print(f"{name[:20]:20}", *numbers, sep="")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench instructions", description=__doc__)
    parser.add_argument("--record", action="store_true", help=f"write {RECORDS.name}")
    parser.add_argument("--parts", action="store_true", help="only print where they are")
    chosen = parser.parse_args(arguments)
    if chosen.parts:
        table(counts_by_part(0))
        return
    records: dict[str, Counts] = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    here, where = counts(), environment()
    if chosen.record:
        records[where] = {name: round(number) for name, number in here.items()}
        RECORDS.write_text(json.dumps(records, indent=1) + "\n")
    lines, good = compare(here, records, where)
    for types in range(1, TRIES):
        if good:
            break
        here = {name: min(here[name], number) for name, number in counts(types).items()}
        lines, good = compare(here, records, where)
    print("\n".join(lines))
    if not good:
        sys.exit(1)


if __name__ == "__main__":
    asyncio.run(count(*sys.argv[1:]))
