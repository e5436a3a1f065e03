"""What a flood of offers without the key does to clients that have it.

Three processes of this machine, on the embedded device: a server with `auth`, a flood of whole
first messages that say that a key is there and prove nothing, and a client with the key, which
connects and closes, one connection after the other. The sources of the flood are addresses of
127.0.0.0/8, in as many /24 networks as is said; the client has a network of its own. Of the
server's time, which depends less on what else the machine does, follows how many a core can answer.

python -m bench.flood serve VIA
python -m bench.flood send VIA PORT RATE SOURCES NETWORKS SECONDS
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from statistics import median
from typing import NamedTuple, Self, cast

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import aiordma
from aiordma._core.handshake import Endpoint, Hello
from aiordma._transport.connect_tcp import MAGIC
from aiordma.transport import Via

from .end import allow_files

KEY = bytes(range(32))
HOST = "127.0.0.1"
FIRST = int(ipaddress.IPv4Address("127.10.0.1"))
CLIENT = "127.200.0.1"

CASES = [(1, 1), (8, 1), (8, 8), (256, 1), (256, 256)]
"""Sources of the flood, and the /24 networks that they are in."""

OPEN = 2048
"""Offers that the flood keeps open before it closes the oldest: more than a listener has places."""

TICK = 0.001

PAUSE = 0.01
"""Seconds between two connections of the client: it shares the processor with what is measured."""

SETTLES = 0.5
IDLE = 0.02
"""Seconds after which the server is taken to be done if it has used no more of the CPU than so many
of a second in a second."""

IP_BIND_ADDRESS_NO_PORT = 24
"""ip(7): `bind` chooses no port, of which each pair of addresses may then use all."""


class Row(NamedTuple):
    """`sent` in a second; `cpu`: the server's seconds for one of them."""

    sent: float
    connected: int
    tried: int
    median: float
    cpu: float


def first_message(via: Via) -> bytes:
    hello = Hello(
        eager_size=8192,
        data_receives=16,
        control_receives=16,
        max_message=1 << 30,
        lend_quota=1 << 30,
        authenticates=True,
    ).pack()
    if via == "tcp":
        gid = bytes(10) + b"\xff\xff" + socket.inet_aton(HOST)
        return MAGIC + Endpoint(gid=gid, qp_num=77, psn=1, lid=1, mtu=3).pack() + hello
    # REQ of the embedded device's connection manager (native/softdev/cm/cm_wire.h).
    body = struct.pack("<IIHBBBBBBIIH", 77, 1, 0x0106, 2, 1, 1, 0, 6, 7, 0, 0, 0)
    body += hello.ljust(56, b"\0")
    return b"ARCM" + struct.pack("<BBH", 2, 1, len(body)) + body


async def serve(via: Via) -> None:
    """Prints its port, then its seconds of CPU for each line of its input."""
    allow_files()

    async def handler(conn: aiordma.Connection) -> None:
        await conn.wait_closed()

    async with await aiordma.start_server(handler, HOST, via=via, auth=KEY) as server:
        print(server.port, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(time.process_time(), flush=True)


def send(via: Via, port: int, rate: int, sources: int, networks: int, seconds: float) -> None:
    """Prints that it begins, and in the end how many it has sent, with the seconds that took."""
    allow_files()
    data = first_message(via)
    hosts = [
        str(ipaddress.IPv4Address(FIRST + (n % networks << 8) + n // networks))
        for n in range(sources)
    ]
    held: deque[socket.socket] = deque()
    sent, begin = 0, time.monotonic()
    print("begins", flush=True)
    while (passed := time.monotonic() - begin) < seconds:
        if sent >= passed * rate:
            time.sleep(TICK)
            continue
        offer = socket.socket()
        offer.setblocking(False)
        with suppress(OSError):  # the listener's queue in the kernel is full
            offer.setsockopt(socket.SOL_IP, IP_BIND_ADDRESS_NO_PORT, 1)
            offer.bind((hosts[sent % sources], 0))
            offer.connect_ex((HOST, port))
            offer.send(data)
        sent += 1
        held.append(offer)
        if len(held) > OPEN:
            held.popleft().close()
    print(sent / passed, flush=True)


class Child:
    """Another process of this module, in `with`, which ends with its input."""

    def __init__(self, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.flood", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


async def visit(via: Via, port: int, end: float) -> list[float | None]:
    """The seconds that each connect took until then; None: it came to nothing."""
    config = aiordma.Config(connect_timeout=5.0, in_band=False)
    took: list[float | None] = []
    while (begin := time.monotonic()) < end:
        try:
            conn = await aiordma.connect(
                HOST, port, via=via, auth=KEY, source=(CLIENT, 0), config=config
            )
        except (aiordma.RDMAError, OSError):
            took.append(None)
        else:
            took.append(time.monotonic() - begin)
            await conn.close()
        await asyncio.sleep(PAUSE)
    return took


def settled(server: Child) -> float:
    """The server's seconds of CPU once it has nothing more to do."""
    used = -1.0
    while True:
        server.ask()
        before, used = used, float(server.answer())
        if used - before < IDLE * SETTLES:
            return used
        time.sleep(SETTLES)


def measure(via: Via, rate: int, sources: int, networks: int, seconds: float) -> Row:
    with Child("serve", via) as server:
        port = int(server.answer())
        before = settled(server)
        with Child("send", via, port, rate, sources, networks, seconds + 1) as flood:
            flood.answer()
            took = asyncio.run(visit(via, port, time.monotonic() + seconds))
            sent = float(flood.answer())
        cpu = settled(server) - before
    connected = [seconds for seconds in took if seconds is not None]
    return Row(
        sent, len(connected), len(took), median(connected or [0.0]), cpu / sent / (seconds + 1)
    )


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser("bench flood", description=__doc__)
    parser.add_argument("--via", choices=["cm", "tcp"], action="append")
    parser.add_argument("--rate", type=int, default=5000, help="offers a second (%(default)s)")
    parser.add_argument(
        "--case", type=int, nargs=2, action="append", metavar=("SOURCES", "NETWORKS")
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="for each row (%(default)s)")
    options = parser.parse_args(arguments)
    table = Table(box=SIMPLE_HEAD)
    for name in (
        "via",
        "sources",
        "networks",
        "offers/s",
        "connected",
        "median",
        "CPU/offer",
        "a core",
    ):
        table.add_column(name, justify="right")
    for via in options.via or ["cm", "tcp"]:
        for sources, networks in options.case or CASES:
            row = measure(via, options.rate, sources, networks, options.seconds)
            table.add_row(
                via,
                str(sources),
                str(networks),
                f"{row.sent:.0f}",
                f"{row.connected} of {row.tried}",
                f"{row.median * 1e3:.1f} ms",
                f"{row.cpu * 1e6:.0f} µs",
                f"{1 / row.cpu:.0f}/s",
            )
    Console(width=100).print(table)


if __name__ == "__main__":
    role, way, *numbers = sys.argv[1:]
    if role == "serve":
        asyncio.run(serve(cast("Via", way)))
    else:
        port, rate, sources, networks = map(int, numbers[:4])
        send(cast("Via", way), port, rate, sources, networks, float(numbers[4]))
