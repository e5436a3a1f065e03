"""What goes wrong in a simulation: the ways of datagrams, and plans of faults."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from .._core.arguments import instance, real, seconds

MAIN = "main"
# Of what a Link and a FaultPlan say: seconds, and times per second.
MOST = 1e9


def _check(record: Link | FaultPlan, names: str, most: float, least: float = 0) -> None:
    """Each of these fields is 0, or a number from `least` to `most`."""
    for name in names.split():
        value = real(name, getattr(record, name))
        if value and not least <= value <= most:
            zero = "0, or from " if least else "from "
            raise ValueError(f"{name} is a number {zero}{least:g} to {most:g}, not {value:g}")


@dataclass(frozen=True)
class Link:
    """The way of datagrams from one host to another: seconds, and probabilities of each datagram.

    What travels by TCP is delayed alone, since TCP sees to the rest.
    """

    latency: float = 5e-6
    """The time under way."""
    jitter: float = 5e-6
    """Up to so much more."""
    rate: float = 12.5e9
    """Bytes per second."""
    loss: float = 0.0
    duplicate: float = 0.0
    """It comes twice."""
    reorder: float = 0.0
    """It is late, and others overtake it."""
    late: float = 1e-3
    """By so much at most."""

    def __post_init__(self) -> None:
        _check(self, "latency jitter late", MOST)
        _check(self, "loss duplicate reorder", 1, 1e-6)
        if self.reorder and not self.late:
            raise ValueError("late is a number above 0 where there is reorder, or nothing is late")
        if not (rate := real("rate", self.rate)) >= 1:
            raise ValueError(f"rate is a number of bytes per second, 1 or more, not {rate:g}")


@dataclass(frozen=True)
class FaultPlan:
    """Faults that come by themselves, as the seed draws them.

    `partitions`, `cables`, `pauses` and `kills` are how many begin in a second of the simulation,
    on average; each is of one of the `hosts`, and lasts up to `duration` seconds.  None begins
    after `until` seconds, and none ends what a program has cut off, paused or killed.
    """

    link: Link = Link()
    """Of every two hosts, from the beginning on."""
    partitions: float = 0.0
    """The host is cut off from all others."""
    cables: float = 0.0
    """The host is cut off on one of its networks."""
    pauses: float = 0.0
    """The host stands still."""
    kills: float = 0.0
    """The host is killed, and boots again."""
    duration: float = 1.0
    until: float = math.inf
    hosts: Collection[str] = ()
    """Those that have faults: as () all but "main", a client's too.

    A name that never boots is an error.
    """

    def __post_init__(self) -> None:
        instance("link", self.link, Link, "a Link")
        _check(self, "partitions cables pauses kills duration", MOST)
        if not seconds("until", self.until, endless=True) and self._rates:
            raise ValueError("until is a number of seconds above 0, or no fault ever begins")
        if not self.duration and (self.partitions or self.cables or self.pauses):
            raise ValueError("duration is a number of seconds above 0, or nothing is broken")
        several = isinstance(self.hosts, Collection) and not isinstance(self.hosts, str)
        if not several or not all(isinstance(name, str) and name != MAIN for name in self.hosts):
            raise ValueError(f"hosts are names of hosts other than {MAIN!r}, not {self.hosts!r}")

    @property
    def _rates(self) -> list[float]:
        """Of partitions, cables, pauses and kills; empty: there are none."""
        rates = [self.partitions, self.cables, self.pauses, self.kills]
        return rates if any(rates) else []
