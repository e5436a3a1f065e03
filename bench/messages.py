"""Messages between two processes, a core each: there and back, many at a time, one way, encrypted,
on many connections, and over TCP."""

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
)

OURS, ASYNCIO = "aiordma", "aiordma on asyncio"
TCP, UNIX, C, UCXX = "uvloop TCP protocol", "uvloop Unix protocol", "C, polling", "ucxx, polling"


def runners(contenders: Contenders, *names: str) -> dict[str, Contender]:
    """Contenders in Python and C: aiordma on both loops, sockets as "LOOP WAY", and C."""
    found = {OURS: contenders.python(OURS), ASYNCIO: contenders.python(OURS, "asyncio")}
    for name in names:
        loop, _, way = name.partition(" ")
        found[name] = contenders.python(way, loop)
    return {**found, C: contenders.c()}


def faster(data: Data, work: str, who: str, whom: str) -> Spread:
    """How many times as fast `who` is as `whom`."""
    return ratio(seconds(data, work, whom), seconds(data, work, who))


# ---- there and back ------------------------------------------------------------------------------

COUNTS = {64: 500, 4 << 10: 500, 64 << 10: 200, 1 << 20: 40}
"""Sizes in bytes, and round trips of each in one turn."""

RIVALS = TCP, UNIX, "asyncio TCP protocol"
SLEEPING = "aiordma, sleeping"


def latency_lanes(contenders: Contenders, options: Options) -> Iterator[Lane]:
    echoing = {
        **runners(contenders, *RIVALS),
        SLEEPING: contenders.python("aiordma sleeping"),
        "C, sleeping": contenders.c("sleeping", "sleeping"),
    }
    for size in (size for size in COUNTS if size <= options.most):
        numbers = {"size": size, "count": options.count(COUNTS[size])}
        for who, contender in echoing.items():
            yield Lane.of(contender, size_name(size), who, "echo", **numbers)
        yield peers.lane(contenders, "ucxx", size_name(size), UCXX, "echo", **numbers)


def latency_requirements(data: Data) -> Iterator[Requirement]:
    for who, how, whom, least in (
        (OURS, "adaptive polling", TCP, 5),
        (SLEEPING, "sleeping", TCP, 1),
        (SLEEPING, "sleeping", UNIX, 1),
    ):
        what = f"64 B echo round trip, {how}: times faster than {whom}s"
        yield at_least(what, least, faster(data, "64 B", who, whom))


LATENCY = Comparison(
    "Echo",
    "A message there and back, one at a time; the median of the messages of a turn. The two "
    "processes have a core each. *aiordma* is as it comes, with adaptive "
    "polling; *aiordma, sleeping* has `Config(polling=0)`. Where nothing else is said, aiordma is "
    "on uvloop.",
    latency_lanes,
    latency_requirements,
    style="one task that awaits `send`, then `recv`; the other side does the same",
)

# ---- many at a time ------------------------------------------------------------------------------

OUTSTANDING, TASKS = "64 B, 64 outstanding", "64 B, 64 tasks"
# A turn of 6400 took 20 ms, and much of that was waking up, and finding out that it pays to look
# before sleeping.
SIZE, WINDOW, COUNT = 64, 64, 32000


