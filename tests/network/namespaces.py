"""Create two network namespaces connected by cables, and always remove them.

This needs Debian's iproute2 (ip-netns(8), veth(4)) and root. The names contain the id of the
process that created them. The next process removes what a killed one has left behind.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PREFIX = "aiordma-test"
CABLE = "cable"

# Skip duplicate address detection, which would take a second. Keep IPv6 addresses when the link
# goes down, because the kernel keeps IPv4 addresses, too.
IPV6_SETTINGS = {"accept_dad": 0, "keep_addr_on_down": 1}


def ip(*words: str, check: bool = True) -> str:
    """Run an iproute2 command and return its output. If it fails, the test fails."""
    try:
        done = subprocess.run(
            ["ip", *words], capture_output=True, text=True, timeout=60, check=False
        )
    except FileNotFoundError:
        pytest.fail("ip is missing: on Debian, apt-get install iproute2", pytrace=False)
    if check and done.returncode:
        pytest.fail(f"ip {' '.join(words)}: {done.stderr.strip()}", pytrace=False)
    return done.stdout


@dataclass(frozen=True)
class Namespace:
    """The namespace at one end of a cable. It contains this end and `lo`."""

    name: str
    ipv4: str
    ipv6: str
    cable: str = CABLE

    def ip(self, *words: str) -> str:
        """Run `ip` in the namespace."""
        return ip("-n", self.name, *words)

    def link(self, *words: str) -> None:
        """Run `ip link set` for this end of the cable, for example with `down` or `mtu 1280`."""
        self.ip("link", "set", self.cable, *words)

    def add(self, address: str) -> None:
        """Add an address that is usable immediately, without duplicate address detection."""
        nodad = ("nodad",) if ":" in address else ()
        self.ip("addr", "add", address, "dev", self.cable, *nodad)

    def remove(self, address: str) -> None:
        self.ip("addr", "del", address, "dev", self.cable)

    @property
    def link_local(self) -> str:
        """The link-local IPv6 address."""
        told = self.ip("-6", "-o", "addr", "show", "dev", self.cable, "scope", "link")
        found = re.search(r"inet6 (fe80:[0-9a-f:]+)/", told)
        assert found is not None, told
        return found[1]

    @property
    def carried(self) -> int:
        """The number of bytes sent and received over the cable."""
        counted = json.loads(self.ip("-s", "-j", "link", "show", self.cable))[0]["stats64"]
        return int(counted["rx"]["bytes"] + counted["tx"]["bytes"])

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs a command in the namespace."""
        return ["ip", "netns", "exec", self.name, *words]


@dataclass(frozen=True)
class Network:
    """A network of cables. Each cable is represented by its two ends."""

    cables: tuple[tuple[Namespace, Namespace], ...]

    @property
    def ends(self) -> tuple[Namespace, Namespace]:
        """Both ends of the first cable."""
        return self.cables[0]

    @property
    def left(self) -> Namespace:
        return self.ends[0]

    @property
    def right(self) -> Namespace:
        return self.ends[1]


def sweep() -> None:
    """Remove the namespaces of processes that have ended."""
    for line in ip("netns", "list").splitlines():
        found = re.match(rf"{PREFIX}-(\d+)-", line)
        if found and not Path("/proc", found[1]).exists():
            ip("netns", "del", line.split()[0], check=False)


def ends_of(number: int) -> tuple[Namespace, Namespace]:
    """Return both ends of a cable. Each cable has its own IPv4 and IPv6 subnets."""
    left, right = (
        Namespace(
            f"{PREFIX}-{os.getpid()}-{side}",
            f"10.{77 + number}.0.{host}",
            f"fd{77 + number}::{host}",
            f"{CABLE}{number or ''}",
        )
        for host, side in enumerate(("left", "right"), 1)
    )
    return left, right


@contextmanager
def network(cables: int = 1) -> Iterator[Network]:
    """Create two namespaces with cables between them. Each end has an IPv4 and an IPv6 address."""
    if os.geteuid() != 0:
        pytest.fail("network namespaces need root: sudo make network", pytrace=False)
    sweep()
    made = Network(tuple(map(ends_of, range(cables))))
    try:
        for end in made.ends:
            ip("netns", "add", end.name)
            end.ip("link", "set", "lo", "up")
            for setting, value in IPV6_SETTINGS.items():
                path = f"/proc/sys/net/ipv6/conf/default/{setting}"
                ip("netns", "exec", end.name, "sh", "-c", f"echo {value} >{path}")
        for left, right in made.cables:
            peer = ("peer", "name", right.cable, "netns", right.name)
            left.ip("link", "add", left.cable, "type", "veth", *peer)
            for end in (left, right):
                end.add(f"{end.ipv4}/24")
                end.add(f"{end.ipv6}/64")
                end.link("up")
        yield made
    finally:
        for end in made.ends:
            ip("netns", "del", end.name, check=False)
