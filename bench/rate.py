"""Messages there and back with 64 of them under way on one connection."""

from __future__ import annotations

from collections.abc import Iterator

from . import peers
from .lanes import (
    Comparison,
    Contenders,
    Data,
    Lane,
    Options,
    Requirement,
    at_least,
    ratio,
    seconds,
    take_turns,
)

NOTE = (
    "Messages of 64 B there and back, 64 of them under way on one connection: how many a second. "
    "*64 outstanding* are sent by one task: with `send_nowait`, or by a protocol that writes the "
    "next one when an answer arrives. *64 tasks* have one under way each: they `await send` and "
    "`await recv`; over a protocol they write, and await a future that `buffer_updated` sets for "
    "the first that waits; over streams they await `drain`, then a lock, then `readexactly`. The "
    "other side answers as messages arrive. Two processes with a core each."
)
WORK, TASKS = "64 B, 64 outstanding", "64 B, 64 tasks"
# A turn of 6400 took 20 ms, and much of that was waking up, and finding out that it pays to look
# before sleeping.
SIZE, WINDOW, COUNT = 64, 64, 32000
RIVALS = [
    ("TCP protocol", "uvloop"),
    ("TCP streams", "uvloop"),
    ("Unix protocol", "uvloop"),
    ("TCP protocol", "asyncio"),
]
BY_TASKS = {
    "aiordma": "aiordma",
    "uvloop TCP protocol": "TCP protocol",
    "uvloop Unix protocol": "Unix protocol",
    "uvloop TCP streams": "TCP streams",
}
UCXX = "ucxx, polling"


def lanes(contenders: Contenders, options: Options) -> Iterator[Lane]:
    count = options.count(COUNT, WINDOW)
    runners = {
        "aiordma": contenders.python("aiordma"),
        "aiordma on asyncio": contenders.python("aiordma", "asyncio"),
        **{f"{loop} {way}": contenders.python(way, loop) for way, loop in RIVALS},
        "C, polling": contenders.c(),
    }
    for who, contender in runners.items():
        yield Lane.of(contender, WORK, who, "echo_many", size=SIZE, count=count, window=WINDOW)
    numbers = {"size": SIZE, "count": options.count(COUNT // 2, WINDOW), "window": WINDOW}
    for who, way in BY_TASKS.items():
        yield Lane.of(contenders.python(way), TASKS, who, "echo_tasks", **numbers)
    yield peers.lane(contenders, "ucxx", TASKS, UCXX, "echo_tasks", **numbers)


def measure(options: Options) -> Data:
    with Contenders() as contenders:
        return take_turns(list(lanes(contenders, options)), options)


def requirements(data: Data) -> Iterator[Requirement]:
    found = ratio(seconds(data, WORK, "uvloop TCP protocol"), seconds(data, WORK, "aiordma"))
    yield at_least(
        "64 B messages echoed, 64 outstanding: times the rate of uvloop TCP protocols", 3, found
    )
    ours, tcp = seconds(data, TASKS, "aiordma"), "uvloop TCP protocol"
    for work, how in ((TASKS, "with 64 tasks too"), (WORK, "without tasks")):
        yield at_least(
            f"64 B messages echoed by 64 tasks: times the rate of uvloop TCP protocols {how}",
            1.5,
            ratio(seconds(data, work, tcp), ours),
        )


COMPARISON = Comparison(
    "Rate",
    NOTE,
    measure,
    requirements,
    "messages a second",
    lambda work, seconds: 1 / seconds,
    style="64 futures of `send_nowait` under way, or 64 tasks that `await send` and `await recv`",
)