def rate_lanes(contenders: Contenders, options: Options) -> Iterator[Lane]:
    numbers = {"size": SIZE, "count": options.count(COUNT, WINDOW), "window": WINDOW}
    rivals = runners(contenders, TCP, UNIX, "asyncio TCP protocol")
    for who, contender in rivals.items():
        yield Lane.of(contender, OUTSTANDING, who, "echo_many", **numbers)
    numbers["count"] = options.count(COUNT // 2, WINDOW)
    for who in (OURS, TCP, UNIX):
        yield Lane.of(rivals[who], TASKS, who, "echo_tasks", **numbers)
    yield peers.lane(contenders, "ucxx", TASKS, UCXX, "echo_tasks", **numbers)


def rate_requirements(data: Data) -> Iterator[Requirement]:
    yield at_least(
        "64 B messages echoed, 64 outstanding: times the rate of uvloop TCP protocols",
        3,
        faster(data, OUTSTANDING, OURS, TCP),
    )
    ours = seconds(data, TASKS, OURS)
    for work, how in ((TASKS, "with 64 tasks too"), (OUTSTANDING, "without tasks")):
        yield at_least(
            f"64 B messages echoed by 64 tasks: times the rate of uvloop TCP protocols {how}",
            1.5,
            ratio(seconds(data, work, TCP), ours),
        )


RATE = Comparison(
    "Rate",
    "Messages of 64 B there and back, 64 of them under way on one connection: how many a second. "
    "*64 outstanding* are sent by one task: with `send_nowait`, or by a protocol that writes the "
    "next one when an answer arrives. *64 tasks* have one under way each: they `await send` and "
    "`await recv`; over a protocol they write, and await a future that `buffer_updated` sets for "
    "the first that waits. The other side answers as messages arrive. Two processes with a core "
    "each.",
    rate_lanes,
    rate_requirements,
    "messages a second",
    lambda work, seconds: 1 / seconds,
    style="64 futures of `send_nowait` under way, or 64 tasks that `await send` and `await recv`",
)

# ---- encrypted -----------------------------------------------------------------------------------

SEALED = "aiordma, encrypted"
# Bytes; messages in a turn there and back, and one way, and how many of these are under way; what
# is asked of the speed in clear, by judgement.  In clear a long message is copied once, at up to 30
# GB/s where it stays in the cache; here it is encrypted, copied and decrypted, each at up to 20.
ENCRYPTED = {
    64: (500, 8000, 64, (0.5, 0.5)),
    64 << 10: (200, 8192, 16, (0.25, 0.2)),
    1 << 20: (40, 512, 4, (0.15, 0.15)),
}


def works(size: int) -> tuple[str, str]:
    return f"{size_name(size)}, there and back", f"{size_name(size)}, one way"


def encryption_lanes(contenders: Contenders, options: Options) -> Iterator[Lane]:
    for size in (size for size in ENCRYPTED if size <= options.most):
        echoes, count, window, _ = ENCRYPTED[size]
        there_and_back, one_way = works(size)
        for who, way in ((OURS, OURS), (SEALED, "aiordma encrypted")):
            contender = contenders.python(way)
            numbers = {"size": size, "count": options.count(echoes)}
            yield Lane.of(contender, there_and_back, who, "echo", **numbers)
            numbers = {"size": size, "count": options.count(count, window), "window": window}
            yield Lane.of(contender, one_way, who, "send_many", **numbers)


def encryption_requirements(data: Data) -> Iterator[Requirement]:
    for size, (*_, asked) in ENCRYPTED.items():
        for work, least in zip(works(size), asked, strict=True):
            if seconds(data, work, OURS):
                found = faster(data, work, SEALED, OURS)
                yield at_least(f"{work}: encrypted, of the speed in clear", least, found)


ENCRYPTION = Comparison(
    "Encryption",
    "A message there and back, one at a time, and messages one way, several under way: on a "
    "connection with `encrypt=True`, and on one without. Each message is encrypted and decrypted "
    "by AES-256-GCM of the package `cryptography`, in the thread of the event loop. A core each.",
    encryption_lanes,
    encryption_requirements,
    style="as for the echo; one way a window of futures of `send_nowait`",
)

# ---- connections ---------------------------------------------------------------------------------

ONE, MANY = "one connection", "256 connections"
CONNECT, CONNECT_ALL = "connect and close", "connect, and close when all are there"
EACH, MANAGER = "aiordma, a socket each", "aiordma, connection manager"
# Ours are more, for a tenth of a second: a turn begins with keep-alive for all that have idled.
ECHOES = {OURS: 64_000, TCP: 6400, UNIX: 6400, UCXX: 2560}
# Each way of connecting: its worker, and connections of a tenth of a second.
MAKERS = {
    OURS: ("aiordma exchange", 200),
    EACH: ("aiordma exchange, a socket each", 200),
    MANAGER: (OURS, 200),
    TCP: ("TCP protocol", 2000),
}
ALL = 200


def connections_lanes(contenders: Contenders, options: Options) -> Iterator[Lane]:
    rivals = runners(contenders, TCP, UNIX)
    for work, connections in ((ONE, 1), (MANY, 256)):
        for who in (OURS, TCP, UNIX):
            count = options.count(ECHOES[who], connections)
            numbers = {"size": 64, "count": count, "connections": connections}
            yield Lane.of(rivals[who], work, who, "echo_together", **numbers)
    for who, (way, count) in MAKERS.items():
        contender = contenders.python(way)
        yield Lane.of(contender, CONNECT, who, "connect", count=options.count(count))
        yield Lane.of(contender, CONNECT_ALL, who, "connect_all", count=options.count(ALL))
    numbers = {"size": 64, "count": options.count(ECHOES[UCXX], 256), "connections": 256}
    yield peers.lane(contenders, "ucxx", MANY, UCXX, "echo_together", **numbers)
    count = options.count(20)
    yield peers.lane(contenders, "ucxx connecting", CONNECT, UCXX, "connect", count=count)


def connections_requirements(data: Data) -> Iterator[Requirement]:
    together = seconds(data, MANY, OURS)
    what = "256 connections echoing: times the rate of"
    found = ratio(seconds(data, ONE, OURS), together)
    yield at_least(f"{what} one connection", 1, found)
    found = ratio(seconds(data, MANY, UNIX), together)
    yield at_least(f"{what} uvloop Unix protocols", 1, found)
    for who, how in ((OURS, "exchange"), (EACH, "exchange, a socket each"), (MANAGER, "CM")):
        found = faster(data, CONNECT, who, UCXX)
        yield at_least(f"connect and close by the {how}: times ucxx", 1.5, found)
    found = faster(data, CONNECT, MANAGER, TCP)
    yield at_least("connect and close by the CM: times uvloop TCP", 1 / 3, found)


CONNECTIONS = Comparison(
    "Connections",
    "Messages of 64 B there and back, in all a second: on one connection and on 256, with one "
    "of them under way on each. Connections made and closed one "
    'after another while another one stays, a second: aiordma by the exchange (`via="tcp"`), where '
    "each is asked for over the one that stays, the same with an exchange on a TCP socket for each "
    "(`Config.in_band` off), and by the connection manager. And 200 made before the first of them "
    'is closed. A core each. Up to commit 6f6a183, `via="tcp"` took over the queue pair of a '
    "connection that had been closed; later figures are without that.",
    connections_lanes,
    connections_requirements,
    "a second",
    lambda work, seconds: 1 / seconds,
    style="one message under way on each connection; one task that awaits `connect` and `close`",
)

# ---- over TCP ------------------------------------------------------------------------------------

EXCHANGE, VERBS = "aiordma, exchange", "C"
OVER_TCP_WAYS = {
    OURS: "aiordma over TCP",
    EXCHANGE: "aiordma exchange over TCP",
    TCP: "TCP protocol",
}
Job = tuple[str, str, dict[str, int], dict[str, float | None]]
# Work, the kind of job, its numbers, and what is asked of the speed of a TCP protocol, if anything;
# of connecting twice what it was when each queue pair had a TCP connection of its own.
JOBS: list[Job] = [
    (MANY, "echo_together", {"size": 64, "count": 25_600, "connections": 256}, {OURS: 1}),
    ("64 KiB, one way", "send_many", {"size": 64 << 10, "count": 2048, "window": 16}, {OURS: 0.9}),
    ("1 MiB, one way", "send_many", {"size": 1 << 20, "count": 256, "window": 4}, {OURS: 1.2}),
    ("64 MiB, one way", "send_many", {"size": 64 << 20, "count": 8, "window": 2}, {OURS: 1.2}),
    (CONNECT, "connect", {"count": 200}, {OURS: None, EXCHANGE: None, VERBS: 1.2}),
    (
        "64 B echo beside messages of 1 MiB",
        "echo_beside",
        {"size": 64, "count": 200, "stream": 1 << 20},
        {OURS: 1},
    ),
]


def over_tcp_lanes(contenders: Contenders, options: Options) -> Iterator[Lane]:
    found = {who: contenders.python(way) for who, way in OVER_TCP_WAYS.items()}
    found[VERBS] = contenders.c("polling", "sleeping", "tcp")
    for work, kind, numbers, asked in JOBS:
        if numbers.get("size", 0) > options.most:
            continue
        unit = numbers.get("connections") or numbers.get("window") or 1
        job = {**numbers, "count": options.count(numbers["count"], unit)}
        for who in (*asked, TCP):
            yield Lane.of(found[who], work, who, kind, **job)


def over_tcp_requirements(data: Data) -> Iterator[Requirement]:
    for work, _, _, asked in JOBS:
        for who, least in asked.items():
            if least and seconds(data, work, who):
                found = faster(data, work, who, TCP)
                yield at_least(f"over TCP, {work}, {who}: times {TCP}s", least, found)


OVER_TCP = Comparison(
    "Over TCP",
    "The device's way to other hosts, within one: `AIORDMA_EMBEDDED_LINKS=tcp`. The time for a "
    "message of 64 B there and back, of 256 connections with one under way each; for a message one "
    "way; for a connection, made and closed while another one of the two processes stays, by the "
    'connection manager, by the exchange (`via="tcp"`), and in C, where it is a queue pair and a '
    "write; and for a 64 B message there and back while another connection of the two processes is "
    "full of messages of 1 MiB. A core each.",
    over_tcp_lanes,
    over_tcp_requirements,
    style="as for the connections; one way a window of futures of `send_nowait`",
)
