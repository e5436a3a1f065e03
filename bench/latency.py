"""A message there and back, one at a time."""

from __future__ import annotations

from collections.abc import Iterator

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
    ratio,
    seconds,
    size_name,
    take_turns,
)

NOTE = (
    "A message there and back, one at a time; the median of the messages of a turn. The two "
    "processes have a core each. *aiordma* is as it comes, with adaptive "
    "polling; *aiordma, sleeping* has `Config(polling=0)`. Where nothing else is said, aiordma is "
    "on uvloop."
)

COUNTS = {64: 500, 4 << 10: 500, 64 << 10: 200, 1 << 20: 40}
"""Sizes in bytes, and round trips of each in one turn."""

RIVALS = [
    (way, loop)
    for loop in ("uvloop", "asyncio")
    for way in ("TCP protocol", "TCP streams", "Unix protocol", "Unix streams")
]

TCP = "uvloop TCP protocol"
UCXX = "ucxx, polling"


def lanes(contenders: Contenders, options: Options) -> Iterator[Lane]:
    def echo(work: str, who: str, size: int, contender: Contender) -> Lane:
        count = options.count(COUNTS[size])
        return Lane.of(contender, work, who, "echo", size=size, count=count)

    for size in (size for size in COUNTS if size <= options.most):
        work = size_name(size)
        yield echo(work, "aiordma", size, contenders.python("aiordma"))
        yield echo(work, "aiordma on asyncio", size, contenders.python("aiordma", "asyncio"))
        yield echo(work, "aiordma, sleeping", size, contenders.python("aiordma sleeping"))
        found = peers.contender(contenders, "ucxx")
        yield echo(work, UCXX, size, found) if found else Lane.missing(work, UCXX)
        for way, loop in RIVALS:
            yield echo(work, f"{loop} {way}", size, contenders.python(way, loop))
        yield echo(work, "C, polling", size, contenders.c())
        yield echo(work, "C, sleeping", size, contenders.c("sleeping", "sleeping"))


def measure(options: Options) -> Data:
    with Contenders() as contenders:
        return take_turns(list(lanes(contenders, options)), options)


def requirements(data: Data) -> Iterator[Requirement]:
    def against(work: str, who: str, whom: str) -> Spread:
        return ratio(seconds(data, work, whom), seconds(data, work, who))

    yield at_least(
        "64 B echo round trip, adaptive polling: times faster than uvloop TCP protocols",
        5,
        against("64 B", "aiordma", TCP),
    )
    yield at_least(
        "64 B echo round trip, sleeping: times faster than uvloop TCP protocols",
        1,
        against("64 B", "aiordma, sleeping", TCP),
    )
    yield at_least(
        "64 B echo round trip, sleeping: times faster than uvloop Unix protocols",
        1,
        against("64 B", "aiordma, sleeping", "uvloop Unix protocol"),
    )


COMPARISON = Comparison(
    "Echo",
    NOTE,
    measure,
    requirements,
    style="one task that awaits `send`, then `recv`; the other side answers in `async for`",
)
