"""Traces in the Chrome trace event format, for Perfetto and chrome://tracing.

In the viewer, each traced process appears as a process, and each queue pair as a thread. A work
request is a "complete" event, which lasts from posting to completion. Other queue pair events are
"instant" events. A flow connects each message to the receive that the message completed.

In viewers, complete events on the same thread must not partially overlap. However, a queue pair can
have several requests in flight. Overlapping requests are therefore placed on additional threads,
which have the same name followed by a number. Receives have separate threads.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Self

from aiordma import trace
from aiordma.trace import Outcome, Request

from .trace_listing import Incident, Traced, arguments, incident_text, qp_num, wr_id_text

Event = dict[str, Any]

# Operations that consume a receive on the peer's side.
MESSAGES = {"SEND", "SEND_WITH_IMM", "SEND_WITH_INV", "RDMA_WRITE_WITH_IMM"}


def chrome_trace(traces: list[Traced]) -> str:
    """Return the traces in the Chrome trace event format, with one event per line."""
    # Put the events that name processes and threads first. They have no timestamps. The sort must
    # be stable, because a flow binds to the event generated before it, which may have the same
    # timestamp.
    ordered = sorted(events(traces), key=lambda event: event.get("ts", -1.0))
    lines = ",\n".join(json.dumps(event) for event in ordered)
    return f'{{"displayTimeUnit": "ns", "traceEvents": [\n{lines}\n]}}\n'


# ---- processes and threads ----------------------------------------------------------------------


class Span(NamedTuple):
    """A request with its start and end times on the common time axis.

    The start or end of the trace is used if the request's start or end was not recorded.
    """

    began: int
    ended: int
    request: Request

    @classmethod
    def of(cls, traced: Traced, request: Request) -> Self:
        began = traced.run.header.t if request.posted is None else request.posted.t
        ended = traced.last if request.ended is None else request.ended
        return cls(traced.at(began), traced.at(ended), request)


class Process:
    """A process in the viewer, built from one or more traces."""

    def __init__(self, traces: list[Traced]) -> None:
        header = traces[0].run.header
        self.name: str = f"{header.command} ({header.host}, process {header.pid})"
        self.spans: dict[str, list[Span]] = {}
        """Requests by queue pair name or shared receive queue name."""
        self.instants: dict[str, list[Event]] = {}
        """Instant events by queue pair name. The name is "" for events without a queue pair."""
        self._qp_types: dict[int, str] = {}
        for traced in traces:
            self._add(traced)

    def _add(self, traced: Traced) -> None:
        for record in traced.run.records:
            if isinstance(record, trace.CreatedQP):
                self._qp_types[record.qp_num] = record.qp_type
        for request in traced.requests:
            if request.qp_num is None:  # not yet consumed by a queue pair
                name = f"SRQ {getattr(request.posted, 'srq', '')}"
            else:
                name = self._add_queue_pair(request.qp_num)
            receives = " receives" if request.is_receive else ""
            self.spans.setdefault(name + receives, []).append(Span.of(traced, request))
        for incident in traced.incidents:
            number = qp_num(incident)
            name = "" if number is None else self._add_queue_pair(number)
            self.instants.setdefault(name, []).append(instant(traced, incident))

    def _add_queue_pair(self, number: int) -> str:
        """Give a queue pair a row in the viewer, unless it has one, and return the row's name."""
        name = f"QP {number:#08x} {self._qp_types.get(number, '')}".rstrip()
        self.spans.setdefault(name, [])  # must precede the queue pair's receives
        return name


def processes_of(traces: Iterable[Traced]) -> list[Process]:
    """Group the traces by process, leaving out processes that have nothing to show."""
    found: dict[tuple[str, str, int], list[Traced]] = {}
    for traced in traces:
        header = traced.run.header
        found.setdefault((header.boot_id, header.host, header.pid), []).append(traced)
    processes = map(Process, found.values())
    return [process for process in processes if process.spans or process.instants]


def disjoint(spans: Iterable[Span]) -> list[list[Span]]:
    """Arrange spans in rows without overlaps, placing each span in the first free row."""
    rows: list[list[Span]] = [[]]
    free = [0]  # heap of row numbers
    busy: list[tuple[int, int]] = []  # heap of (end time, row number)
    for span in sorted(spans, key=lambda span: span.began):
        # Use `<`, not `<=`, because viewers round floating-point times by up to a nanosecond.
        while busy and busy[0][0] < span.began:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, len(rows))
            rows.append([])
        row = heapq.heappop(free)
        rows[row].append(span)
        heapq.heappush(busy, (span.ended, row))
    return rows


# ---- messages and their receives ----------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Connection:
    """A reliable connection, as recorded at one end.

    ``messages`` contains the messages that this end sent, and ``arrivals`` the receives that this
    end completed.
    """

    began: int
    ended: int
    messages: list[trace.PostedSend] = field(default_factory=list)
    arrivals: list[trace.Completion] = field(default_factory=list)


Ends = tuple[int, int]  # queue pair numbers of this end and the peer


