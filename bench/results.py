"""The generation of RESULTS.md from stored measurements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NotRequired, TypedDict

from . import cost
from .lanes import (
    NOT_INSTALLED,
    Comparison,
    Data,
    Requirement,
    Spread,
    by_work,
    ratio,
    seconds,
    spread,
)
from .machine import Facts
from .plots import Panel, two_digits

HEAD = """\
# Measurements

This page compares the speed of aiordma with that of sockets, ucxx, nixl and C programs. Unless
noted otherwise, each program ran as two processes on a machine with {cores} and without an
RDMA card. Each process had its own core. aiordma and the C programs used the embedded
device, which is implemented in software. Results with a card will differ. On other machines,
you can expect similar ratios, but not the same times. [Goals](#goals) shows which goals have
been met and why others have been missed.

| name | meaning |
|---|---|
| aiordma | this package on uvloop, with adaptive polling, over shared memory |
| aiordma on asyncio | the same, but on asyncio's own event loop |
| aiordma, polling=0 | the same, but without polling: a process that waits sleeps |
| TCP protocol, Unix protocol | an `asyncio.Protocol` over a TCP or Unix socket |
| C | a C program that calls the verbs directly, on the same device |
| ucxx, nixl | data transfer libraries with their own transports, used from Python |

Each figure is the median of {turns} turns, rounded to two significant digits. In each turn, every
program in the comparison runs once. Tables also show the lowest and highest values in
parentheses, and the ratio to aiordma's value: *2x* means twice aiordma's value. Charts show the
range of values as a line, and use points instead of bars if the axis is logarithmic.
`python -m bench all` ([bench](__init__.py)) runs all measurements and generates this page.
"""

SUMMARY = (
    ("64 B echo", "latency", "64 B", "uvloop TCP protocol"),
    ("64 KiB echo", "latency", "64 KiB", "uvloop TCP protocol"),
    ("1 MiB echo", "latency", "1 MiB", "uvloop TCP protocol"),
    ("64 MiB in 8 numpy arrays, with reply", "arrays", "8 arrays, 64 MiB", "blocking sockets"),
    ("the same on busy cores", "arrays", "8 arrays, 64 MiB, busy cores", "blocking sockets"),
    ("64 B echoes from 64 tasks", "rate", "64 B, 64 tasks", "uvloop TCP protocol"),
    ("64 B echoes on 256 connections", "connections", "256 connections", "uvloop TCP protocol"),
    ("connect and close", "connections", "connect and close", "uvloop TCP protocol"),
    ("64 B write to another process", "one_sided", "64 B, target idle", "nixl"),
    ("1 MiB read from another process", "one_sided", "1 MiB read, target idle", "nixl"),
)
"""The rows of the summary: title, comparison, workload, and alternative to aiordma."""
BESIDE = ("aiordma", "ucxx, polling", "C, polling", "C")
"""Further contenders included in the summary chart."""

NO_NOTE = "not investigated."
MACHINE = {"load before": "load average before", "what else computed": "other CPU load"}
"""Display names of facts about the machine, if they differ from those in results.json."""
MISSED = "**missed**: "


class Results(TypedDict):
    """The contents of results.json."""

    machine: Facts
    turns: int
    data: dict[str, Data]
    """Each comparison's results, by name."""
    cost: NotRequired[dict[str, Any]]
    """The memory and CPU time measured by `cost`."""


def table(
    head: Iterable[str], rows: Iterable[Iterable[str]], numbers_from: int | None = None
) -> Iterator[str]:
    """Yield the lines of a Markdown table. Columns from `numbers_from` onward are right-aligned."""
    names = list(head)
    left = len(names) if numbers_from is None else numbers_from
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * left}{'---:|' * (len(names) - left)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def relative(comparison: Comparison, work: str, ours: list[float], theirs: list[float]) -> Spread:
    """Divide another contender's figures by aiordma's, turn by turn."""
    return ratio(
        [comparison.figure(work, one) for one in theirs],
        [comparison.figure(work, one) for one in ours],
    )


def rounded(value: float) -> str:
    """Format a value with two significant digits."""
    exponent = int(f"{value:.1e}".partition("e")[2])
    return f"{float(f'{value:.1e}'):,.{max(0, 1 - exponent)}f}"


def figures(comparison: Comparison, data: Data) -> Iterator[str]:
    """Yield the lines of a comparison's table.

    If there are more kinds of work than contenders, each kind of work has a row. Otherwise, each
    contender has a row.
    """
    cells: dict[tuple[str, str], str] = {}
    for entry in data:
        work, who, found = entry["work"], entry["who"], entry.get("failed", NOT_INSTALLED)
        if entry["seconds"]:
            figure = spread(comparison.figure(work, one) for one in entry["seconds"])
            ends = f"{rounded(min(figure.values))}-{rounded(max(figure.values))}"
            found = f"{rounded(figure.typical)} ({ends})"
            if who != comparison.ours:
                ours = seconds(data, work, comparison.ours)
                times = relative(comparison, work, ours, entry["seconds"]).typical
                found += f", {rounded(times)}x"
        cells[work, who] = found
    works, names = map(set, zip(*cells, strict=True))
    if len(works) <= len(names):
        cells = {(who, work): text for (work, who), text in cells.items()}
    down, across = (list(dict.fromkeys(side)) for side in zip(*cells, strict=True))
    rows = ((one, *(cells.get((one, other), "") for other in across)) for one in down)
    yield from table(("", *across), rows, numbers_from=1)


def panels(comparison: Comparison, data: Data) -> list[Panel]:
    """Return the panels of a comparison's chart."""
    return [
        Panel(
            work,
            comparison.unit,
            [
                (entry["who"], spread(comparison.figure(work, one) for one in entry["seconds"]))
                for entry in entries
                if entry["seconds"]
            ],
        )
        for work, entries in by_work(data)
    ]


def summary(
    comparisons: Mapping[str, Comparison], measured: Mapping[str, Data]
) -> Iterator[tuple[Panel, str, str]]:
    """Yield the panel, the alternative and the speed-up for each row of `SUMMARY`."""
    for title, name, work, other in SUMMARY:
        both = [seconds(measured.get(name, []), work, who) for who in (other, "aiordma")]
        if not all(both):
            continue
        for panel in panels(comparisons[name], measured[name]):
            if panel.title == work:
                rows = [row for row in panel.rows if row[0] in (*BESIDE, other)]
                yield Panel(title, panel.unit, rows), other, f"{ratio(*both):.2g}"


def judged(measured: str, reached: bool | None) -> str:
    return MISSED + measured if reached is False else measured


def why(requirements: Iterable[Requirement], notes: Mapping[str, str]) -> Iterator[str]:
    """Yield one paragraph per note. Each begins with the missed goals that the note explains.

    If a goal's note is the name of another goal, the other goal's note is used.
    """
    missed: dict[str, list[str]] = {}
    for requirement in requirements:
        if requirement.reached is False:
            note = notes.get(requirement.what, NO_NOTE)
            missed.setdefault(notes.get(note, note), []).append(requirement.what)
    if missed:
        yield from ("", "### Missed goals")
    for note, goals in missed.items():
        yield from ("", f"**{'; '.join(goals)}**: {note}")


def markdown(
    results: Results,
    comparisons: Mapping[str, Comparison],
    plots: Mapping[str, str],
    notes: Mapping[str, str],
) -> str:
    """Return the contents of RESULTS.md.

    Args:
        results: The measurements.
        comparisons: All comparisons, keyed by name.
        plots: The paths of the charts, keyed by comparison.
        notes: Explanations for missed goals, keyed by goal.
    """
    measured = {name: data for name, data in results["data"].items() if name in comparisons}
    machine = results["machine"]
    cores = machine.get("processor", "").rpartition(", ")[2].removesuffix(" used")
    lines = [HEAD.format(turns=results["turns"], cores=cores or "two cores"), "## Summary", ""]
    lines += table(
        ("operation", "aiordma", "alternative", "speed-up"),
        (
            (one.title, f"{ours} {one.unit}", f"{its} {one.unit}, {other}", times)
            for one, other, times in summary(comparisons, measured)
            for found in [dict(one.rows)]
            for ours, its in [(two_digits(found[who].typical) for who in ("aiordma", other))]
        ),
        numbers_from=1,
    )
    if "summary" in plots:
        lines += ["", f"![Summary]({plots['summary']})"]
    for name, data in measured.items():
        comparison = comparisons[name]
        lines += ["", f"## {comparison.title}", "", comparison.note]
        if comparison.style:
            lines += ["", f"Program: {comparison.style}."]
        if name in plots:
            lines += ["", f"![{comparison.title}]({plots[name]})"]
        caption = comparison.caption or f"{comparison.title} in {comparison.unit}"
        ours = comparison.ours.replace("`", "")  # a summary is HTML
        caption += f": median (lowest-highest turn), ratio to {ours}"
        lines += ["", f"<details><summary>Table: {caption}</summary>", ""]
        lines += figures(comparison, data)
        lines += ["", "</details>"]
    requirements = [
        requirement
        for name, data in measured.items()
        for requirement in comparisons[name].requirements(data)
    ]
    if "cost" in results:
        lines += [
            "",
            "## Memory and CPU",
            "",
            "If a cell contains two values, the first is the client's and the second is the "
            "server's. Memory figures are for resident memory.",
            "",
        ]
        rows = cost.rows(results["cost"])
        lines += table(
            ("resource", "goal", "measured"),
            ((what, asked, judged(measured, verdict)) for what, asked, measured, verdict in rows),
        )
    lines += ["", "## Machine", ""]
    lines += table(("", ""), ((MACHINE.get(key, key), str(it)) for key, it in machine.items()))
    lines += ["", "## Goals", ""]
    lines += table(
        ("measurement", "goal", "measured"),
        ((one.what, one.asked, judged(one.measured, one.reached)) for one in requirements),
    )
    lines += why(requirements, notes)
    return "\n".join(lines) + "\n"
