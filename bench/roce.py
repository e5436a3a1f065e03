"""A comparison of RoCE v2, as implemented by the embedded device, with UDP sockets.

The two ends are network namespaces connected by a pair of virtual Ethernet interfaces (veth).
Creating them requires root.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from aiordma.cli.run import library

from . import device
from .contender import Contender, Words, read_line, two_cores, write_line
from .lanes import (
    Comparison,
    Contenders,
    Data,
    Lane,
    Options,
    Requirement,
    at_most,
    ratio,
    seconds,
    take_turns,
)
from .perftest import End, InPerftest

NOTE = """\
This test compares RoCE v2 on the embedded device with a plain UDP socket. It measures half the
round-trip time between two network namespaces connected by a veth pair with an MTU of 4500.
`ib_send_lat` uses the embedded device over RoCE v2, and a C program exchanges datagrams over UDP
sockets. In each column, both programs poll or both wait for events. RoCE v2 requires two datagrams
per message, because the receiver acknowledges each message."""
PERFTEST, UDP = "aiordma's device with perftest", "UDP socket"
POLLING, WAITING = "64 B one way, polling", "64 B one way, event-driven"
AT_MOST = {POLLING: 1.5, WAITING: 1.2}

NETWORK = """
ip netns add bench-left
ip netns add bench-right
ip -n bench-left link add cable mtu 4500 type veth peer name cable netns bench-right mtu 4500
ip -n bench-left addr add 10.89.0.1/24 dev cable
ip -n bench-right addr add 10.89.0.2/24 dev cable
ip -n bench-left link set lo up
ip -n bench-right link set lo up
ip -n bench-left link set cable up
ip -n bench-right link set cable up
"""


def network(stack: ExitStack) -> None:
    for line in filter(None, NETWORK.split("\n")):
        if subprocess.run(line.split(), check=False).returncode:
            raise RuntimeError(f"{line!r} failed")
        if "netns add" in line:
            stack.callback(subprocess.run, line.replace("add", "del").split(), check=False)


@dataclass(frozen=True)
class Side:
    """A network namespace with an address, in which one of the programs runs."""

    namespace: str
    address: str

    @property
    def before(self) -> Words:
        """The command prefix that runs a command in the namespace."""
        return "ip", "netns", "exec", self.namespace

    def perftest(self) -> End:
        folder = library().parent
        words = (f"LD_PRELOAD={library()}", f"LD_LIBRARY_PATH={folder}")
        before = (*self.before, "env", "AIORDMA_EMBEDDED_LINKS=roce", *words)
        command = [*before, "ibv_devinfo", "-v", "-d", "embedded0"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(rf"GID\[ *(\d+)\]:\s*::ffff:{self.address}, RoCE v2", told)
        if found is None:
            raise RuntimeError(f"{self.address} has no GID:\n{told}")
        return End("embedded0", ("-x", found[1]), before, self.address)


SIDES = Side("bench-left", "10.89.0.1"), Side("bench-right", "10.89.0.2")
"""The end that opens connections, and the end that listens for them."""


class InUDP(Contender):
    """A contender that uses UDP sockets.

    Each job starts new processes, because a server left running would keep polling and slow down
    the other contenders.
    """

    new_process_per_job = True

    def __init__(self, waiting: str) -> None:
        super().__init__()
        self._waiting = waiting

    def do(self, kind: str, **numbers: Any) -> float:
        program = str(device.compiled("udp.c", "udp", [], []))
        addresses = [side.address for side in SIDES]
        asking, serving = (
            [*side.before, program, *both, self._waiting]
            for side, both in zip(SIDES, (addresses, addresses[::-1]), strict=True)
        )
        asks, serves = two_cores()
        with self._stack:
            self._stack.callback(self._start(serving, serves).kill)
            process = self._start([*asking, "asks"], asks)
            write_line(process, str(numbers["count"]))
            return float(read_line(process))


def lanes(contenders: Contenders, options: Options) -> Iterator[Lane]:
    beside = contenders.other(InPerftest, *(side.perftest() for side in SIDES))
    for work, events in (POLLING, {}), (WAITING, {"events": 1}):
        words = {"size": 64, "count": options.count(5000), **events}
        yield Lane.of(beside, work, PERFTEST, "send_lat", **words)
        udp = contenders.other(InUDP, "waiting" if events else "polling")
        yield Lane.of(udp, work, UDP, "echo", **words)


def measured(options: Options) -> Data:
    with ExitStack() as stack:
        network(stack)
        contenders = stack.enter_context(Contenders())
        return take_turns(list(lanes(contenders, options)), options)


def requirements(data: Data) -> Iterator[Requirement]:
    for work, most in AT_MOST.items():
        found = ratio(seconds(data, work, PERFTEST), seconds(data, work, UDP))
        yield at_most(f"{work}, over RoCE v2: time relative to a {UDP} in C", most, found)


COMPARISON = Comparison(
    "RoCE v2 compared with UDP",
    NOTE,
    lanes,
    requirements,
    ours=PERFTEST,
    caption="One-way time in us",
    elsewhere=measured,
)
