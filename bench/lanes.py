"""Comparisons, which measure contenders in turns and compute ratios between their results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any, NotRequired, Self, TypedDict

from .contender import Contender, InC, InPython, Words, two_cores

TURNS = 9
NOT_INSTALLED, NOT_MEASURED = "not installed", "not measured"


@dataclass(frozen=True)
class Options:
    """Options that determine how much is measured.

    Each lane is measured `turns` times. `share` scales the number of operations in each turn: 0.5
    means half the usual number. Messages are up to `most` bytes long.
    """

    turns: int = TURNS
    share: float = 1.0
    most: int = 64 << 20

    def count(self, count: int, unit: int = 1) -> int:
        """Return `count` times `share`, rounded to a multiple of `unit`."""
        return max(1, round(count * self.share / unit)) * unit


class Measured(TypedDict):
    """One lane's results, as stored in results.json."""

    work: str
    who: str
    seconds: list[float]
    """The time per operation for each turn, or an empty list if the contender failed."""
    failed: NotRequired[str]


Data = list[Measured]
"""A comparison's results."""


@dataclass(frozen=True)
class Lane:
    """One kind of work done by one contender. `do` returns the seconds per operation."""

    work: str
    who: str
    do: Callable[[], float]
    new_process_per_job: bool = False
    """Whether to start a new process for each turn, which makes a warm-up pointless."""

    @classmethod
    def of(cls, contender: Contender, work: str, who: str, kind: str, **numbers: Any) -> Self:
        return cls(work, who, lambda: contender.do(kind, **numbers), contender.new_process_per_job)

    @classmethod
    def missing(cls, work: str, who: str) -> Self:
        """Return a lane without results for a contender that is not installed."""

        def do() -> float:
            raise RuntimeError(NOT_INSTALLED)

        return cls(work, who, do)


def take_turns(lanes: Sequence[Lane], options: Options) -> Data:
    """Measure every lane once per turn, after a warm-up.

    If an aiordma lane fails, the error is raised. If any other lane fails, its entry in the results
    contains the error message and no durations.
    """
    measured: Data = [{"work": lane.work, "who": lane.who, "seconds": []} for lane in lanes]
    for turn in range(-1, options.turns):
        for lane, entry in zip(lanes, measured, strict=True):
            if "failed" in entry or (turn < 0 and lane.new_process_per_job):
                continue
            try:
                taken = lane.do()
            except (RuntimeError, OSError) as error:
                if lane.who.startswith("aiordma"):
                    raise
                print(f"{lane.who}, {lane.work}: {error}", file=sys.stderr)
                entry["seconds"], entry["failed"] = [], str(error)
                continue
            if turn >= 0:
                entry["seconds"].append(taken)
    return measured


@dataclass(frozen=True)
class Requirement:
    """A row in the table of goals."""

    what: str
    asked: str
    measured: str
    reached: bool | None
    """Whether the goal was reached, or None if one of its contenders was not measured."""


class Contenders(ExitStack):
    """The contenders in a comparison, created on demand and closed together.

    A second request with the same arguments returns the existing contender.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[tuple[Any, ...], Contender] = {}

    def python(
        self,
        way: str,
        loop: str = "uvloop",
        *,
        python: str = sys.executable,
        before: tuple[Words, ...] = ((), ()),
    ) -> Contender:
        return self._get(InPython, way, loop, two_cores(), python, before)

    def c(self, asks: str = "polling", serves: str = "polling", links: str = "") -> Contender:
        return self._get(InC, (asks, serves), two_cores(), links)

    def other(self, kind: Callable[..., Contender], *key: Any) -> Contender:
        return self._get(kind, *key)

    def _get(self, kind: Callable[..., Contender], *key: Any) -> Contender:
        if (kind, *key) not in self._known:
            contender = self._known[kind, *key] = kind(*key)
            self.callback(contender.close)
        return self._known[kind, *key]


@dataclass(frozen=True)
class Comparison:
    """A comparison, presented as a section of the results."""

    title: str
    note: str
    lanes: Callable[[Contenders, Options], Iterable[Lane]]
    requirements: Callable[[Data], Iterator[Requirement]]
    unit: str = "us"
    figure: Callable[[str, float], float] = lambda work, seconds: seconds * 1e6
    """A function that converts the seconds per operation to the displayed figure, in `unit`."""
    ours: str = "aiordma"
    """The contender to which the others are compared."""
    style: str = ""
    """A description of how the measured programs send and receive."""
    caption: str = ""
    """The table caption, which states the quantity and its unit."""
    elsewhere: Callable[[Options], Data] | None = None
    """A function that runs the lanes in a different environment, if they need one."""

    def measure(self, options: Options) -> Data:
        if self.elsewhere:
            return self.elsewhere(options)
        with Contenders() as contenders:
            return take_turns(list(self.lanes(contenders, options)), options)


def size_name(size: int) -> str:
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size // scale} {unit}"
    return f"{size} B"


# ---- what came out ------------------------------------------------------------------------------


def seconds(data: Data, work: str, who: str) -> list[float]:
    """Return the time per operation for each turn, in seconds.

    The list is empty if `who` is not installed, or if the results were recorded before the lane was
    added.
    """
    for entry in data:
        if (entry["work"], entry["who"]) == (work, who):
            return entry["seconds"]
    return []


@dataclass(frozen=True)
class Spread:
    """Values from several turns, displayed as their median, minimum and maximum."""

    values: tuple[float, ...]

    @property
    def typical(self) -> float:
        return median(self.values)

    def ends(self, spec: str) -> str:
        """Format the range from the lowest to the highest value."""
        least, most = min(self.values), max(self.values)
        return f"{least:{spec}}{' to ' if least < 0 else '-'}{most:{spec}}"

    def __format__(self, spec: str) -> str:
        return f"{self.typical:{spec}} ({self.ends(spec)})"


def spread(values: Iterable[float]) -> Spread:
    return Spread(tuple(values))


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Divide one lane's values by another lane's, turn by turn.

    A disturbance usually affects all lanes in a turn, so it hardly changes their ratio. The result
    is empty if either lane has no values.
    """
    if not (over and under):
        return spread(())
    return spread(a / b for a, b in zip(over, under, strict=True))


def _suffix(unit: str) -> str:
    return unit if unit == "x" else f" {unit}"


def at_least(what: str, least: float, found: Spread, unit: str = "x") -> Requirement:
    return judged(
        what, f"at least {least:.3g}{_suffix(unit)}", found, unit, lambda one: one >= least
    )


def at_most(what: str, most: float, found: Spread, unit: str = "x") -> Requirement:
    return judged(what, f"at most {most:g}{_suffix(unit)}", found, unit, lambda one: one <= most)


def judged(
    what: str, asked: str, found: Spread, unit: str, good: Callable[[float], bool]
) -> Requirement:
    if not found.values:
        return Requirement(what, asked, NOT_MEASURED, None)
    measured = f"{found.typical:.2f}{_suffix(unit)} ({found.ends('.2f')})"
    return Requirement(what, asked, measured, good(found.typical))


def by_work(data: Data) -> Iterator[tuple[str, Data]]:
    """Yield each kind of work with its results, in the order of measurement."""
    for work in dict.fromkeys(entry["work"] for entry in data):
        yield work, [entry for entry in data if entry["work"] == work]
