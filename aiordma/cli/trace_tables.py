"""Traces as tables: a summary for each queue pair, and a timeline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aiordma import trace
from aiordma.trace import Outcome, Request

from .trace_selection import Incident, Selection, Traced

if TYPE_CHECKING:
    from collections.abc import Sequence

RETRIES = {"RNR": "receiver not ready", "LOSS": "something got lost"}

REFUSALS = {
    "KEY": "no such rkey, or it was withdrawn",
    "DOMAIN": "the rkey is of another protection domain than the queue pair",
    "RIGHT": "what the rkey opens lacks that right",
    "RANGE": "beyond what the rkey opens",
    "PAGES": "the memory's pages are not there",
    "WINDOW_UNBOUND": "the window is not bound",
    "WINDOW_QP": "the window is for another queue pair",
    "REGION": "the rkey is a region's, not a window's",
    "QUEUE_PAIR": "the queue pair lacks that right (qp_access_flags)",
}

CAPTION = (
    "Times from post to completion, in microseconds, of what has succeeded. Implicit: not signaled,"
    " known to have succeeded by a later completion, and not among the times."
)


def quantile(ordered: Sequence[int], part: float) -> int:
    """The nearest-rank quantile: the smallest value with ``part`` of all at or below it."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Line:
    """Statistics of one operation on one queue pair of one process."""

    pid: int
    qp_num: int | None
    operation: str
    count: int
    bytes: int
    times: list[int]  # nanoseconds, ascending
    outcomes: dict[str, int]  # the count of each, without successes

    @classmethod
    def of(cls, pid: int, qp_num: int | None, operation: str, requests: list[Request]) -> Line:
        succeeded = [request for request in requests if not request.failed]
        outcomes = Counter(
            request.status if request.failed else request.outcome.value
            for request in requests
            if request.failed or request.outcome is not Outcome.COMPLETED
        )
        return cls(
            pid,
            qp_num,
            operation,
            len(requests),
            sum(request.bytes for request in succeeded),
            sorted(request.took for request in succeeded if request.took is not None),
            dict(outcomes),
        )


def summary(traces: Iterable[Traced], selection: Selection) -> list[Line]:
    """A row for each queue pair and operation, in the order in which they first appear."""
    found = []
    for traced in traces:
        groups: dict[tuple[int | None, str], list[Request]] = {}
        for request in traced.requests:
            if selection.request(traced, request):
                groups.setdefault((request.qp_num, request.operation), []).append(request)
        order = list(dict.fromkeys(qp_num for qp_num, _ in groups))
        found += [
            Line.of(traced.run.header.pid, qp_num, operation, requests)
            for (qp_num, operation), requests in sorted(
                groups.items(), key=lambda group: order.index(group[0][0])
            )
        ]
    return found


def show_runs(console: Console, traces: Iterable[Traced]) -> None:
    """Print the processes and how each trace ended."""
    for traced in traces:
        header = traced.run.header
        began = datetime.fromtimestamp(header.realtime_ns / 1e9).astimezone()
        console.print(
            f"[bold]process {header.pid}[/] on {escape(header.host)}, {escape(header.device)}: "
            f"{escape(header.command)}\n"
            f"  {escape(str(traced.path))}, from {began:%Y-%m-%d %H:%M:%S.%f}: "
            f"{len(traced.run.records) + 1:,} lines, {ending(traced)}",
            highlight=False,
            soft_wrap=True,
        )


def ending(traced: Traced) -> str:
    end = traced.run.end
    if end is not None:
        return f"[red]ended early: {escape(end.error)}[/]" if end.error else "complete"
    if traced.run.torn:
        return "[yellow]the last line is torn: the process was killed[/]"
    return "[yellow]without an end: the process was killed, or is still at work[/]"


