"""RESULTS.md, from what was measured: nothing in it comes from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NotRequired, TypedDict

from . import cost
from .lanes import NOT_INSTALLED, Comparison, Data, Requirement, by_work, ratio, seconds, spread
from .machine import Facts
from .plots import Panel, short

HEAD = """\
# Measurements

How fast aiordma is beside sockets, ucxx, nixl, and C on the same device: between two processes of
one machine with {cores}, without an RDMA card. So aiordma used its embedded device, over shared
memory unless TCP is named, ucxx and nixl theirs, and nothing here says how fast any of them is on a
card. What carries over to another machine, if anything does, are the ratios. The [goals](#goals),
and those that are missed, are at the end.

Every figure is a median of {turns} turns, in each of which all that is compared ran once; the
tables have the lowest and the highest turn in brackets, and the pictures as a line. A picture has
bars, or points on a logarithmic axis where the figures lie far apart.
`python -m bench all` ([bench](__init__.py)) measures all of it and writes this page.
"""

SUMMARY = (
    ("64 B echo", "latency", "64 B", "uvloop TCP protocol"),
    ("64 KiB echo", "latency", "64 KiB", "uvloop TCP protocol"),
    ("1 MiB echo", "latency", "1 MiB", "uvloop TCP protocol"),
    ("64 MiB of 8 numpy arrays, and an answer", "arrays", "8 arrays, 64 MiB", "blocking sockets"),
    (
        "the same, both cores used by others too",
        "arrays",
        "8 arrays, 64 MiB, cores used by others too",
        "blocking sockets",
    ),
    ("64 B echoes by 64 tasks", "rate", "64 B, 64 tasks", "uvloop TCP protocol"),
    ("64 B echoes on 256 connections", "connections", "256 connections", "uvloop TCP protocol"),
    ("connections made and closed", "connections", "connect and close", "uvloop TCP protocol"),
    ("64 B write into another process", "one_sided", "64 B, target asleep", "nixl"),
    ("1 MiB read from another process", "one_sided", "1 MiB read, target asleep", "nixl"),
)
"""What most readers look for: a title, the comparison, the work, and beside whom."""
BESIDE = ("aiordma", "ucxx, polling", "C, polling", "C")
"""Shown in the summary where they did the work, too."""

NO_NOTE = "not investigated."
VERDICTS = {True: "reached", False: "**not reached**", None: ""}


class Results(TypedDict):
    """What results.json has."""

    machine: Facts
    turns: int
    data: dict[str, Data]
    """By comparison."""
    cost: NotRequired[dict[str, Any]]
    """Memory and CPU; see `cost`."""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    names = list(head)
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def figures(comparison: Comparison, data: Data) -> Iterator[str]:
    """Each figure, and how many times as long as ours it took; the longer side goes down."""
    cells: dict[tuple[str, str], str] = {}
    for entry in data:
        work, who, found = entry["work"], entry["who"], entry.get("failed", NOT_INSTALLED)
        if entry["seconds"]:
            figure = spread(comparison.figure(work, one) for one in entry["seconds"])
            found = f"{figure:{',.0f' if figure.typical >= 1000 else '.4g'}}"
            if who != comparison.ours:
                ours = seconds(data, work, comparison.ours)
                found += f"; {ratio(entry['seconds'], ours):.2f}"
        cells[work, who] = found
    works, names = map(set, zip(*cells, strict=True))
    if len(works) <= len(names):
        cells = {(who, work): text for (work, who), text in cells.items()}
    down, across = (list(dict.fromkeys(side)) for side in zip(*cells, strict=True))
    yield from table(
        ("", *across), ((one, *(cells.get((one, other), "") for other in across)) for one in down)
    )


def panels(comparison: Comparison, data: Data) -> list[Panel]:
    """Its picture."""
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
    """The panel of each line of `SUMMARY`, beside whom, and how many times as fast aiordma is."""
    for title, name, work, other in SUMMARY:
        both = [seconds(measured.get(name, []), work, who) for who in (other, "aiordma")]
        if not all(both):
            continue
        for panel in panels(comparisons[name], measured[name]):
            if panel.title == work:
                rows = [row for row in panel.rows if row[0] in (*BESIDE, other)]
                yield Panel(title, panel.unit, rows), other, f"{ratio(*both):.2f}"


def reached(requirement: Requirement) -> tuple[str, str, str, str]:
    verdict = VERDICTS[requirement.reached]
    return requirement.what, requirement.asked, requirement.measured, verdict


def why(requirements: Iterable[Requirement], notes: Mapping[str, str]) -> Iterator[str]:
    """A paragraph for each that is not reached."""
    missed = [requirement.what for requirement in requirements if requirement.reached is False]
    if missed:
        yield from ("", "### What is not reached, and why")
    for what in missed:
        yield from ("", f"**{what}**: {notes.get(what, NO_NOTE)}")


def markdown(
    results: Results,
    comparisons: Mapping[str, Comparison],
    plots: Mapping[str, str],
    notes: Mapping[str, str],
) -> str:
    """`plots` are paths of pictures, by comparison; `notes` say by what is asked why it is not
    reached."""
    measured = {name: data for name, data in results["data"].items() if name in comparisons}
    machine = results["machine"]
    cores = machine.get("processor", "").rpartition(", ")[2].removesuffix(" used")
    lines = [HEAD.format(turns=results["turns"], cores=cores or "two cores"), "## In short", ""]
    lines += table(
        ("", "aiordma", "beside it", "aiordma is as fast, times"),
        (
            (one.title, f"{ours} {one.unit}", f"{other}: {its} {one.unit}", times)
            for one, other, times in summary(comparisons, measured)
            for found in [dict(one.rows)]
            for ours, its in [(short(found["aiordma"].typical), short(found[other].typical))]
        ),
    )
    if "summary" in plots:
        lines += ["", f"![In short]({plots['summary']})"]
    for name, data in measured.items():
        comparison = comparisons[name]
        lines += ["", f"## {comparison.title}", "", comparison.note]
        if comparison.style:
            lines += ["", f"The programs: {comparison.style}."]
        if name in plots:
            lines += ["", f"![{comparison.title}]({plots[name]})"]
        unit = f"{comparison.unit}; how many times as long as {comparison.ours}"
        lines += ["", f"<details><summary>As a table: {unit}</summary>", ""]
        lines += figures(comparison, data)
        lines += ["", "</details>"]
    requirements = [
        requirement
        for name, data in measured.items()
        for requirement in comparisons[name].requirements(data)
    ]
    if "cost" in results:
        lines += ["", "## What it costs", "", "Of the client and of the server.", ""]
        rows = cost.rows(results["cost"])
        lines += table(
            ("what", "asked", "measured", ""),
            ((what, asked, measured, VERDICTS[verdict]) for what, asked, measured, verdict in rows),
        )
    lines += ["", "## The machine", ""]
    lines += table(("", ""), machine.items())
    lines += ["", "## Goals", ""]
    lines += table(("what", "asked", "measured", ""), map(reached, requirements))
    lines += why(requirements, notes)
    return "\n".join(lines) + "\n"
