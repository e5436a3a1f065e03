"""Traces in the Chrome trace event format, which Perfetto and chrome://tracing display.

A process of the trace is a process there, and a queue pair is a thread. A work request is a
complete event from its post to its completion, what happens to a queue pair is an instant event,
and a flow event leads from each message to its receive. Viewers require that the complete events of
a thread nest or are disjoint, and a queue pair has many requests under way: requests that overlap
are put on further threads of the same name with a number, and receives on threads of their own.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import chain, count
from typing import Any

from aiordma import trace
from aiordma.trace import Outcome, Request

from .trace_selection import Incident, Selection, Traced
from .trace_tables import incident_text, wr_id_text

Event = dict[str, Any]

# Operations that consume a receive of the peer.
MESSAGES = {"SEND", "SEND_WITH_IMM", "SEND_WITH_INV", "RDMA_WRITE_WITH_IMM"}

# Colours of chrome://tracing. Perfetto chooses a colour by the event's name.
COLOURS = {"failed": "terrible", "flushed": "bad", "unfinished": "grey"}

HEXADECIMAL = {"remote_addr", "rkey", "invalidate_rkey", "invalidated_rkey"}
# Fields of records that an event has elsewhere.
ELSEWHERE = {"t", "request", "qp_num", "length", "byte_len", "status", "opcode"}


def chrome_trace(traces: list[Traced], selection: Selection) -> str:
    """The text of a file in the JSON object format, with a line for each event."""
    # Names first. The sort is stable: a flow binds to the complete or instant event before it.
    ordered = sorted(events(traces, selection), key=lambda event: event.get("ts", -1.0))
    lines = ",\n".join(json.dumps(event) for event in ordered)
    return f'{{"displayTimeUnit": "ns", "traceEvents": [\n{lines}\n]}}\n'


# ---- processes, threads and spans ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """A request and its times on the common axis."""

    traced: Traced
    request: Request
    began: int
    ended: int

    @classmethod
    def of(cls, traced: Traced, request: Request) -> Span:
        """Start and end on the axis; those of the trace where the request has none of its own."""
        began = traced.run.header.t if request.posted is None else request.posted.t
        ended = end_of(traced) if request.ended is None else request.ended
        return cls(traced, request, traced.at(began), traced.at(ended))


def end_of(traced: Traced) -> int:
    """The time of the last record."""
    return traced.run.records[-1].t if traced.run.records else traced.run.header.t


@dataclass(slots=True)
class Queue:
    """A queue pair of a process, or a shared receive queue."""

    name: str
    number: int | None
    sends: list[Span] = field(default_factory=list)
    receives: list[Span] = field(default_factory=list)
    incidents: list[tuple[Traced, Incident]] = field(default_factory=list)


@dataclass(slots=True)
class Process:
    """A process, which may have several traces, with its spans and incidents."""

    header: trace.Header
    qp_types: dict[int, str] = field(default_factory=dict)
    queues: dict[str, Queue] = field(default_factory=dict)
    incidents: list[tuple[Traced, Incident]] = field(default_factory=list)
    """The records that belong to no queue pair."""

    def queue_pair(self, number: int) -> Queue:
        name = f"QP {number:#08x} {self.qp_types.get(number, '')}".rstrip()
        return self.queues.setdefault(name, Queue(name, number))

    def shared_receive_queue(self, handle: int) -> Queue:
        return self.queues.setdefault(f"SRQ {handle}", Queue(f"SRQ {handle}", None))


def processes_of(traces: Iterable[Traced], selection: Selection) -> list[Process]:
    """The processes that have anything selected."""
    found: dict[tuple[str, str, int], Process] = {}
    for traced in traces:
        header = traced.run.header
        process = found.setdefault((header.boot_id, header.host, header.pid), Process(header))
        for record in traced.run.records:
            if isinstance(record, trace.CreatedQP):
                process.qp_types[record.qp_num] = record.qp_type
        for request in traced.requests:
            if not selection.request(traced, request):
                continue
            if request.qp_num is not None:
                queue = process.queue_pair(request.qp_num)
                spans = queue.receives if request.is_receive else queue.sends
                spans.append(Span.of(traced, request))
            elif isinstance(request.posted, trace.PostedSharedReceive):
                queue = process.shared_receive_queue(request.posted.srq)
                queue.receives.append(Span.of(traced, request))
        for incident in traced.incidents:
            if selection.incident(traced, incident):
                number = incident.qp_num
                place = process if number is None else process.queue_pair(number)
                place.incidents.append((traced, incident))
    return [process for process in found.values() if process.queues or process.incidents]


def disjoint(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans in rows without overlaps; each takes the first free row."""
    rows: list[list[Span]] = []
    free: list[int] = []  # a heap of rows
    busy: list[tuple[int, int]] = []  # a heap of ends and rows
    for span in sorted(spans, key=lambda span: span.began):
        # Strictly after: viewers round floating-point times, by up to a nanosecond.
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
    """A reliable connection as traced by one end: its messages and the receives it completed."""

    began: int
    ended: int
    messages: list[trace.PostedSend] = field(default_factory=list)
    arrivals: list[trace.Completion] = field(default_factory=list)


Ends = tuple[int, int]  # the number of a queue pair, and that of its peer


