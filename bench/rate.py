"""Messages there and back with 64 of them under way on one connection."""

from __future__ import annotations

from collections.abc import Iterator

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
    "Two processes with a core each."
)
WORK = "64 B, 64 outstanding"
# A turn of 6400 took 20 ms, and much of that was waking up, and finding out that it pays to look
# before sleeping.
SIZE, WINDOW, COUNT = 64, 64, 32000
RIVALS = [
    ("TCP protocol", "uvloop"),
    ("TCP streams", "uvloop"),
    ("Unix protocol", "uvloop"),
    ("TCP protocol", "asyncio"),
]


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


def measure(options: Options) -> Data:
    with Contenders() as contenders:
        return take_turns(list(lanes(contenders, options)), options)


def requirements(data: Data) -> Iterator[Requirement]:
    found = ratio(seconds(data, WORK, "uvloop TCP protocol"), seconds(data, WORK, "aiordma"))
    yield at_least(
        "64 B messages echoed, 64 outstanding: times the rate of uvloop TCP protocols", 3, found
    )


COMPARISON = Comparison(
    "Rate", NOTE, measure, requirements, "messages a second", lambda work, seconds: 1 / seconds
)