def show_summary(console: Console, lines: list[Line]) -> None:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=CAPTION, caption_justify="left")
    for name in ("process", "queue pair"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("operation", no_wrap=True)
    for name in ("requests", "bytes", "median", "p99", "longest"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("of them", overflow="fold")
    for line in lines:
        table.add_row(
            str(line.pid),
            "-" if line.qp_num is None else str(line.qp_num),
            line.operation,
            f"{line.count:,}",
            f"{line.bytes:,}",
            *(
                microseconds(quantile(line.times, part)) if line.times else "-"
                for part in (0.5, 0.99, 1)
            ),
            ", ".join(
                f"[{colour_of(name)}]{count:,} {escape(name)}[/]"
                for name, count in line.outcomes.items()
            ),
        )
    console.print(table)


def colour_of(outcome: str) -> str:
    """The colour of a status, or of an outcome without one."""
    colours = {"SUCCESS": "green", "implicit": "green", "WR_FLUSH_ERR": "red"}
    return colours.get(outcome, "yellow" if outcome.islower() else "bold red")


def microseconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e3:,.1f}"


# ---- the timeline -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A request or an incident with its time on the common axis."""

    at: int
    traced: Traced
    what: Request | Incident


def timeline(traces: Iterable[Traced], selection: Selection) -> list[Row]:
    """Requests and incidents in the order of their times; a request counts when it was posted."""

    def rows() -> Iterator[Row]:
        for traced in traces:
            for request in traced.requests:
                if selection.request(traced, request):
                    yield Row(traced.at(request.began), traced, request)
            for incident in traced.incidents:
                if selection.incident(traced, incident):
                    yield Row(traced.at(incident.t), traced, incident)

    return sorted(rows(), key=lambda row: row.at)


def show_timeline(console: Console, rows: list[Row], limit: int) -> None:
    """Print the first ``limit`` rows; 0: all."""
    shown = rows[:limit] if limit else rows
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("ms", "process", "queue pair"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what", overflow="fold")
    for name in ("wr_id", "bytes", "took us"):
        table.add_column(name, justify="right")
    table.add_column("outcome", overflow="fold")
    for row in shown:
        table.add_row(
            f"{row.at / 1e6:,.3f}",
            str(row.traced.run.header.pid),
            "-" if row.what.qp_num is None else str(row.what.qp_num),
            *(
                request_cells(row.what)
                if isinstance(row.what, Request)
                else (f"[cyan]{escape(incident_text(row.what))}[/]", "", "", "", "")
            ),
        )
    console.print(table)
    if len(shown) < len(rows):
        console.print(
            f"{len(rows) - len(shown):,} more: --limit 0 shows all, --from and --to a part",
            highlight=False,
        )


def request_cells(request: Request) -> tuple[str, ...]:
    took = "" if request.took is None else microseconds(request.took)
    if request.outcome is Outcome.IMPLICIT and request.posted and request.ended:
        took = f"<{microseconds(request.ended - request.posted.t)}"
    return (
        request.operation,
        wr_id_text(request.wr_id),
        f"{request.bytes:,}",
        took,
        outcome_text(request),
    )


def wr_id_text(wr_id: int) -> str:
    """A wr_id as text, in hexadecimal if it looks like a pointer."""
    return str(wr_id) if wr_id < 1 << 32 else f"{wr_id:#x}"


def outcome_text(request: Request) -> str:
    lost = request.outcome is Outcome.LOST
    text = request.status if request.completion else request.outcome.value
    return f"[{colour_of(text)}]{escape(text)}[/]" + (" [bold red](lost)[/]" if lost else "")


def incident_text(incident: Incident) -> str:
    """A short description of an incident."""
    match incident:
        case trace.CreatedQP():
            shared = "" if incident.srq is None else f", shared receive queue {incident.srq}"
            return f"created ({incident.qp_type}{shared})"
        case trace.DestroyedQP():
            return "destroyed"
        case trace.QPStateChange():
            peer = "" if incident.dest_qp_num is None else f" with {incident.dest_qp_num}"
            return f"{incident.cur_qp_state} -> {incident.qp_state}{peer}"
        case trace.AsyncEvent():
            about = "" if incident.cq is None else f" of CQ {incident.cq}"
            about = about if incident.srq is None else f" of SRQ {incident.srq}"
            return f"event {incident.event_type}{about}"
        case trace.Retry():
            return f"retry: {RETRIES.get(incident.cause, incident.cause)}"
        case trace.AccessRefused():
            reason = REFUSALS.get(incident.reason, incident.reason)
            wanted = "the end of a window"
            if incident.remote_addr is not None:
                rights = " and ".join(incident.access)
                wanted = f"{rights} of {incident.length:,} bytes at {incident.remote_addr:#x}"
            return f"access refused: {reason}: {wanted}, rkey {incident.rkey:#x}"
        case trace.Fault():
            about = "" if incident.cq is None else f" of CQ {incident.cq}"
            return f"fault {incident.fault}{about}"
        case trace.Refused():
            return f"refused {incident.opcode or 'RECV'} {incident.wr_id}: {incident.error}"
