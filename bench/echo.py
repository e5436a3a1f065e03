"""aiordma's echo on the embedded device beside TCP echoes of the same messages.

All of them are measured in turns in one run, since a machine's mood changes by the minute: the
figures that carry over to another machine, if any do, are the ratios. One message at a time is
under way, between two processes on this machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .contender import Contender, loops
from .ways import WAYS

# Sizes in bytes, and round trips of each in one turn: a few ten milliseconds for most.
COUNTS = {64: 500, 4 << 10: 500, 64 << 10: 200, 1 << 20: 40}

CAPTION = (
    "Round trips in us: medians of {repeats} turns, each the median of its messages; in brackets "
    "the lowest and the highest ratio of one turn. More than 1 x: aiordma took less time than the "
    "TCP echo of that row, on the same event loop."
)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench echo", description=__doc__)
    parser.add_argument("--repeats", type=int, default=9, help="turns (%(default)s)")
    parser.add_argument(
        "--count", type=int, help="round trips of each size in a turn (by size, 40 to 500)"
    )
    options = parser.parse_args(arguments)
    counts = {size: options.count or count for size, count in COUNTS.items()}
    with ExitStack() as stack:
        contenders = [stack.enter_context(Contender(way, loop)) for loop in loops() for way in WAYS]
        for contender in contenders:
            for size, count in counts.items():
                contender.round_trips(os.urandom(size), count)  # warms up
        times = measure(contenders, counts, options.repeats)
    console = Console()
    console.print(table(contenders, times, options.repeats))
    if "uvloop" not in loops():
        console.print("uvloop is not installed: not measured")


Times = dict[tuple[str, str, int], list[float]]
"""Median seconds of each turn, by name, event loop and size."""


def measure(contenders: list[Contender], counts: dict[int, int], repeats: int) -> Times:
    times: Times = {}
    turns = track(range(repeats), "turns", console=Console(stderr=True), transient=True)
    for _ in turns if sys.stderr.isatty() else range(repeats):
        for size, count in counts.items():
            data = os.urandom(size)
            for contender in contenders:
                trips = contender.round_trips(data, count)
                key = contender.name, contender.loop, size
                times.setdefault(key, []).append(median(trips))
    return times


def table(contenders: list[Contender], times: Times, repeats: int) -> Table:
    table = Table(
        title="aiordma on the embedded device, beside TCP echoes",
        caption=CAPTION.format(repeats=repeats),
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("\nsize", justify="right")
    table.add_column("\nTCP echo by")
    table.add_column("its\nus", justify="right")
    table.add_column("aiordma\nus", justify="right")
    table.add_column("\naiordma is")
    for row in rows(contenders, times):
        table.add_row(*row, end_section=row[1] == contenders[-1].name)
    return table


def rows(contenders: list[Contender], times: Times) -> Iterator[tuple[str, ...]]:
    for size in COUNTS:
        for contender in contenders:
            if contender.name == "aiordma":
                continue
            its = times[contender.name, contender.loop, size]
            ours = times["aiordma", contender.loop, size]
            ratios = [theirs / mine for theirs, mine in zip(its, ours, strict=True)]
            yield (
                f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B",
                contender.name,
                f"{median(its) * 1e6:,.1f}",
                f"{median(ours) * 1e6:,.1f}",
                f"{median(ratios):.2f} x its speed ({min(ratios):.2f}-{max(ratios):.2f})",
            )
