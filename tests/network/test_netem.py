"""A path that delays, loses, reorders, doubles and damages packets: tc-netem(8).

Where the kernel of this machine has no netem, `make network` runs this in the virtual machine,
where starting a process takes long: so both agents serve for all tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .conftest import AgentProcess, Agents, address_of, connect, exchange, pair
from .namespaces import CABLE, Network, network

# Each in both directions.  What a bad day on a real network looks like, and worse.
PATHS = {
    "far": "delay 40ms",
    "uneven": "delay 20ms 15ms",
    "lossy": "delay 5ms loss 3%",
    "very lossy": "loss 10%",
    "reordered": "delay 10ms reorder 25% 50%",
    "doubled": "delay 2ms duplicate 20%",
    "damaged": "delay 2ms corrupt 2%",
    "narrow": "rate 20mbit delay 5ms limit 50",
}
WAYS = [("IPv4", "tcp"), ("IPv6", "cm")]

# Seconds: what the device takes unless told otherwise.  A lossy path may be silent for a while.
PATIENCE = 20


@pytest.fixture(scope="module")
def wire() -> Iterator[Network]:
    with network() as made:
        yield made


@pytest.fixture(scope="module")
def agents(wire: Network) -> Iterator[Agents]:
    both = AgentProcess(wire.left, PATIENCE), AgentProcess(wire.right, PATIENCE)
    yield both
    for agent in both:
        agent.end()


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, wire: Network) -> Iterator[str]:
    """Apply a path; return its name."""
    name: str = request.param
    for end in wire.ends:
        end.tc("qdisc", "add", "dev", CABLE, "root", "netem", *PATHS[name].split())
    yield name
    for end in wire.ends:
        end.tc("qdisc", "del", "dev", CABLE, "root")


def test_all_traffic(agents: Agents, path: str) -> None:
    """Nothing fails on the path, and every byte is correct; only datagrams may be lost."""
    family, via = WAYS[list(PATHS).index(path) % 2]
    left, right = agents

    # Connections are made, and carry what they were given.
    connect(agents, address_of(right.namespace, family), via)
    left.call("echo", count=30, size=200)
    left.call("echo", count=3, size=50_000)
    left.call("one_sided", rounds=2, size=30_000)
    for agent in agents:
        agent.call("close")

    # Queue pairs with the usual timeouts, which are meant for better networks.
    there = pair(agents, "RC", family, ack_timeout=0.067)
    exchange(agents, 30, 1000)
    assert left.call("reach", **there, size=50_000) == ["SUCCESS"] * 3

    # The stream of unreliable ones repeats what the network loses.
    pair(agents, "UC", family)
    exchange(agents, 30, 1000)

    # Datagrams get lost, overtake each other, come twice; what comes is whole.
    # In three packets, or in one where each may have a wrong bit: two of them in a datagram can
    # cancel each other in UDP's checksum.
    size = 1000 if path == "damaged" else 3000
    pair(agents, "UD", family)
    right.call("post", count=60, size=size)
    assert left.call("send", count=50, size=size) == ["SUCCESS"] * 50
    numbers = right.call("datagrams", most=60, sent=50, size=size)
    assert numbers
    if path in ("far", "narrow"):
        assert numbers == sorted(set(numbers))
    if path != "doubled":
        assert len(numbers) == len(set(numbers))