def connections_of(traced: Traced) -> Iterator[tuple[Ends, Connection]]:
    """Yield the connections established during the trace.

    Earlier connections are skipped, because the trace may lack some of their messages.
    """
    reliable: set[int] = set()
    current: dict[int, Connection] = {}
    for record in traced.run.records:
        match record:
            case trace.CreatedQP(qp_type="RC"):
                reliable.add(record.qp_num)
            case trace.QPStateChange(qp_state="RTR", dest_qp_num=int(peer)):
                if record.qp_num in reliable:
                    connection = Connection(traced.at(record.t), traced.at(traced.last))
                    current[record.qp_num] = connection
                    yield (record.qp_num, peer), connection
            case trace.QPStateChange(qp_state="RESET") | trace.DestroyedQP():
                if record.qp_num in current:
                    current.pop(record.qp_num).ended = traced.at(record.t)
            case trace.PostedSend() if record.opcode in MESSAGES:
                if record.qp_num in current:
                    current[record.qp_num].messages.append(record)
            case trace.Completion(status="SUCCESS") if record.opcode.startswith("RECV"):
                if record.qp_num in current:
                    current[record.qp_num].arrivals.append(record)


def match_messages(traces: Iterable[Traced]) -> dict[int, int]:
    """Match sends with receives, and return a number for each matched message.

    The result maps the `id()` of each record to the message's number, which is the same for the
    send record and the receive record. A message is omitted unless both records are shown.

    A reliable connection delivers each message once and in order. The first message therefore
    matches the first completed receive, and so on.

    Queue pair numbers can be reused, and different machines can use the same number. If it is
    unclear which two ends form a connection, their messages are omitted.
    """
    found: dict[Ends, list[Connection]] = {}
    shown: set[int] = set()
    for traced in traces:
        shown.update(id(it.posted) for it in traced.requests)
        shown.update(id(it.completion) for it in traced.requests)
        for ends, connection in connections_of(traced):
            found.setdefault(ends, []).append(connection)

    def peers(ends: Ends, of: Connection) -> list[Connection]:
        others = found.get((ends[1], ends[0]), [])
        return [it for it in others if it.began <= of.ended and of.began <= it.ended]

    numbers: dict[int, int] = {}
    flow = count(1)
    for ends, connections in found.items():
        for connection in connections:
            match peers(ends, connection):
                case [peer] if peers((ends[1], ends[0]), peer) == [connection]:
                    for message, arrival in zip(connection.messages, peer.arrivals, strict=False):
                        if {id(message), id(arrival)} <= shown:
                            numbers[id(message)] = numbers[id(arrival)] = next(flow)
    return numbers


# ---- events -------------------------------------------------------------------------------------


def events(traces: list[Traced]) -> Iterator[Event]:
    """Yield the events of every process, thread by thread.

    Processes and threads are renumbered from 1, and their names contain the original numbers.
    Renumbering is necessary because different machines can use the same numbers. In addition,
    viewers treat a thread as the main thread if it has the same number as its process.
    """
    flows = match_messages(traces)
    numbers = count(1)
    for process in processes_of(traces):
        pid = next(numbers)
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process.name}}
        yield from ({**event, "s": "p", "pid": pid} for event in process.instants.get("", ()))
        for queue, spans in process.spans.items():
            for number, row in enumerate(disjoint(spans), 1):
                thread = {"pid": pid, "tid": next(numbers)}
                name = queue if number == 1 else f"{queue} ({number})"
                yield {"ph": "M", "name": "thread_name", **thread, "args": {"name": name}}
                for span in row:
                    yield from (event | thread for event in request_events(span, flows))
                for event in process.instants.get(name, ()):
                    yield {**event, "s": "t", **thread}


def request_events(span: Span, flows: dict[int, int]) -> Iterator[Event]:
    """Yield the Chrome trace events for a request.

    Each request has a "complete" event. If a send has been matched with a receive, the send also
    has a flow start event, and the receive also has a flow end event.
    """
    request = span.request
    kind, result = "receive" if request.is_receive else "send", result_of(request)
    event: Event = {
        "ph": "X",
        "name": f"{request.operation} {request.status}" if request.failed else request.operation,
        "cat": f"{kind},{result}" if result else kind,
        "ts": span.began / 1e3,
        "dur": (span.ended - span.began) / 1e3,
        "args": {},
    }
    for record in (request.posted, request.completion):
        if record is not None:
            event["args"] |= arguments(record)
    event["args"] |= {
        "wr_id": wr_id_text(request.wr_id),
        "bytes": request.bytes,
        "status": request.status,
        "outcome": request.outcome.value,
    }
    yield event
    flow = {"name": "message", "cat": "message"}
    if number := flows.get(id(request.posted)):
        yield {**flow, "ph": "s", "id": number, "ts": span.began / 1e3}
    if number := flows.get(id(request.completion)):
        # Perfetto draws a flow to the start of an event, but a receive starts when it is posted.
        # Add an instant event at its completion for the flow to end at.
        at = {"ts": span.ended / 1e3}
        yield {**at, "ph": "i", "name": "received", "cat": "receive", "s": "t"}
        yield {**flow, **at, "ph": "f", "bp": "e", "id": number}


def result_of(request: Request) -> str:
    """Return the category that marks an unsuccessful request, or an empty string."""
    if request.status == "WR_FLUSH_ERR":
        return "flushed"
    if request.failed or request.outcome is Outcome.LOST:
        return "failed"
    return "unfinished" if request.outcome in (Outcome.OPEN, Outcome.FORGOTTEN) else ""


def instant(traced: Traced, incident: Incident) -> Event:
    """Return an incident, such as a queue pair's state change, as an event without a duration."""
    return {
        "ph": "i",
        "name": incident_text(incident),
        "cat": incident.TYPE,
        "ts": traced.at(incident.t) / 1e3,
        "args": arguments(incident),
    }
