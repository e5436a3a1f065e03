"""Traces as a picture (SVG): a lane for each queue pair, on one axis of time.

A lane has, from above: the queue pair's states, with asynchronous events as triangles; a bar for
each request of the send queue, from post to completion, those that overlap below each other; and
how many receives are posted, with a tick for each that completes. Shapes have tooltips. What would
be narrower than a pixel is drawn together with its neighbours, so that a million requests make a
picture, too.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from aiordma import trace
from aiordma.trace import Outcome, Request

from .svg import Drawing
from .trace_selection import Incident, Selection, Traced
from .trace_tables import incident_text, microseconds, wr_id_text

WIDTH, LEFT, RIGHT = 1400, 180, 24
PLOT = WIDTH - LEFT - RIGHT
STRIP, BAR, DEPTH, GAP = 13.0, 9.0, 26.0, 14.0
MOST_ROWS_HEIGHT = 170.0
MOST_ROWS = 60

INK, FAINT, GRID = "#222", "#777", "#e6e6e6"
FAILED, FLUSHED, RECEIVE = "#d1242f", "#f2a6a6", "#8aa4b8"
COLOURS = {
    "send": "#3b78c3",
    "write": "#2e9e6b",
    "read": "#e0a100",
    "atomic": "#8e5bb5",
    "memory window": "#7d7d7d",
}
STATES = {
    "RESET": "#ececec",
    "INIT": "#dfe7ee",
    "RTR": "#cfe0f2",
    "RTS": "#cdebd8",
    "SQD": "#f7e7b5",
    "SQE": "#f6cfc0",
    "ERR": "#f3b8b8",
}


def family(operation: str) -> str:
    """What an opcode is drawn as."""
    for beginning, name in (
        ("SEND", "send"), ("RDMA_WRITE", "write"), ("RDMA_READ", "read"), ("READ", "read"),
        ("ATOMIC", "atomic"), ("COMP_SWAP", "atomic"), ("FETCH_ADD", "atomic"),
    ):  # fmt: skip
        if operation.startswith(beginning):
            return name
    return "memory window"


@dataclass(slots=True)
class Lane:
    """A queue pair of a process, or a shared receive queue."""

    name: str
    about: str = ""
    sends: list[Request] = field(default_factory=list)
    receives: list[Request] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    states: list[trace.QPStateChange] = field(default_factory=list)
    created: int | None = None
    destroyed: int | None = None


@dataclass(frozen=True, slots=True)
class Axis:
    """The interval that is shown, in nanoseconds, and where that is on the sheet."""

    start: int
    stop: int

    def x(self, at: float) -> float:
        inside = min(max(at, self.start), self.stop)
        return LEFT + (inside - self.start) * PLOT / (self.stop - self.start)

    def has(self, at: int) -> bool:
        return self.start <= at <= self.stop

    def ticks(self) -> Iterator[int]:
        """About eight of them, at round times."""
        rough = (self.stop - self.start) / 8
        power = 10 ** math.floor(math.log10(max(rough, 1)))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        return iter(range(math.ceil(self.start / step) * step, self.stop + 1, step))

    def label(self, at: int) -> str:
        for unit, size in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
            if self.stop - self.start >= 2 * size:
                return f"{at / size:,.6g} {unit}"
        return f"{at:,} ns"


def picture(traces: list[Traced], selection: Selection) -> str:
    """The text of an SVG file."""
    chosen = [(traced, lanes_of(traced, selection)) for traced in traces]
    chosen = [(traced, lanes) for traced, lanes in chosen if lanes]
    axis = axis_of(chosen, selection)
    drawing = Drawing(WIDTH)
    y = heading(drawing, chosen, axis)
    top = y
    marks = Drawing(WIDTH)  # above the grid
    for traced, lanes in chosen:
        y = band(marks, traced, y)
        for lane in lanes:
            y = draw_lane(marks, traced, lane, axis, y) + GAP
    for at in axis.ticks():
        x = axis.x(at)
        drawing.line(x, top, x, y, GRID)
        drawing.text(x, top - 6, axis.label(at), size=10, colour=FAINT, anchor="middle")
        drawing.text(x, y + 12, axis.label(at), size=10, colour=FAINT, anchor="middle")
    drawing.include(marks)
    return drawing.finish(y + 24)


# ---- what is shown ------------------------------------------------------------------------------


def lanes_of(traced: Traced, selection: Selection) -> list[Lane]:
    """Those with anything to show, in the order in which they first appear."""
    lanes: dict[tuple[str, int], Lane] = {}

    def lane(kind: str, number: int) -> Lane:
        return lanes.setdefault((kind, number), Lane(f"{kind} {number}"))

    for record in traced.run.records:
        if isinstance(record, trace.CreatedQP):
            made = lane("QP", record.qp_num)
            made.about, made.created = record.qp_type, record.t
        elif isinstance(record, trace.QPStateChange):
            made = lane("QP", record.qp_num)
            made.states.append(record)
            if record.dest_qp_num is not None:
                made.about = f"{made.about.partition(' ')[0]} with {record.dest_qp_num}"
        elif isinstance(record, trace.DestroyedQP):
            lane("QP", record.qp_num).destroyed = record.t
        elif isinstance(record, Incident):
            number = record.qp_num
            if number is not None and selection.incident(traced, record):
                lane("QP", number).incidents.append(record)
    for request in traced.requests:
        if not selection.request(traced, request):
            continue
        if request.qp_num is not None:
            made = lane("QP", request.qp_num)
            (made.receives if request.is_receive else made.sends).append(request)
        if isinstance(request.posted, trace.PostedSharedReceive):
            lane("SRQ", request.posted.srq).receives.append(request)
    return [made for made in lanes.values() if made.sends or made.receives or made.incidents]


def axis_of(chosen: list[tuple[Traced, list[Lane]]], selection: Selection) -> Axis:
    """From the first to the last thing that is shown, unless it was asked for."""
    times = [
        traced.at(t)
        for traced, lanes in chosen
        for lane in lanes
        for t in (
            *(request.began for request in (*lane.sends, *lane.receives)),
            *(request.ended for request in (*lane.sends, *lane.receives) if request.ended),
            *(incident.t for incident in lane.incidents),
        )
    ]
    start = selection.start if selection.start is not None else min(times, default=0)
    stop = selection.stop if selection.stop is not None else max(times, default=0)
    return Axis(start, max(stop, start + 1))


# ---- drawing ------------------------------------------------------------------------------------


def heading(drawing: Drawing, chosen: list[tuple[Traced, list[Lane]]], axis: Axis) -> float:
    lanes = [lane for _, found in chosen for lane in found]
    requests = [request for lane in lanes for request in (*lane.sends, *lane.receives)]
    flushed = sum(request.status == "WR_FLUSH_ERR" for request in requests)
    failed = sum(request.failed for request in requests) - flushed
    drawing.text(LEFT, 30, "RDMA work requests, from post to completion", size=17, bold=True)
    drawing.text(
        LEFT,
        48,
        f"{plural(len(chosen), 'process')}, {plural(len(lanes), 'queue')}, "
        f"{plural(len(requests), 'request')}, {failed:,} failed, {flushed:,} flushed, "
        f"in {axis.label(significant(axis.stop - axis.start))}",
        colour=FAINT,
    )
    shown = {family(request.operation) for lane in lanes for request in lane.sends}
    keys = [key for key in COLOURS.items() if key[0] in shown]
    keys += [("failed", FAILED)] if failed else []
    keys += [("flushed", FLUSHED)] if flushed else []
    keys += [("posted receives", RECEIVE)] if any(lane.receives for lane in lanes) else []
    x = float(LEFT)
    for name, colour in keys:
        drawing.rect(x, 60, 12, 9, colour, more=' rx="1.5"')
        drawing.text(x + 17, 68.5, name, size=10.5, colour=FAINT)
        x += 17 + 6.3 * len(name) + 18
    if any(style_of(request).endswith("-pale") for lane in lanes for request in lane.sends):
        text = "pale: not signaled (it ended by then), or without an end"
        drawing.text(x, 68.5, text, size=10.5, colour=FAINT)
    return 100


def significant(number: int) -> int:
    """To four digits."""
    return int(float(f"{number:.4g}"))


def plural(count: int, name: str) -> str:
    return f"{count:,} {name if count == 1 else name + ('es' if name.endswith('s') else 's')}"


def band(drawing: Drawing, traced: Traced, y: float) -> float:
    """The name of a process across the sheet."""
    header = traced.run.header
    command = header.command if len(header.command) <= 150 else header.command[:149] + "…"
    drawing.rect(0, y, WIDTH, 20, "#f4f5f7")
    drawing.text(12, y + 14, f"process {header.pid}", bold=True, size=11.5)
    drawing.text(LEFT, y + 14, f"{command}  ({header.host})", colour=FAINT, size=10.5)
    return y + 20 + GAP


def draw_lane(drawing: Drawing, traced: Traced, lane: Lane, axis: Axis, y: float) -> float:
    """The lane from ``y`` down; where it ends."""
    top = y
    drawing.text(12, y + 10, lane.name, bold=True, colour=INK)
    drawing.text(12, y + 23, lane.about, size=10, colour=FAINT)
    if lane.created is not None or lane.states:
        draw_states(drawing, traced, lane, axis, y)
        y += STRIP + 3
    if lane.sends:
        y = draw_sends(drawing, traced, lane.sends, axis, y) + 3
    if lane.receives:
        draw_receives(drawing, traced, lane.receives, axis, y)
        y += DEPTH
    draw_incidents(drawing, traced, lane.incidents, axis, top)
    return max(y, top + 26)


def draw_states(drawing: Drawing, traced: Traced, lane: Lane, axis: Axis, y: float) -> None:
    first = lane.states[0].cur_qp_state if lane.states else "RESET"
    begin = axis.start if lane.created is None else traced.at(lane.created)
    steps = [(begin, first), *((traced.at(it.t), it.qp_state) for it in lane.states)]
    end = axis.stop if lane.destroyed is None else traced.at(lane.destroyed)
    for (at, state), (until, _) in zip(steps, [*steps[1:], (end, "")], strict=True):
        left, right = axis.x(at), axis.x(until)
        if until < axis.start or at > axis.stop or right <= left:
            continue
        title = f"{lane.name} {state}, {clock(at)} to {clock(until)}"
        drawing.rect(left, y, right - left, STRIP - 3, STATES.get(state, "#eee"), title=title)
        if right - left > 9 * len(state):
            drawing.text(left + 4, y + 8.3, state, size=8.5, colour="#555")


def clock(at: int) -> str:
    return f"{at / 1e6:,.4f} ms"


def draw_incidents(
    drawing: Drawing, traced: Traced, incidents: Iterable[Incident], axis: Axis, y: float
) -> None:
    """Triangles that point at the strip of states; named where there is room, and not twice."""
    groups: dict[tuple[int, str], list[Incident]] = {}
    for incident in incidents:
        if axis.has(traced.at(incident.t)):
            place = round(axis.x(traced.at(incident.t)))
            groups.setdefault((place, incident_text(incident)), []).append(incident)
    places = [place for place, _ in groups]
    before, said = 0.0, ""
    for number, ((x, text), group) in enumerate(groups.items()):
        colour = colour_of(group[0])
        count = f"{len(group):,} x " if len(group) > 1 else ""
        title = f"{count}{text}, {clock(traced.at(group[0].t))}"
        drawing.path(f"M{x} {y + 1:.1f}l-4 -7h8z", colour, title=title)
        name = text.removeprefix("event ")
        width = 5.2 * len(name) + 12
        after = places[number + 1] if number + 1 < len(places) else WIDTH - RIGHT + 4
        if name != said and x + width < after:
            drawing.text(x + 7, y - 1, name, size=9, colour=colour)
            before, said = x + width, name
        elif name != said and x - width > before:
            drawing.text(x - 7, y - 1, name, size=9, colour=colour, anchor="end")
            before, said = float(x), name
        else:
            before = float(x)


def colour_of(incident: Incident) -> str:
    match incident:
        case trace.Refused():
            return FAILED
        case trace.AsyncEvent(event_type=name) if name.endswith(("ERR", "FATAL")):
            return FAILED
        case trace.Fault() | trace.Retry():
            return "#b35900"
    return "#444"


# ---- sends --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Bar:
    """A request, or several that are too narrow to be told apart."""

    left: float
    right: float
    style: str
    requests: list[Request]


def style_of(request: Request) -> str:
    if request.status == "WR_FLUSH_ERR":
        return "flushed"
    if request.failed or request.outcome is Outcome.LOST:
        return "failed"
    pale = "" if request.outcome is Outcome.COMPLETED else "-pale"
    return family(request.operation) + pale


def rows_of(traced: Traced, sends: list[Request], axis: Axis) -> list[list[Bar]]:
    """Bars that do not overlap in each row: a request takes the first row that is free."""
    rows: list[list[Bar]] = []
    free: list[int] = []  # a heap of rows
    busy: list[tuple[int, int]] = []  # a heap of ends and rows
    for request in sorted(sends, key=lambda request: request.began):
        began = traced.at(request.began)
        ended = axis.stop if request.ended is None else traced.at(request.ended)
        while busy and busy[0][0] <= began:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row = len(rows)
            rows.append([])
        heapq.heappush(busy, (ended, row))
        add_bar(rows[row], Bar(axis.x(began), axis.x(ended), style_of(request), [request]))
    if len(rows) > MOST_ROWS:
        step = math.ceil(len(rows) / MOST_ROWS)
        rows = [
            [bar for row in rows[at : at + step] for bar in row] for at in range(0, len(rows), step)
        ]
    return rows


def add_bar(row: list[Bar], bar: Bar) -> None:
    last = row[-1] if row else None
    if (
        last is not None
        and last.style == bar.style
        and bar.right - last.right < 1
        and bar.left - last.right < 0.5
    ):
        last.right = max(last.right, bar.right)
        last.requests += bar.requests
    else:
        row.append(bar)


def draw_sends(
    drawing: Drawing, traced: Traced, sends: list[Request], axis: Axis, y: float
) -> float:
    rows = rows_of(traced, sends, axis)
    height = min(BAR, MOST_ROWS_HEIGHT / len(rows))
    space = 1.5 if height > 5 else 0
    crosses: dict[tuple[int, int], Bar] = {}
    for number, row in enumerate(rows):
        top = y + number * height
        for bar in row:
            name, _, pale = bar.style.partition("-")
            fill = {"failed": FAILED, "flushed": FLUSHED}.get(name) or COLOURS[name]
            more = ' rx="1.5"' if bar.right - bar.left > 5 else ""
            if pale:
                more += ' fill-opacity="0.4"'
            drawing.rect(
                bar.left,
                top,
                max(bar.right - bar.left, 1),
                height - space,
                fill,
                title=bar_title(traced, bar),
                more=more,
            )
            if name == "failed":
                crosses.setdefault((round(bar.right / 4), number), bar)
    for (_, number), bar in crosses.items():
        middle = y + number * height + (height - space) / 2
        drawing.path(
            f"M{bar.right - 3.5:.1f} {middle - 3.5:.1f}l7 7m-7 0l7 -7",
            title=bar_title(traced, bar),
            more=' stroke="#fff" stroke-width="3.6"',
        )
        drawing.path(
            f"M{bar.right - 3.5:.1f} {middle - 3.5:.1f}l7 7m-7 0l7 -7",
            title=bar_title(traced, bar),
            more=f' stroke="{FAILED}" stroke-width="1.8"',
        )
    return y + len(rows) * height


def bar_title(traced: Traced, bar: Bar) -> str:
    first = bar.requests[0]
    at = clock(traced.at(first.began))
    if len(bar.requests) == 1:
        took = "" if first.took is None else f", {microseconds(first.took)} µs"
        return (
            f"{first.operation} wr_id {wr_id_text(first.wr_id)}: {first.bytes:,} B{took}, "
            f"{first.status}, posted at {at}"
        )
    longest = max((it.took for it in bar.requests if it.took is not None), default=0)
    total = sum(it.bytes for it in bar.requests)
    return (
        f"{len(bar.requests):,} x {first.operation}: {total:,} B, the longest "
        f"{microseconds(longest)} µs, {first.status}, from {at}"
    )


# ---- receives -----------------------------------------------------------------------------------


def depth_steps(traced: Traced, receives: Iterable[Request]) -> list[tuple[int, int]]:
    """How many receives are posted, from each time on."""
    changes: list[tuple[int, int]] = []
    for request in receives:
        if request.posted is not None:
            changes.append((traced.at(request.posted.t), 1))
            if request.ended is not None:
                changes.append((traced.at(request.ended), -1))
    changes.sort()
    depth, steps = 0, []
    for at, change in changes:
        depth += change
        steps.append((at, depth))
    return steps


def draw_receives(
    drawing: Drawing, traced: Traced, receives: list[Request], axis: Axis, y: float
) -> None:
    base = y + DEPTH - 6
    steps = depth_steps(traced, receives)
    most = max((depth for _, depth in steps), default=0)
    if most:
        scale = (DEPTH - 8) / most
        # The highest and the lowest of each pixel.
        columns: dict[int, list[int]] = {}
        before = 0
        for at, depth in steps:
            column = columns.setdefault(round(axis.x(at)), [before])
            column.append(depth)
            before = depth
        points = [f"M{axis.x(steps[0][0]):.1f} {base:.1f}"]
        for x, depths in columns.items():
            points.append(f"H{x}")
            extremes = (depths[0], min(depths), max(depths), depths[-1])
            points += [f"V{base - depth * scale:.1f}" for depth, _ in groupby(extremes)]
        points.append(f"H{LEFT + PLOT}V{base:.1f}Z" if before else "Z")
        drawing.path(
            "".join(points),
            RECEIVE,
            title=f"posted receives: {most} at most",
            more=f' fill-opacity="0.28" stroke="{RECEIVE}" stroke-width="0.7"',
        )
        drawing.text(LEFT - 6, base - DEPTH + 14, str(most), size=9, colour=FAINT, anchor="end")
        drawing.text(LEFT - 6, base, "receives", size=9, colour=FAINT, anchor="end")
    ticks: dict[tuple[int, str], list[Request]] = {}
    for request in receives:
        if request.completion is not None and axis.has(traced.at(request.completion.t)):
            style = style_of(request) if request.failed else "received"
            x = round(axis.x(traced.at(request.completion.t)))
            ticks.setdefault((x, style), []).append(request)
    colours = {"failed": FAILED, "flushed": FLUSHED}
    for (x, style), group in ticks.items():
        first = group[0]
        title = (
            f"{len(group):,} received"
            if len(group) > 1
            else f"RECV wr_id {wr_id_text(first.wr_id)}: {first.bytes:,} B, {first.status}"
        )
        drawing.rect(x - 0.5, base, 1, 5, colours.get(style, "#4d6a80"), title=title)
