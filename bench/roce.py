"""The embedded device over RoCE v2, beside the kernel's rxe to rxe: both through a pair of virtual
Ethernet interfaces (veth) of the same MTU, with perftest and with aiordma's own connections.

    python -m bench.roce TURNS SHARE    in the virtual machine of softdev/tests/softroce: measures,
                                        and prints a line of JSON

The embedded device has its ends in two network namespaces.  The rxe of Linux 6.1 uses the first
one alone: both of its ends are there, and rules of routing send what goes from one to the other
over the cable.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from aiordma.cli.run import library

from .contender import Words
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
from .perftest import MARK, End, InPerftest, in_machine

NOTE = (
    "Two of each device, joined by a pair of virtual Ethernet interfaces with an MTU of 4500, in a "
    "virtual machine whose processor is emulated: times there mean nothing, ratios little. Of 64 "
    "KiB and 1 MiB many messages are under way: the time for one of them. Half a round trip is "
    "what perftest calls latency."
)

EMBEDDED, RXE = "embedded", "rxe"
NETWORK = """
modprobe veth
ip netns add bench-left
ip netns add bench-right
ip -n bench-left link add cable mtu 4500 type veth peer name cable netns bench-right mtu 4500
ip -n bench-left addr add 10.89.0.1/24 dev cable
ip -n bench-right addr add 10.89.0.2/24 dev cable
ip -n bench-left link set lo up
ip -n bench-right link set lo up
ip -n bench-left link set cable up
ip -n bench-right link set cable up
ip link add left mtu 4500 type veth peer name right mtu 4500
ip addr add 10.88.0.1/32 dev left
ip addr add 10.88.0.2/32 dev right
ip link set left up
ip link set right up
sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.left.rp_filter=0
sysctl -qw net.ipv4.conf.right.rp_filter=0
sysctl -qw net.ipv4.conf.left.accept_local=1 net.ipv4.conf.right.accept_local=1
ip route add 10.88.0.2 dev left src 10.88.0.1 table 88
ip route add 10.88.0.1 dev right src 10.88.0.2 table 88
ip rule add pref 1 iif left lookup local
ip rule add pref 2 iif right lookup local
ip rule add pref 3 to 10.88.0.0/24 lookup 88
ip rule add pref 4 lookup local
ip rule del pref 0
rdma link add rxe_left type rxe netdev left
rdma link add rxe_right type rxe netdev right
"""


def make_network() -> None:
    for line in NETWORK.splitlines():
        if line and subprocess.run(line.split(), check=False).returncode:
            raise RuntimeError(f"{line!r} failed")


@dataclass(frozen=True)
class Side:
    """An end of a pair of devices: its device, its address, and its namespace if it has one."""

    device: str
    address: str
    namespace: str = ""

    @property
    def before(self) -> Words:
        """The words before a command there."""
        enter = ("ip", "netns", "exec", self.namespace) if self.namespace else ()
        return (*enter, "env", "AIORDMA_EMBEDDED_LINKS=roce", f"AIORDMA_DEVICE={self.device}")

    def perftest(self) -> End:
        before = self.before
        if self.namespace:
            folder = library().parent
            before += (f"LD_PRELOAD={library()}", f"LD_LIBRARY_PATH={folder}")
        command = [*before, "ibv_devinfo", "-v", "-d", self.device]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(rf"GID\[ *(\d+)\]:\s*::ffff:{self.address}, RoCE v2", told)
        if found is None:
            raise RuntimeError(f"{self.device} has no GID of {self.address}:\n{told}")
        host = self.address if self.namespace else "127.0.0.1"
        return End(self.device, ("-x", found[1]), before, host)


SIDES = {
    EMBEDDED: (
        Side("embedded0", "10.89.0.1", "bench-left"),
        Side("embedded0", "10.89.0.2", "bench-right"),
    ),
    RXE: (Side("rxe_left", "10.88.0.1"), Side("rxe_right", "10.88.0.2")),
}
"""The one that connects, and the one that listens."""


PERFTEST: dict[str, tuple[str, int, int, dict[str, int]]] = {
    "64 B send, half a round trip": ("send_lat", 64, 1000, {}),
    "64 B write, half a round trip": ("write_lat", 64, 1000, {}),
    **{
        f"{size_name(size)} {name}, path MTU {mtu}": (f"{name}_bw", size, count, {"mtu": mtu})
        for mtu in (1024, 4096)
        for size, count in ((64 << 10, 640), (1 << 20, 64))
        for name in ("send", "write")
    },
}
ECHO, SEND = "64 B echo of aiordma, both ways", "1 MiB send of aiordma"


def lanes(contenders: Contenders, options: Options) -> Iterator[Lane]:
    perftest = {
        who: contenders.other(InPerftest, *(side.perftest() for side in sides))
        for who, sides in SIDES.items()
    }
    for work, (kind, size, count, mtu) in PERFTEST.items():
        for who, beside in perftest.items():
            words = {"size": size, "count": options.count(count, 16), **mtu}
            yield Lane.of(beside, work, who, kind, **words)
    for who, sides in SIDES.items():
        before = tuple((*side.before, f"AIORDMA_BENCH_HOST={sides[1].address}") for side in sides)
        ours = contenders.python("aiordma exchange", before=before)
        yield Lane.of(ours, ECHO, who, "echo", size=64, count=options.count(500))
        many = options.count(64, 16)
        yield Lane.of(ours, SEND, who, "send_many", size=1 << 20, count=many, window=16)


def requirements(data: Data) -> Iterator[Requirement]:
    for work, _ in by_work(data):
        found = ratio(seconds(data, work, RXE), seconds(data, work, EMBEDDED))
        yield at_least(f"{work} over RoCE v2: times as fast as rxe", 1, found)


COMPARISON = Comparison(
    "RoCE v2, beside the kernel's rxe",
    NOTE,
    lanes,
    requirements,
    ours=EMBEDDED,
    elsewhere=partial(in_machine, "bench.roce"),
)

if __name__ == "__main__":
    make_network()
    with Contenders() as contenders:
        options = Options(int(sys.argv[1]), float(sys.argv[2]))
        print(MARK + json.dumps(take_turns(list(lanes(contenders, options)), options)), flush=True)
