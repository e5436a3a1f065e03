"""A comparison of different styles of sending and receiving one-way messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from . import peers
from .contender import Contender
from .lanes import (
    Comparison,
    Contenders,
    Data,
    Lane,
    Options,
    Requirement,
    Spread,
    at_least,
    at_most,
    by_work,
    ratio,
    seconds,
    size_name,
)

NOTE = """\
aiordma offers several ways to send messages. This test compares their one-way throughput (1 GB/s
is 10^9 bytes per second). The clock stops when the last message has arrived. Each aiordma row
names the sender's style, the memory it sends from (`bytes` unless stated otherwise), and the
method that the receiver calls:

- *Window*: a loop keeps 8 `send_nowait` futures in flight and always awaits the oldest future.
- *Sequential*: each `send` is awaited before the next one starts.
- *gather*, *TaskGroup*: 8 `send` calls are awaited together.
- *One task per message*: up to 64 tasks send one message each.

The receiver discards each message or, with `recv_into`, receives every message into the same
memory. The time to register memory is not included. The C program sends from registered memory
and keeps 8 messages in flight."""


@dataclass(frozen=True)
class Style:
    sender: str
    source: str
    receiver: str
    target: str
    name: str
    way: str = "aiordma"

    @property
    def who(self) -> str:
        return f"aiordma: {self.name}"


STYLES = [
    Style("window", "bytes", "recv", "none", "window, `recv`"),
    Style("one", "bytes", "recv", "none", "sequential, `recv`"),
    Style("gather", "bytes", "recv", "none", "gather, `recv`"),
    Style("task_group", "bytes", "recv", "none", "TaskGroup, `recv`"),
    Style("tasks", "bytes", "recv", "none", "one task per message, `recv`"),
    Style("window", "bytearray", "recv", "none", "window, bytearray, `recv`"),
    Style("window", "alloc", "recv", "none", "window, `alloc`, `recv`"),
    Style("gather", "register", "recv", "none", "gather, `register`, `recv`"),
    Style("window", "bytes", "iterate", "none", "window, `async for`"),
    Style("window", "bytes", "recv_into", "bytearray", "window, `recv_into` bytearray"),
    Style("window", "bytes", "recv_into", "register", "window, `recv_into` registered"),
]
FIRST = STYLES[0].who
SLEEPING = [
    Style(
        one.sender,
        one.source,
        one.receiver,
        one.target,
        f"{one.name}, polling=0",
        "aiordma sleeping",
    )
    for one in STYLES[:2]
]
REGISTERED = {
    "aiordma: window, `alloc`, `recv`": "aiordma: window, `recv`",
    "aiordma: gather, `register`, `recv`": "aiordma: gather, `recv`",
    "aiordma: window, `recv_into` registered": "aiordma: window, `recv_into` bytearray",
}
"""The styles that use registered memory, and the corresponding styles that do not."""

TCP, C, MEMCPY = "uvloop TCP protocol", "C, polling", "memcpy"
UCXX = "ucxx, polling: gather"
RIVALS = {TCP: "TCP protocol", "uvloop Unix protocol": "Unix protocol"}
WINDOW = 8
TURN = 512 << 20  # bytes per lane in a turn, or a quarter of that for sockets and ucxx
SIZES = (64 << 10, 1 << 20, 64 << 20)
NAMES = {size_name(size): size for size in SIZES}

SLOWEST, TO_C = 1.5, 0.75
SAME = 0.95  # registering must not slow down messages; identical turns differ by up to 5%


def lanes(contenders: Contenders, options: Options) -> Iterator[Lane]:

    def lane(contender: Contender, work: str, who: str, kind: str, count: int, **job: Any) -> Lane:
        """Return a lane that first runs an eighth of its work without timing it.

        The untimed work wakes the lane's processes, which might be asleep if the previous lane used
        other processes. The untimed work is skipped if it is less than one window of messages.
        """

        def do() -> float:
            if count >= 8 * WINDOW:
                contender.do(kind, count=count // 8 // WINDOW * WINDOW, **job)
            return contender.do(kind, count=count, **job)

        return Lane(work, who, do)

    for size in (size for size in SIZES if size <= options.most):
        work = size_name(size)
        numbers = {"size": size, "count": options.count(TURN // size, WINDOW)}
        others = {**numbers, "count": options.count(TURN // 4 // size, WINDOW)}
        for style in (*STYLES, *SLEEPING):
            job: dict[str, Any] = {
                "service": "styles",
                "do": "stream",
                "sender": style.sender,
                "source": style.source,
                "receiver": style.receiver,
                "target": style.target,
            }
            ours = contenders.python(style.way)
            yield lane(ours, work, style.who, "by_client", **job, **numbers)
        for who, way in RIVALS.items():
            yield lane(contenders.python(way), work, who, "send_many", **others, window=WINDOW)
        yield peers.lane(contenders, "ucxx", work, UCXX, "send_gather", **others, window=WINDOW)
        yield lane(contenders.c(), work, C, "send_many", **numbers, window=WINDOW)
        yield lane(contenders.c(), work, MEMCPY, "copy", **numbers)


def ranked(data: Data, work: str) -> list[str]:
    """Return aiordma's styles, fastest first."""
    return sorted((style.who for style in STYLES), key=lambda who: median(seconds(data, work, who)))


def requirements(data: Data) -> Iterator[Requirement]:
    for work, _ in by_work(data):

        def times(who: str, whom: str, work: str = work) -> Spread:
            """Return the speed of `who` as a multiple of the speed of `whom`."""
            return ratio(seconds(data, work, whom), seconds(data, work, who))

        fastest, *_, slowest = ranked(data, work)
        yield at_most(
            f"{work} messages: time of the slowest style relative to the fastest",
            SLOWEST,
            times(fastest, slowest),
        )
        yield at_least(
            f"{work} messages, fastest style: speed relative to C", TO_C, times(fastest, C)
        )
        yield at_least(
            f"{work} messages, slowest style: speed relative to {TCP}", 1, times(slowest, TCP)
        )
        yield at_least(
            f"{work} messages, window, `polling=0`: speed relative to {TCP}",
            1,
            times(SLEEPING[0].who, TCP),
        )
        for registered, plain in REGISTERED.items():
            name = registered.removeprefix("aiordma: ")
            yield at_least(
                f"{work} messages, {name}: speed relative to unregistered memory",
                SAME,
                times(registered, plain),
            )


COMPARISON = Comparison(
    "Styles",
    NOTE,
    lanes,
    requirements,
    "GB/s",
    lambda work, seconds: NAMES[work] / seconds / 1e9,
    FIRST,
    caption="Throughput of one-way messages in GB/s, by message size",
)
