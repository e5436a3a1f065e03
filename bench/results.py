"""RESULTS.md, from what was measured: nothing in it comes from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NotRequired, TypedDict

from . import cost
from .lanes import NOT_INSTALLED, Comparison, Data, Requirement, by_work, ratio, seconds, spread
from .machine import Facts

HEAD = """\
# Results

Written by `python -m bench all` ([bench](__init__.py) says how). Every figure is a median
of {turns} turns, in each of which all that is compared ran once; in brackets the lowest and the
highest turn. What carries over to another machine, if anything does, are the ratios.
"""

STYLES = """\
How fast aiordma is depends on the style of the program that uses it. These are the styles of the
figures: {styles}.
"""

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


def figures(comparison: Comparison, data: Data) -> Iterator[tuple[str, ...]]:
    """Work, who, the figure, and how many times as long as ours it took."""
    for work, entries in by_work(data):
        for entry in entries:
            if not entry["seconds"]:
                yield work, entry["who"], NOT_INSTALLED, ""
                continue
            found = spread(comparison.figure(work, one) for one in entry["seconds"])
            digits = ",.0f" if found.typical >= 1000 else ".4g"
            if entry["who"] == comparison.ours:
                times = ""
            else:
                ours = seconds(data, work, comparison.ours)
                times = f"{ratio(entry['seconds'], ours):.2f}"
            yield work, entry["who"], f"{found:{digits}}", times


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
    styles = "; ".join(
        f"**{comparison.title}**: {comparison.style}"
        for comparison in (comparisons[name] for name in measured)
        if comparison.style
    )
    lines = [
        HEAD.format(turns=results["turns"]),
        STYLES.format(styles=styles),
        "## The machine",
        "",
    ]
    lines += table(("", ""), results["machine"].items())
    lines += ["", "## What is to be reached", ""]
    requirements = [
        requirement
        for name, data in measured.items()
        for requirement in comparisons[name].requirements(data)
    ]
    lines += table(("what", "asked", "measured", ""), map(reached, requirements))
    lines += why(requirements, notes)
    if "cost" in results:
        lines += ["", "## What it costs", "", "Of the client and of the server.", ""]
        rows = cost.rows(results["cost"])
        lines += table(
            ("what", "asked", "measured", ""),
            ((what, asked, measured, VERDICTS[verdict]) for what, asked, measured, verdict in rows),
        )
    for name, data in measured.items():
        comparison = comparisons[name]
        lines += ["", f"## {comparison.title}", "", comparison.note, ""]
        head = ("", "by", comparison.unit, f"takes as long as {comparison.ours}, times")
        lines += table(head, figures(comparison, data))
        if name in plots:
            lines += ["", f"![{comparison.title}]({plots[name]})"]
    return "\n".join(lines) + "\n"
