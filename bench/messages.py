"""Comparisons of messages between two processes that have one core each.

The comparisons cover round trips, windows of messages, one-way streams, encryption, many
connections, and TCP links.
"""

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
    """Return a dict that maps names to contenders.

    The contenders are aiordma on each event loop, C, and the socket contenders in `names`. The name
    of a socket contender starts with its event loop, as in "uvloop TCP protocol".
    """
    found = {OURS: contenders.python(OURS), ASYNCIO: contenders.python(OURS, "asyncio")}
    for name in names:
        loop, _, way = name.partition(" ")
        found[name] = contenders.python(way, loop)
    return {**found, C: contenders.c()}


def faster(data: Data, work: str, who: str, whom: str) -> Spread:
    """Return the speed of `who` as a multiple of the speed of `whom`."""
    return ratio(seconds(data, work, whom), seconds(data, work, who))


# ---- there and back ------------------------------------------------------------------------------

COUNTS = {64: 500, 4 << 10: 500, 64 << 10: 200, 1 << 20: 40}
"""The number of round trips per turn, by message size in bytes."""

RIVALS = TCP, UNIX, "asyncio TCP protocol"
SLEEPING = "aiordma, polling=0"


def latency_lanes(contenders: Contenders, options: Options) -> Iterator[Lane]:
    echoing = {
        **runners(contenders, *RIVALS),
        SLEEPING: contenders.python("aiordma sleeping"),
        "C, event-driven": contenders.c("sleeping", "sleeping"),
    }
    for size in (size for size in COUNTS if size <= options.most):
        numbers = {"size": size, "count": options.count(COUNTS[size])}
        for who, contender in echoing.items():
            yield Lane.of(contender, size_name(size), who, "echo", **numbers)
        yield peers.lane(contenders, "ucxx", size_name(size), UCXX, "echo", **numbers)


def latency_requirements(data: Data) -> Iterator[Requirement]:
    for who, how, whom, least in (
        (OURS, "adaptive polling", TCP, 5),
        (SLEEPING, "`polling=0`", TCP, 1),
        (SLEEPING, "`polling=0`", UNIX, 1),
    ):
        what = f"64 B echo, {how}: speed relative to {whom}"
        yield at_least(what, least, faster(data, "64 B", who, whom))


LATENCY = Comparison(
    "Echo",
    """\
This test sends one message at a time and measures how long the echo takes to arrive. The value
for each turn is the median echo time in that turn.""",
    latency_lanes,
    latency_requirements,
    style="a task on each side that awaits `send` and `recv` in turn",
    caption="Round-trip time in us",
)

# ---- many at a time ------------------------------------------------------------------------------

OUTSTANDING, TASKS = "64 B, 64 outstanding", "64 B, 64 tasks"
# The message size in bytes, the window, and the number of messages per turn. A turn with a fifth of
# these messages took only 20 ms, and the processes spent much of it waking up and adapting their
# polling.
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
        f"64 B echoes, 64 outstanding: rate relative to {TCP}",
        3,
        faster(data, OUTSTANDING, OURS, TCP),
    )
    ours = seconds(data, TASKS, OURS)
    for work, how in ((TASKS, "with 64 tasks"), (OUTSTANDING, "without tasks")):
        yield at_least(
            f"64 B echoes from 64 tasks: rate relative to {TCP} {how}",
            1.5,
            ratio(seconds(data, work, TCP), ours),
        )


RATE = Comparison(
    "Rate",
    """\
This test measures how many 64 B messages per second are echoed on one connection with 64
messages in flight. With *64 tasks*, each task sends one message at a time and waits for its
echo. With *64 outstanding*, a single task keeps all messages in flight. In the socket programs,
an `asyncio.Protocol` replaces this task and sends the next message whenever an echo arrives.""",
    rate_lanes,
    rate_requirements,
    "messages/s",
    lambda work, seconds: 1 / seconds,
    style="one task that keeps 64 `send_nowait` messages in flight, or 64 tasks that each await "
    "`send` and `recv`",
    caption="Echoes per second",
)

# ---- encrypted -----------------------------------------------------------------------------------

SEALED = "aiordma, encrypted"
# Each message size is mapped to the number of round trips per turn, the number of one-way messages
# per turn, and the window for one-way messages. The inner tuple contains the goals for round trips
# and for one-way messages, as fractions of the speed without encryption. The goals are estimates.
# Without encryption, a long message is copied once, at up to 30 GB/s if it stays in the cache. With
# encryption, it is encrypted, copied and decrypted, and each step runs at up to 20 GB/s.
ENCRYPTED = {
    64: (500, 8000, 64, (0.5, 0.5)),
    64 << 10: (200, 8192, 16, (0.25, 0.2)),
    1 << 20: (40, 512, 4, (0.15, 0.15)),
}


def works(size: int) -> tuple[str, str]:
    return f"{size_name(size)}, round trip", f"{size_name(size)}, one way"


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
                yield at_least(f"encrypted, {work}: speed relative to unencrypted", least, found)


