"""The runs of several traces on one time axis, and the selection of requests to show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click

from aiordma import trace
from aiordma.trace import Request, Run

UNITS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "": 10**6, "s": 10**9}
TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([nuµm]?s|)")

# Records about queue pairs that are shown between the requests.
Incident = (
    trace.CreatedQP
    | trace.DestroyedQP
    | trace.QPStateChange
    | trace.AsyncEvent
    | trace.Refused
    | trace.Retry
    | trace.AccessRefused
    | trace.Fault
)


class TimeType(click.ParamType[int]):
    """A time such as 1.5ms, 200us or 2s, in ms without a unit; converted to nanoseconds."""

    name = "time"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        match = TIME.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a time; as in 1.5ms, 200us or 2s", param, ctx)
        return round(float(match[1]) * UNITS[match[2]])


@dataclass(slots=True)
class Traced:
    """A run and the outcomes of its requests."""

    path: Path
    run: Run
    offset: int
    """The offset of its times on the common axis, which begins with 0."""
    requests: list[Request]

    def at(self, t: int) -> int:
        """A time of the run on the common axis, in nanoseconds."""
        return t + self.offset

    @property
    def incidents(self) -> Iterator[Incident]:
        return (record for record in self.run.records if isinstance(record, Incident))


def load(paths: list[Path]) -> list[Traced]:
    """All runs of some files; the axis begins with the earliest of them."""
    found = [(path, run) for path in paths for run in trace.read(path)]
    offsets = trace.offsets([run for _, run in found])
    zero = min(run.header.t + offset for (_, run), offset in zip(found, offsets, strict=True))
    return [
        Traced(path, run, offset - zero, trace.requests(run))
        for (path, run), offset in zip(found, offsets, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of requests and incidents; an empty or None field excludes nothing."""

    qps: frozenset[int] = field(default=frozenset())
    statuses: frozenset[str] = field(default=frozenset())
    start: int | None = None
    stop: int | None = None

    def request(self, traced: Traced, request: Request) -> bool:
        """Whether a request is selected: it was outstanding at any time of the interval."""
        if self.qps and request.qp_num not in self.qps:
            return False
        if self.statuses and not self._has_status(request):
            return False
        ended = None if request.ended is None else traced.at(request.ended)
        return self._overlaps(traced.at(request.began), ended)

    def incident(self, traced: Traced, incident: Incident) -> bool:
        """Whether an incident is selected: never when requests are selected by status."""
        if self.statuses or (self.qps and incident.qp_num not in self.qps):
            return False
        at = traced.at(incident.t)
        return self._overlaps(at, at)

    def _has_status(self, request: Request) -> bool:
        return request.status in self.statuses or ("FAILED" in self.statuses and request.failed)

    def _overlaps(self, began: int, ended: int | None) -> bool:
        return (self.stop is None or began <= self.stop) and (
            self.start is None or ended is None or ended >= self.start
        )
