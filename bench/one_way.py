"""Messages one way."""

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
    by_work,
    ratio,
    seconds,
    size_name,
    take_turns,
)

NOTE = (
    "Messages one way until the last one has arrived, several under way: GB/s (10^9 bytes). The "
    "receiver has each as a whole, and keeps none. aiordma's sender gives plain `bytes`; in C a "
    "message is a SEND from registered memory into a posted receive. A core each. A turn is a GiB: "
    "when it begins, aiordma's receiver sleeps, and the one in C polls as ever; in a short turn, "
    "waking up, and the time that a core takes to get its clock back, would be what is measured."
)

# Bytes; messages in a turn, how many of them under way, what is asked beside uvloop's protocols.
SIZES = {
    64 << 10: (16384, 16, 2),
    1 << 20: (1024, 4, 4),
    64 << 20: (16, 2, 2),
}
NAMES = {size_name(size): size for size in SIZES}
RIVALS = [
    ("TCP protocol", "uvloop"),
    ("Unix protocol", "uvloop"),
    ("TCP protocol", "asyncio"),
    ("TCP streams", "asyncio"),
]
TO_C = 0.75  # within 25 %


def lanes(contenders: Contenders, options: Options) -> Iterator[Lane]:
    runners = {
        "aiordma": contenders.python("aiordma"),
        "aiordma on asyncio": contenders.python("aiordma", "asyncio"),
        **{f"{loop} {way}": contenders.python(way, loop) for way, loop in RIVALS},
        "C, polling": contenders.c(),
    }
    for size, (count, window, _) in SIZES.items():
        if size > options.most:
            continue
        numbers = {"size": size, "count": options.count(count, window), "window": window}
        for who, contender in runners.items():
            yield Lane.of(contender, size_name(size), who, "send_many", **numbers)


def measure(options: Options) -> Data:
    with Contenders() as contenders:
        return take_turns(list(lanes(contenders, options)), options)


def requirements(data: Data) -> Iterator[Requirement]:
    for work, _ in by_work(data):
        ours = seconds(data, work, "aiordma")
        against = ratio(seconds(data, work, "uvloop TCP protocol"), ours)
        yield at_least(
            f"one-way messages of {work}: times uvloop TCP protocols",
            SIZES[NAMES[work]][2],
            against,
        )
        beside = ratio(seconds(data, work, "C, polling"), ours)
        yield at_least(f"one-way messages of {work}: times the C figure", TO_C, beside)


COMPARISON = Comparison(
    "One way",
    NOTE,
    measure,
    requirements,
    "GB/s",
    lambda work, seconds: NAMES[work] / seconds / 1e9,
    style="a window of 2 to 16 futures of `send_nowait`, received in `async for`",
)