def connections_of(traced: Traced) -> Iterator[tuple[Ends, Connection]]:
    """The connections that are in the trace from their beginning, and so with every message."""
    reliable: set[int] = set()
    current: dict[int, Connection] = {}
    for record in traced.run.records:
        match record:
            case trace.CreatedQP(qp_type="RC"):
                reliable.add(record.qp_num)
            case trace.QPStateChange(qp_state="RTR", dest_qp_num=int(peer)):
                if record.qp_num in reliable:
                    connection = Connection(traced.at(record.t), traced.at(end_of(traced)))
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
    """A number for each message and its arrival, by the id of their records.

    A reliable connection delivers each message once and in order, so the first message belongs to
    the first receive that completed, and so on. Queue pair numbers may repeat, in time and between
    machines: where it is not clear which two ends belong together, there is nothing.
    """
    found: dict[Ends, list[Connection]] = {}
    for traced in traces:
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
                        numbers[id(message)] = numbers[id(arrival)] = next(flow)
    return numbers


# ---- events -------------------------------------------------------------------------------------


class Numbers:
    """Process and thread numbers: those of the trace where they differ from all others.

    A thread with the number of a process would be a main thread, and threads with one number in two
    processes may be given one name.
    """

    def __init__(self) -> None:
        self._taken = {0}
        self._others = count(1 << 24)  # above all process ids and queue pair numbers

    def take(self, number: int | None) -> int:
        if number is None or number in self._taken:
            number = next(self._others)
        self._taken.add(number)
        return number


def events(traces: list[Traced], selection: Selection) -> Iterator[Event]:
    """The events of every process, thread by thread."""
    shown = processes_of(traces, selection)
    flows = match_messages(traces)
    # Only messages with both ends in the traces.
    both = Counter(
        flows.get(id(record))
        for process in shown
        for queue in process.queues.values()
        for span in chain(queue.sends, queue.receives)
        for record in (span.request.posted, span.request.completion)
    )
    flows = {record: flow for record, flow in flows.items() if both[flow] == 2}
    numbers = Numbers()
    for pid, process in [(numbers.take(process.header.pid), process) for process in shown]:
        header = process.header
        name = f"{header.command} ({header.host}, process {header.pid})"
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for traced, incident in process.incidents:
            yield {**incident_event(traced, incident), "s": "p", "pid": pid}
        order = count()
        for queue in process.queues.values():
            for name, number, spans in threads_of(queue):
                thread = {"pid": pid, "tid": numbers.take(number)}
                yield {"ph": "M", "name": "thread_name", **thread, "args": {"name": name}}
                index = {"sort_index": next(order)}
                yield {"ph": "M", "name": "thread_sort_index", **thread, "args": index}
                for span in spans:
                    for event in request_events(span, flows):
                        yield {**event, **thread}
                if name == queue.name:
                    for traced, incident in queue.incidents:
                        yield {**incident_event(traced, incident), "s": "t", **thread}


def threads_of(queue: Queue) -> Iterator[tuple[str, int | None, list[Span]]]:
    """Name, number and spans; the first thread of a queue pair has its name and number alone."""
    if queue.number is not None:
        first, *others = disjoint(queue.sends) or [[]]
        yield queue.name, queue.number, first
        for number, spans in enumerate(others, 2):
            yield f"{queue.name} ({number})", None, spans
    for number, spans in enumerate(disjoint(queue.receives), 1):
        yield f"{queue.name} receives ({number})", None, spans


def request_events(span: Span, flows: dict[int, int]) -> Iterator[Event]:
    """The complete event, and for a message the beginning or the end of its flow."""
    request = span.request
    kind, result = "receive" if request.is_receive else "send", result_of(request)
    event: Event = {
        "ph": "X",
        "name": f"{request.operation} {request.status}" if request.failed else request.operation,
        "cat": f"{kind},{result}" if result else kind,
        "ts": span.began / 1e3,
        "dur": (span.ended - span.began) / 1e3,
        "args": request_arguments(request),
    }
    yield event | {"cname": COLOURS[result]} if result else event
    flow = {"name": "message", "cat": "message"}
    if number := flows.get(id(request.posted)):
        yield {**flow, "ph": "s", "id": number, "ts": span.began / 1e3}
    if number := flows.get(id(request.completion)):
        # Perfetto draws a flow to the beginning of an event, and a receive is posted before.
        at = {"ts": span.ended / 1e3}
        yield {**at, "ph": "i", "name": "received", "cat": "receive", "s": "t"}
        yield {**flow, **at, "ph": "f", "bp": "e", "id": number}


def result_of(request: Request) -> str:
    """The category of a request that did not succeed."""
    if request.status == "WR_FLUSH_ERR":
        return "flushed"
    if request.failed or request.outcome is Outcome.LOST:
        return "failed"
    return "unfinished" if request.outcome in (Outcome.OPEN, Outcome.FORGOTTEN) else ""


def request_arguments(request: Request) -> dict[str, object]:
    found: dict[str, object] = {
        "wr_id": wr_id_text(request.wr_id),
        "bytes": request.bytes,
        "status": request.status,
        "outcome": request.outcome.value,
    }
    if request.posted is None:
        found["posted"] = "before the trace began"
    if request.outcome is Outcome.OPEN:
        found["completed"] = "not before the trace ended"
    for record in (request.posted, request.completion):
        if record is not None:
            found |= arguments(record)
    return found


def incident_event(traced: Traced, incident: Incident) -> Event:
    return {
        "ph": "i",
        "name": incident_text(incident),
        "cat": incident.TYPE,
        "ts": traced.at(incident.t) / 1e3,
        "args": arguments(incident),
    }


def arguments(record: trace.Record) -> dict[str, object]:
    """The fields that a record has. Keys and addresses are text: viewers have no 64-bit numbers."""
    values = {each.name: getattr(record, each.name) for each in fields(record)}
    return {
        name: wr_id_text(value) if name == "wr_id" else hex(value) if name in HEXADECIMAL else value
        for name, value in values.items()
        if name not in ELSEWHERE and value is not None and value is not False and value != ()
    }
