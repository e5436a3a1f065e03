"""Many connections, and making them."""

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
    "Messages of 64 B there and back, in all a second: on one connection and on 256, with one "
    "of them under way on each. Connections made and closed one "
    'after another while another one stays, a second: aiordma by the exchange (`via="tcp"`), where '
    "each is asked for over the one that stays, the same with an exchange on a TCP socket for each "
    "(`Config.in_band` off), and by the connection manager. And 200 made before the first of them "
    'is closed. A core each. Up to commit 6f6a183, `via="tcp"` took over the queue pair of a '
    "connection that had been closed; later figures are without that."
)
UCXX = "ucxx, polling"
ONE, MANY = "one connection", "256 connections"
CONNECT, CONNECT_ALL = "connect and close", "connect, and close when all are there"
# Ours are more, for a tenth of a second: a turn begins with keep-alive for all that have idled.
COUNTS = {
    "aiordma": 64_000,
    "uvloop TCP protocol": 6400,
    "uvloop Unix protocol": 6400,
    UCXX: 2560,
}
# For a tenth of a second each.
CONNECTS = {
    "aiordma": 200,
    "aiordma, a socket each": 200,
    "aiordma, connection manager": 200,
    "uvloop TCP protocol": 2000,
    UCXX: 20,
}
ALL = 200


def lanes(contenders: Contenders, options: Options) -> Iterator[Lane]:
    ours, tcp = contenders.python("aiordma"), contenders.python("TCP protocol")
    unix = contenders.python("Unix protocol")
    rivals = {"aiordma": ours, "uvloop TCP protocol": tcp, "uvloop Unix protocol": unix}
    for work, connections in ((ONE, 1), (MANY, 256)):
        for who, contender in rivals.items():
            count = options.count(COUNTS[who], connections)
            numbers = {"size": 64, "count": count, "connections": connections}
            yield Lane.of(contender, work, who, "echo_together", **numbers)
    makers = {
        "aiordma": contenders.python("aiordma exchange"),
        "aiordma, a socket each": contenders.python("aiordma exchange, a socket each"),
        "aiordma, connection manager": ours,
        "uvloop TCP protocol": tcp,
    }
    for who, contender in makers.items():
        count = options.count(CONNECTS[who])
        yield Lane.of(contender, CONNECT, who, "connect", count=count)
        count = options.count(ALL)
        yield Lane.of(contender, CONNECT_ALL, who, "connect_all", count=count)
    numbers = {"size": 64, "count": options.count(COUNTS[UCXX], 256), "connections": 256}
    yield peers.lane(contenders, "ucxx", MANY, UCXX, "echo_together", **numbers)
    count = options.count(CONNECTS[UCXX])
    yield peers.lane(contenders, "ucxx connecting", CONNECT, UCXX, "connect", count=count)


def measure(options: Options) -> Data:
    with Contenders() as contenders:
        return take_turns(list(lanes(contenders, options)), options)


def requirements(data: Data) -> Iterator[Requirement]:
    together = seconds(data, MANY, "aiordma")
    found = ratio(seconds(data, ONE, "aiordma"), together)
    yield at_least(f"256 connections echoing: times the rate of {ONE}", 1, found)
    found = ratio(seconds(data, MANY, "uvloop Unix protocol"), together)
    yield at_least("256 connections echoing: times the rate of uvloop Unix protocols", 1, found)
    ucxx = seconds(data, CONNECT, UCXX)
    for who, how in (
        ("aiordma", "exchange"),
        ("aiordma, a socket each", "exchange, a socket each"),
        ("aiordma, connection manager", "CM"),
    ):
        found = ratio(ucxx, seconds(data, CONNECT, who))
        yield at_least(f"connect and close by the {how}: times ucxx", 1.5, found)
    tcp = seconds(data, CONNECT, "uvloop TCP protocol")
    found = ratio(tcp, seconds(data, CONNECT, "aiordma, connection manager"))
    yield at_least("connect and close by the CM: times uvloop TCP", 1 / 3, found)


COMPARISON = Comparison(
    "Connections",
    NOTE,
    measure,
    requirements,
    "a second",
    lambda work, seconds: 1 / seconds,
    style="a task for each connection, which awaits `send`, then `recv`; one task that awaits "
    "`connect` and `close`",
)
