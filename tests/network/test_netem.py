"""A path that delays, loses, reorders, doubles and damages packets: tc-netem(8).

Where the kernel of this machine has no netem, `make network` runs this in the virtual machine,
where starting a process takes long: so both agents serve for all tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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

# The same for RoCE v2, whose packets nothing but the device itself repeats.
ROCE_PATHS = {
    "far": "delay 20ms",
    "lossy": "delay 5ms loss 1%",
    "reordered": "delay 5ms reorder 25% 50%",
    "doubled": "delay 2ms duplicate 20%",
    "damaged": "delay 2ms corrupt 1%",
}

# Seconds: what the device takes unless told otherwise.  A lossy path may be silent for a while.
PATIENCE = 20


@pytest.fixture(scope="module")
def wire() -> Iterator[Network]:
    with network() as made:
        yield made


@contextmanager
def both(wire: Network, links: str | None = None) -> Iterator[Agents]:
    """An agent at each end; `links`: AIORDMA_EMBEDDED_LINKS."""
    with pytest.MonkeyPatch.context() as patch:
        if links:
            patch.setenv("AIORDMA_EMBEDDED_LINKS", links)
        agents = AgentProcess(wire.left, PATIENCE), AgentProcess(wire.right, PATIENCE)
    yield agents
    for agent in agents:
        agent.end()


@pytest.fixture(scope="module")
def agents(wire: Network) -> Iterator[Agents]:
    with both(wire) as made:
        yield made


@pytest.fixture(scope="module")
def roce_agents(wire: Network) -> Iterator[Agents]:
    with both(wire, "roce") as made:
        yield made


@contextmanager
def applied(wire: Network, path: str) -> Iterator[None]:
    for end in wire.ends:
        end.tc("qdisc", "add", "dev", CABLE, "root", "netem", *path.split())
    try:
        yield
    finally:
        for end in wire.ends:
            end.tc("qdisc", "del", "dev", CABLE, "root")


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, wire: Network) -> Iterator[str]:
    """Apply a path; return its name."""
    name: str = request.param
    with applied(wire, PATHS[name]):
        yield name


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

    # Datagrams get lost, overtake each other (on any path: netem hands packets from one core to
    # another), come twice; what comes is whole.
    # In three packets, or in one where each may have a wrong bit: two of them in a datagram can
    # cancel each other in UDP's checksum.
    size = 1000 if path == "damaged" else 3000
    pair(agents, "UD", family)
    right.call("post", count=60, size=size)
    assert left.call("send", count=50, size=size) == ["SUCCESS"] * 50
    numbers = right.call("datagrams", most=60, sent=50, size=size)
    assert numbers
    if path != "doubled":
        assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("name", ROCE_PATHS)
def test_roce(roce_agents: Agents, wire: Network, name: str) -> None:
    """RoCE v2 repeats what is lost, and takes nothing twice and no wrong byte."""
    family = "IPv6" if name == "lossy" else "IPv4"
    left, right = roce_agents
    with applied(wire, ROCE_PATHS[name]):
        connect(roce_agents, address_of(right.namespace, family), "tcp")
        left.call("echo", count=20, size=200)
        left.call("echo", count=3, size=200_000)
        left.call("one_sided", rounds=2, size=300_000)
        for agent in roce_agents:
            agent.call("close")
        there = pair(roce_agents, "RC", family, ack_timeout=0.067)
        assert [agent.call("wire") for agent in roce_agents] == ["roce", "roce"]
        exchange(roce_agents, 30, 1000)
        exchange(roce_agents, 3, 200_000)
        assert left.call("reach", **there, size=1_000_003) == ["SUCCESS"] * 3
