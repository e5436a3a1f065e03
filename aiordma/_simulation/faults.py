"""The faults of a simulation: links that lose or delay datagrams, and plans of faults."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from .._core.arguments import instance, integer, real, refusal, seconds

MAIN = "main"
# Maximum value of a time (in seconds) or a rate (per second) in a Link or FaultPlan.
MAX_TIME_OR_RATE = 1e9


# Maps each kind of fault to the name of its rate in a FaultPlan, and to a description of the
# fault's effect on a host.
KINDS = {
    "partition": ("partitions", "is cut off from all others"),
    "cable": ("cables", "is cut off on network {}"),
    "pause": ("pauses", "is paused"),
    "kill": ("kills", "is killed and boots again at the end"),
}


def _check_range(
    record: Link | Fault | FaultPlan, names: str, highest: float, lowest: float = 0
) -> None:
    """Check that each named field is 0 or a number from `lowest` to `highest`."""
    for name in names.split():
        value = real(name, getattr(record, name))
        if value and not lowest <= value <= highest:
            zero = "0 or " if lowest else ""
            raise ValueError(
                f"{name} must be {zero}between {lowest:g} and {highest:g}, not {value:g}"
            )


@dataclass(frozen=True)
class Link:
    """The network link from one host to another.

    Times are in seconds, and probabilities apply to each datagram. TCP connections only experience
    delays, because TCP repairs lost, duplicate and reordered packets.
    """

    latency: float = 5e-6
    """The time that each datagram takes, in seconds."""
    jitter: float = 5e-6
    """The maximum random time added to the latency, in seconds."""
    rate: float = 12.5e9
    """The bandwidth in bytes per second."""
    loss: float = 0.0
    duplicate: float = 0.0
    """The probability that a datagram arrives twice."""
    reorder: float = 0.0
    """The probability that a datagram is delayed, so that later datagrams overtake it."""
    late: float = 1e-3
    """The maximum delay of a reordered datagram, in seconds."""

    def __post_init__(self) -> None:
        _check_range(self, "latency jitter late", MAX_TIME_OR_RATE)
        _check_range(self, "loss duplicate reorder", 1, 1e-6)
        if self.reorder and not self.late:
            raise ValueError("late must be positive if reorder is positive")
        if not (rate := real("rate", self.rate)) >= 1:
            raise ValueError(f"rate must be at least 1 byte per second, not {rate:g}")


@dataclass(frozen=True)
class Fault:
    """A fault of a `FaultPlan`.

    `kind` is "partition", "cable", "pause" or "kill". `begin` and `end` are seconds since the start
    of the simulation. `network` is the number of the network whose cable fails. `str()` returns the
    line that describes the fault in an error's notes.
    """

    kind: str
    host: str
    begin: float
    end: float
    network: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        instance("host", self.host, str, "the name of a host")
        _check_range(self, "begin end", math.inf)
        if self.end < self.begin:
            raise ValueError(f"end ({self.end:g}) must not be before begin ({self.begin:g})")
        integer("network", self.network)

    def __str__(self) -> str:
        what = KINDS[self.kind][1].format(self.network)
        return f"{self.begin:.2f}-{self.end:.2f} s: {self.host} {what}"


@dataclass(frozen=True)
class FaultPlan:
    """A plan for random faults, which are determined by the seed.

    `partitions`, `cables`, `pauses` and `kills` are the average numbers of faults per simulated
    second. Each fault affects one host and lasts up to `duration` seconds. No fault begins after
    `until` seconds. If a program has requested a partition, pause or kill itself, the end of a
    fault does not undo it.
    """

    link: Link = Link()
    """The link between every two hosts when the simulation begins."""
    partitions: float = 0.0
    """The rate of partitions. A partition cuts a host off from all others."""
    cables: float = 0.0
    """The rate of cable faults. A cable fault cuts a host off on one of its networks."""
    pauses: float = 0.0
    """The rate of pauses. A paused host does nothing."""
    kills: float = 0.0
    """The rate of kills. A killed host boots again at the end of the fault."""
    duration: float = 1.0
    until: float = math.inf
    hosts: Collection[str] = ()
    """The names of the hosts that have faults. By default, all hosts except "main" have faults.

    `simulate` raises ValueError if one of these hosts never boots.
    """
    at_least: int = 0
    """The minimum number of faults. If fewer faults begin, `simulate` raises AssertionError."""
    exactly: Collection[Fault] | None = None
    """The faults to replay instead of random ones, such as `World.faults` of another run."""

    def __post_init__(self) -> None:
        instance("link", self.link, Link, "a Link")
        _check_range(self, "partitions cables pauses kills duration", MAX_TIME_OR_RATE)
        if not seconds("until", self.until, allow_infinity=True) and self._rates:
            raise ValueError(f"until must be a positive number of seconds, not {self.until!r}")
        if not self.duration and (self.partitions or self.cables or self.pauses):
            raise ValueError(
                f"duration must be a positive number of seconds, not {self.duration!r}"
            )
        is_collection = isinstance(self.hosts, Collection) and not isinstance(self.hosts, str)
        if not is_collection or not all(
            isinstance(name, str) and name != MAIN for name in self.hosts
        ):
            raise ValueError(
                f"invalid hosts {self.hosts!r}: expected a collection of names without {MAIN!r}"
            )
        integer("at_least", self.at_least)
        if not isinstance(self.exactly, Collection | None):
            raise TypeError(refusal("exactly", "a list of Faults", self.exactly))
        for fault in self.exactly or ():
            instance("each element of exactly", fault, Fault, "a Fault")
        if self.at_least and self.exactly is None and not self._rates:
            raise ValueError(
                f"at_least is {self.at_least}, but the plan has no faults: set a rate, "
                "such as kills=1, or list the faults in exactly="
            )
        if MAIN in self._names:
            raise ValueError(f"exactly must not contain faults on host {MAIN!r}")

    @property
    def _names(self) -> set[str]:
        return {*self.hosts, *(fault.host for fault in self.exactly or ())}

    @property
    def _rates(self) -> list[float]:
        """The rate of each kind of fault, or an empty list if all rates are 0."""
        rates = [getattr(self, rate) for rate, _ in KINDS.values()]
        return rates if any(rates) else []

    def _describe_counts(self, faults: Iterable[Fault], now: float) -> str:
        """Describe the actual and the expected number of faults of each kind."""
        begun = Counter(fault.kind for fault in faults)
        if self.exactly is not None:
            return f"{begun.total()} of {len(self.exactly)} faults replayed"
        return ", ".join(
            f"{begun[kind]} {kind if begun[kind] == 1 else rate} "
            f"(plan: {getattr(self, rate) * min(now, self.until):.1f} on average)"
            for kind, (rate, _) in KINDS.items()
            if getattr(self, rate)
        )


ScheduledFault = tuple[float, Callable[[list[str]], Fault | None]]


def fault_schedule(plan: FaultPlan, seed: int, networks: int) -> Iterator[ScheduledFault]:
    """Yield the start time of each fault, and a function that returns the fault.

    The function takes the names of the live hosts. It returns None if none of them can be affected.
    Faults have a separate random source, so that replaying them with `exactly` reproduces the run.
    """
    for fault in sorted(plan.exactly or (), key=lambda fault: fault.begin):
        yield fault.begin, lambda alive, it=fault: it if it.host in alive else None  # type: ignore[misc]
    source, begin = random.Random(f"faults {seed}"), 0.0

    def draw_fault(alive: list[str]) -> Fault | None:
        """Draw a random fault on one of the live hosts that the plan may affect.

        `begin` and `rates` are the variables of the loop below.
        """
        victims = [name for name in alive if name in (plan.hosts or alive)]
        if not victims:
            return None
        [kind] = source.choices([*KINDS], rates)
        end = begin + source.uniform(0, plan.duration)
        network = source.randrange(networks) if kind == "cable" else 0
        return Fault(kind, source.choice(victims), begin, end, network)

    while plan.exactly is None and (rates := plan._rates):
        begin += source.expovariate(sum(rates))
        if begin > plan.until:
            return
        yield begin, draw_fault
