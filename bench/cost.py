"""The memory and CPU time that aiordma itself uses, compared with the goals.

The measurements cover the memory of idle connections, the memory that a large transfer uses in
addition to the program's buffers, and the CPU time of idle connections. Each end of the connections
is a process that uses this machine's embedded device. All memory figures refer to resident memory.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiordma

from .end import Commands, End
from .footprint import scheduled

KIB, MIB = 1 << 10, 1 << 20

# Limits on memory usage, in bytes.
MAX_IDLE_CONNECTION_BYTES = 64 * KIB
MAX_THOUSAND_CONNECTIONS_BYTES = 200 * MIB
MAX_TRANSFER_BYTES = 64 * MIB

IDLE_SECONDS = 5.0
# The maximum number of idle periods to measure. The first ones may not be idle, because timers
# started while connecting, such as the handshake timeout of 10 s, may still wake up the processes.
MAX_IDLE_PERIODS = 4
READ_WRITE = int(aiordma.Rights.READ | aiordma.Rights.WRITE)

Data = dict[str, Any]


def both(first: End, second: End, *commands: tuple[Any, ...]) -> list[Any]:
    """Send a command to each end, and wait for both results."""
    for end, command in zip((first, second), commands, strict=True):
        end.tell(*command)
    return [first.answer(), second.answer()]


class Pair:
    """Two processes that start with one connection between them."""

    def __init__(self, stack: ExitStack) -> None:
        self.client, self.server = (stack.enter_context(End()) for _ in range(2))
        self._port = self.server.do(Commands.listen)
        self.connect(1)

    def connect(self, count: int) -> None:
        """Open `count` more connections."""
        self.both((Commands.connect, self._port, count), (Commands.accept, count))

    def both(self, client: tuple[Any, ...], server: tuple[Any, ...]) -> list[Any]:
        return both(self.client, self.server, client, server)

    def talk(self) -> None:
        self.both((Commands.ask,), (Commands.answer,))

    def footprints(self) -> list[Any]:
        return self.both((Commands.footprint,), (Commands.footprint,))

    def scheduled(self) -> list[tuple[int, int]]:
        return [scheduled(end.pid) for end in (self.client, self.server)]

    def idle(self, seconds: float) -> list[tuple[int, int]]:
        """Return the number of times each idle end was scheduled, and its CPU time in nanoseconds.

        This method measures up to MAX_IDLE_PERIODS periods of `seconds` each. It returns the values
        for the first period in which neither end ran. If there is no such period, it returns the
        values for the last one.
        """
        for _ in range(MAX_IDLE_PERIODS):
            before = self.scheduled()
            time.sleep(seconds)
            found = [
                (now[0] - was[0], now[1] - was[1])
                for now, was in zip(self.scheduled(), before, strict=True)
            ]
            if not any(runs for runs, _ in found):
                break
        return found


def connections(count: int, seconds: float) -> Data:
    """Measure the memory and CPU time used by idle connections at both ends."""
    with ExitStack() as stack:
        pair = Pair(stack)
        pair.talk()
        before = pair.footprints()
        pair.connect(count)
        pair.talk()
        after = pair.footprints()
        idle = pair.idle(seconds)
    grown = {
        name: [(now[name] - was[name]) / count for now, was in zip(after, before, strict=True)]
        for name in ("private", "pool", "registered", "files")
    }
    return {
        "count": count,
        "own": [a - b for a, b in zip(grown["private"], grown["pool"], strict=True)],
        "pool": grown["pool"],
        "registered": grown["registered"],
        "files": grown["files"],
        "resident": [now["resident"] for now in after],
        "idle_seconds": seconds,
        "idle_runs": [runs for runs, _ in idle],
        "idle_ns": [ns for _, ns in idle],
    }


TRANSFERS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "send, recv_into": ((Commands.send,), (Commands.recv_into,)),
    "write": ((Commands.write,), (Commands.share, READ_WRITE)),
    "read": ((Commands.read,), (Commands.share, READ_WRITE)),
}


def transfers(size: int) -> Data:
    """Measure how much memory both ends use during a transfer, excluding the program's buffers."""
    found: Data = {"size": size, "extra": {}}
    for name, commands in TRANSFERS.items():
        with ExitStack() as stack:
            pair = Pair(stack)
            filled = name != "read"
            pair.both((Commands.buffer, size, filled), (Commands.buffer, size, not filled))
            pair.both(*commands)
            (here, one), (there, other) = pair.both((Commands.extra,), (Commands.extra,))
            if one != other:
                raise RuntimeError(f"{name}: the {size} bytes received differ from those sent")
            found["extra"][name] = [here, there]
    return found


def measure(count: int = 1000, size: int = 1 << 30, seconds: float = IDLE_SECONDS) -> Data:
    """Run all measurements. Values measured at both ends are [client, server] lists."""
    return {"connections": connections(count, seconds), "transfers": transfers(size)}


def rows(data: Data) -> list[tuple[str, str, str, bool | None]]:
    """Return each measurement's name, goal and result, and whether the goal was reached.

    The last value is None if there is no goal.
    """
    idle, large = data["connections"], data["transfers"]
    count = idle["count"]

    def calls(name: str) -> str:
        return " and ".join(f"`{call}`" for call in name.split(", "))

    def amounts(values: Sequence[float], unit: int, name: str) -> str:
        return " and ".join(f"{value / unit:.0f}" for value in values) + f" {name}"

    thousand = count == 1000
    gib = large["size"] / (1 << 30)
    own, resident = idle["own"], idle["resident"]
    small = max(resident) <= MAX_THOUSAND_CONNECTIONS_BYTES if thousand else None
    registered = idle["registered"][0] / KIB
    return [
        (
            "idle connection, without pooled buffers",
            "at most 64 KiB",
            amounts(own, KIB, "KiB"),
            max(own) <= MAX_IDLE_CONNECTION_BYTES,
        ),
        (
            "pooled buffers of a connection after one message in each direction",
            "",
            amounts(idle["pool"], KIB, "KiB") + f", of {registered:.0f} KiB registered",
            None,
        ),
        (
            f"process with {count:,} idle connections",
            "at most 200 MiB" if thousand else "",
            amounts(resident, MIB, "MiB"),
            small,
        ),
        (
            f"CPU time of that process in {idle['idle_seconds']:g} s without traffic",
            "none",
            amounts(idle["idle_ns"], 1000, "us"),
            not any(idle["idle_runs"]),
        ),
        *(
            (
                f"transfer of {gib:g} GiB with {calls(name)}, without the program's buffers",
                "at most 64 MiB",
                amounts(extra, MIB, "MiB"),
                max(extra) <= MAX_TRANSFER_BYTES,
            )
            for name, extra in large["extra"].items()
        ),
    ]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench cost", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="connections (%(default)s)")
    parser.add_argument("--mib", type=int, default=1024, help="of a transfer (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=IDLE_SECONDS, help="of doing nothing (%(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args(arguments)
    data = measure(options.count, options.mib * MIB, options.seconds)
    if options.json:
        options.json.write_text(json.dumps(data, indent=2) + "\n")
    for *words, reached in rows(data):
        print(*words, {True: "reached", False: "NOT REACHED", None: ""}[reached], sep="; ")
