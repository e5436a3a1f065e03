"""A plain-text listing of the runs in several traces, on a common time axis."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path

import click

from aiordma import trace
from aiordma.trace import Outcome, Record, Request, Run

from .tables import plain

# Types of records that are listed between the requests.
Incident = (
    trace.CreatedQP
    | trace.DestroyedQP
    | trace.QPStateChange
    | trace.AsyncEvent
    | trace.Refused
    | trace.CallRefused
    | trace.Retry
    | trace.RegisteredMR
    | trace.KeyEnded
    | trace.AccessRefused
    | trace.RequestRefused
    | trace.Dropped
    | trace.Fault
)

KEYS = {"addr", "remote_addr", "key", "lkey", "rkey", "invalidate_rkey", "invalidated_rkey"}


@dataclass(slots=True)
class Traced:
    """A traced run, with the requests and incidents to show."""

    path: Path
    run: Run
    offset: int
    """The number to add to a timestamp to convert it to the common time axis, which starts at 0."""
    requests: list[Request]
    incidents: list[Incident]

    def at(self, t: int) -> int:
        """Convert a timestamp from this run to nanoseconds on the common time axis."""
        return t + self.offset

    @property
    def last(self) -> int:
        return self.run.records[-1].t if self.run.records else self.run.header.t


def load(
    paths: Iterable[Path], qps: Collection[int] = (), statuses: Collection[str] = ()
) -> list[Traced]:
    """Load all runs from the given trace files.

    The common time axis starts with the earliest run.

    Args:
        paths: The paths of the trace files.
        qps: The numbers of the queue pairs to show. If empty, show all queue pairs.
        statuses: The request statuses to show. If empty, show all requests and incidents.
            Otherwise, omit incidents, which do not have a status.

    Raises:
        click.BadParameter: If one of the queue pairs is not found in any file.
    """
    runs = [(path, run) for path in paths for run in trace.read(path)]
    offsets = trace.offsets([run for _, run in runs])
    zero = min(run.header.t + offset for (_, run), offset in zip(runs, offsets, strict=True))
    found = []
    for (path, run), offset in zip(runs, offsets, strict=True):
        incidents = [it for it in run.records if isinstance(it, Incident)]
        found.append(Traced(path, run, offset - zero, trace.requests(run), incidents))
    shown = [qp_num(it) for traced in found for it in (*traced.requests, *traced.incidents)]
    known = {number for number in shown if number is not None}
    if missing := sorted(set(qps) - known):
        there = ", ".join(map(str, sorted(known))) or "none"
        text = f"queue pair {missing[0]} not found in the traces (found: {there})"
        raise click.BadParameter(text, param_hint="--qp")

    def is_shown(it: Request | Incident) -> bool:
        if qps and qp_num(it) not in qps:
            return False
        if not statuses:
            return True
        return isinstance(it, Request) and (
            it.status in statuses or ("FAILED" in statuses and it.failed)
        )

    for traced in found:
        traced.requests = list(filter(is_shown, traced.requests))
        traced.incidents = list(filter(is_shown, traced.incidents))
    return found


def listing(traces: Iterable[Traced]) -> Iterator[str]:
    """Yield the lines of the listing.

    The first lines describe each process's trace and how the trace ended. The next lines contain
    all requests and incidents in chronological order. A request is listed at the time it was
    posted.
    """
    rows: list[tuple[int, str]] = []
    for traced in traces:
        header = traced.run.header
        began = datetime.fromtimestamp(header.realtime_ns / 1e9).astimezone()
        where = plain(f"{header.host}, {header.device}: {header.command}")
        yield f"process {header.pid} on {where}"
        yield (
            f"  {traced.path}, from {began:%Y-%m-%d %H:%M:%S.%f}: "
            f"{len(traced.run.records) + 1} lines, {ending(traced.run)}"
        )
        for t, it, text in [
            *((request.began, request, request_text(request)) for request in traced.requests),
            *((incident.t, incident, incident_text(incident)) for incident in traced.incidents),
        ]:
            at, number = traced.at(t), "-" if qp_num(it) is None else qp_num(it)
            rows.append((at, f"{at / 1e6:12.4f} {header.pid:>8} {number:>10}  {text}"))
    yield f"{'ms':>12} {'process':>8} {'queue pair':>10}"
    yield from (text for _, text in sorted(rows, key=lambda row: row[0]))


def qp_num(it: Request | Incident) -> int | None:
    """Return the queue pair number, or None for a memory region event."""
    return None if isinstance(it, trace.RegisteredMR | trace.KeyEnded) else it.qp_num


def ending(run: Run) -> str:
    """Describe whether the trace is complete, and if not, why."""
    if run.end is not None:
        return f"ended early: {plain(run.end.error)}" if run.end.error else "complete"
    if run.torn:
        return "the last line is truncated: the process was killed"
    return "incomplete: the process was killed or is still running"


def request_text(request: Request) -> str:
    text = f"{request.operation} wr_id={wr_id_text(request.wr_id)} bytes={request.bytes}"
    if request.took is not None:
        text += f" took={request.took / 1e3:.1f}us"
    elif request.outcome is Outcome.IMPLICIT and request.ended is not None:
        # The request has no completion. A later completion limits its duration.
        text += f" took<{(request.ended - request.began) / 1e3:.1f}us"
    done = request.completion
    text += f" {request.status if done else request.outcome.value}"
    text += " (lost)" if request.outcome is Outcome.LOST else ""
    if done and done.reason and done.lkey is not None:
        text += f" reason={plain(done.reason)} lkey={done.lkey:#x}"
    return text + meaning((done.reason or done.status) if done else None)


def meaning(reason: str | None) -> str:
    """Return a colon followed by a description of a reason code.

    Returns an empty string if the code is unknown or None.
    """
    return f": {trace.REASONS[reason]}" if reason in trace.REASONS else ""


def incident_text(incident: Incident) -> str:
    """Format an incident as its type, its fields, and a description of its reason code."""
    values = (
        f"{name}={'+'.join(value) if isinstance(value, tuple) else value}"
        for name, value in arguments(incident).items()
    )
    reason = getattr(incident, "cause", None) or getattr(incident, "reason", None)
    return plain(" ".join([incident.TYPE, *values])) + meaning(reason)


def wr_id_text(wr_id: int) -> str:
    """Format a wr_id, using hexadecimal if it looks like a pointer."""
    return str(wr_id) if wr_id < 1 << 32 else f"{wr_id:#x}"


def arguments(record: Record) -> dict[str, object]:
    """Return a record's fields for display, keyed by field name.

    Fields that are None, False or an empty tuple are omitted. Work request IDs, keys and addresses
    are converted to text, because viewers do not support 64-bit numbers.
    """
    values = {
        each.name: getattr(record, each.name)
        for each in fields(record)
        if each.name not in ("t", "request", "qp_num")
    }
    return {
        name: wr_id_text(value) if name == "wr_id" else hex(value) if name in KEYS else value
        for name, value in values.items()
        if value is not None and value is not False and value != ()
    }
