"""What is measured beside what, in turns; and the ratios of what came out."""

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
    """How much is measured: `turns` of every lane, each with its count times `share`; messages of
    `most` bytes and less."""

    turns: int = TURNS
    share: float = 1.0
    most: int = 64 << 20

    def count(self, count: int, unit: int = 1) -> int:
        """A multiple of `unit`."""
        return max(1, round(count * self.share / unit)) * unit


class Measured(TypedDict):
    """One lane, as it is kept in results.json."""

    work: str
    who: str
    seconds: list[float]
    """For one operation, turn by turn; none if `who` could not do it."""
    failed: NotRequired[str]


Data = list[Measured]
"""What a comparison has measured."""


@dataclass(frozen=True)
class Lane:
    """`who` does `work`: one operation of it takes what `do` returns, in seconds."""

    work: str
    who: str
    do: Callable[[], float]
    afresh: bool = False
    """Each is a process of its own, so that there is nothing to warm up."""

    @classmethod
    def of(cls, contender: Contender, work: str, who: str, kind: str, **numbers: Any) -> Self:
        return cls(work, who, lambda: contender.do(kind, **numbers), contender.afresh)

    @classmethod
    def missing(cls, work: str, who: str) -> Self:
        """Its contender is not installed: it is in the results, without figures."""

        def do() -> float:
            raise RuntimeError(NOT_INSTALLED)

        return cls(work, who, do)


def take_turns(lanes: Sequence[Lane], options: Options) -> Data:
    """Each lane once to warm up, then all of them in every turn.  One of others that fails is in
    the results, without figures."""
    measured: Data = [{"work": lane.work, "who": lane.who, "seconds": []} for lane in lanes]
    for turn in range(-1, options.turns):
        for lane, entry in zip(lanes, measured, strict=True):
            if "failed" in entry or (turn < 0 and lane.afresh):
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
    """A line of the table of what is to be reached."""

    what: str
    asked: str
    measured: str
    reached: bool | None
    """None: one of what it compares was not measured."""


class Contenders(ExitStack):
    """The contenders of one comparison, by their arguments; closed together."""

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
    """One part of the results."""

    title: str
    note: str
    lanes: Callable[[Contenders, Options], Iterable[Lane]]
    requirements: Callable[[Data], Iterator[Requirement]]
    unit: str = "us"
    figure: Callable[[str, float], float] = lambda work, seconds: seconds * 1e6
    """What is shown, in `unit`, for work of which one operation took so many seconds."""
    ours: str = "aiordma"
    """The contender that the others are compared with."""
    style: str = ""
    """How the programs of these figures send and receive."""
    elsewhere: Callable[[Options], Data] | None = None
    """Measures them in another machine."""

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
    """Seconds for an operation, turn by turn; empty where `who` is not installed, or where the data
    are older than the lane."""
    for entry in data:
        if (entry["work"], entry["who"]) == (work, who):
            return entry["seconds"]
    return []


@dataclass(frozen=True)
class Spread:
    """The values of several turns; shown as their median, and the least and greatest."""

    values: tuple[float, ...]

    @property
    def typical(self) -> float:
        return median(self.values)

    def __format__(self, spec: str) -> str:
        least, most = min(self.values), max(self.values)
        return f"{self.typical:{spec}} ({least:{spec}}-{most:{spec}})"


def spread(values: Iterable[float]) -> Spread:
    return Spread(tuple(values))


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Turn by turn, since what disturbs one turn disturbs both; none where one has none."""
    if not (over and under):
        return spread(())
    return spread(a / b for a, b in zip(over, under, strict=True))


def at_least(what: str, least: float, found: Spread, unit: str = "x") -> Requirement:
    return judged(what, f"at least {least:.3g} {unit}", found, unit, lambda one: one >= least)


def at_most(what: str, most: float, found: Spread, unit: str = "x") -> Requirement:
    return judged(what, f"at most {most:g} {unit}", found, unit, lambda one: one <= most)


def judged(
    what: str, asked: str, found: Spread, unit: str, good: Callable[[float], bool]
) -> Requirement:
    if not found.values:
        return Requirement(what, asked, NOT_MEASURED, None)
    return Requirement(what, asked, f"{found:.2f} {unit}".rstrip(), good(found.typical))


def by_work(data: Data) -> Iterator[tuple[str, Data]]:
    """What belongs together, in the order of measuring."""
    for work in dict.fromkeys(entry["work"] for entry in data):
        yield work, [entry for entry in data if entry["work"] == work]