ENCRYPTION = Comparison(
    "Encryption",
    """\
This test shows how much time encryption (`encrypt=True`) adds to a message. Messages are
encrypted and decrypted with AES-256-GCM by the `cryptography` package, in the event loop's
thread. During round trips, one message is in flight at a time. During one-way transfers, several
messages are in flight.""",
    encryption_lanes,
    encryption_requirements,
    style="for round trips, the same as in Echo; for one-way transfers, a task that keeps several "
    "`send_nowait` messages in flight",
    caption="Time per message in us",
)

# ---- connections ---------------------------------------------------------------------------------

ONE, MANY = "one connection", "256 connections"
CONNECT, CONNECT_ALL = "connect and close", "connect all, then close"
EACH, MANAGER = "aiordma, one socket each", "aiordma, connection manager"
# The number of echoes per turn. With aiordma, a turn takes 0.1 s. Keep-alive probes, which all idle
# connections send at the start of a turn, would distort the result of a shorter turn.
ECHOES = {OURS: 64_000, TCP: 6400, UNIX: 6400, UCXX: 2560}
# The worker for each connection method, and the number of connections to make per turn. With this
# number, a turn takes 0.1 s.
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
    what = "64 B echoes on 256 connections: rate relative to"
    found = ratio(seconds(data, ONE, OURS), together)
    yield at_least(f"{what} one connection", 1, found)
    found = ratio(seconds(data, MANY, UNIX), together)
    yield at_least(f"{what} {UNIX}", 1, found)
    for who, how in (
        (OURS, "TCP bootstrap"),
        (EACH, "TCP bootstrap, one socket each"),
        (MANAGER, "connection manager"),
    ):
        found = faster(data, CONNECT, who, UCXX)
        yield at_least(f"connect and close, {how}: rate relative to ucxx", 1.5, found)
    found = faster(data, CONNECT, MANAGER, TCP)
    what = f"connect and close, connection manager: rate relative to {TCP}"
    yield at_least(what, 1 / 3, found)


CONNECTIONS = Comparison(
    "Connections",
    """\
This test measures how many 64 B messages per second are echoed across all connections, with
one message in flight on each connection. It also measures how many connections per second can
be opened and closed. *Connect and close* closes each connection before it opens the next one.
*Connect all, then close* first opens 200 connections.

One connection stays open throughout the test. *aiordma* (`via="tcp"`) sets up the other
connections over the open connection. *One socket each* disables this feature
(`Config.in_band`) and uses a TCP socket for each connection.""",
    connections_lanes,
    connections_requirements,
    "per second",
    lambda work, seconds: 1 / seconds,
    style="for echoes, one task per connection that awaits `send` and `recv`; for the other "
    "columns, a task that awaits `connect` and `close`",
    caption="Echoes and connections per second",
)

# ---- over TCP ------------------------------------------------------------------------------------

EXCHANGE, VERBS = "aiordma, TCP bootstrap", "C"
OVER_TCP_WAYS = {
    OURS: "aiordma over TCP",
    EXCHANGE: "aiordma exchange over TCP",
    TCP: "TCP protocol",
}
Job = tuple[str, str, dict[str, int], dict[str, float | None]]
# Each row contains the work, the kind of job, the job's arguments, and the goals for the speed
# relative to a TCP protocol (None if there is no goal). The goal for connecting is twice the speed
# measured when each queue pair used a separate TCP connection.
JOBS: list[Job] = [
    (MANY, "echo_together", {"size": 64, "count": 25_600, "connections": 256}, {OURS: 1}),
    ("64 KiB, one way", "send_many", {"size": 64 << 10, "count": 2048, "window": 16}, {OURS: 0.9}),
    ("1 MiB, one way", "send_many", {"size": 1 << 20, "count": 256, "window": 4}, {OURS: 1.2}),
    ("64 MiB, one way", "send_many", {"size": 64 << 20, "count": 8, "window": 2}, {OURS: 1.2}),
    (CONNECT, "connect", {"count": 200}, {OURS: None, EXCHANGE: None, VERBS: 1.2}),
    (
        "64 B echo next to 1 MiB messages",
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
                what = f"over TCP links, {work}{', C' if who == VERBS else ''}"
                yield at_least(f"{what}: speed relative to {TCP}", least, found)


OVER_TCP = Comparison(
    "Over TCP",
    """\
Between hosts, the embedded device uses TCP links. This test measures the speed of TCP links.
Because both processes run on one host, `AIORDMA_EMBEDDED_LINKS=tcp` forces the device to use TCP.

- *256 connections*: the time per 64 B echo, with one message in flight on each connection.
- *Connect and close*: the time to set up and close a connection. aiordma and C use the
  connection manager, except in the *TCP bootstrap* column. In C, the time includes creating a
  queue pair and performing one write.
- *64 B echo next to 1 MiB messages*: the time per 64 B echo while another connection transfers
  1 MiB messages at full speed.""",
    over_tcp_lanes,
    over_tcp_requirements,
    style="for one-way transfers, a task that keeps several `send_nowait` messages in flight; "
    "otherwise, the same as in Connections",
    caption="Time per operation over TCP links in us",
)
