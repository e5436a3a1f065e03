"""A path that delays, loses, reorders, doubles and damages packets: tc-netem(8).

Where the kernel of this machine has no netem, `make network` runs this in the virtual machine.
"""

from __future__ import annotations

import pytest

from .conftest import Agents, Start, address_of, connect, exchange, pair
from .namespaces import CABLE, Network

# Each in both directions.  What a bad day on a real network looks like, and worse.
PATHS = {
    "far": "delay 40ms",
    "uneven": "delay 20ms 15ms",
    "lossy": "delay 5ms loss 5%",
    "bursts": "delay 5ms loss gemodel 2% 20% 100% 0%",
    "reordered": "delay 10ms reorder 25% 50%",
    "doubled": "delay 2ms duplicate 20%",
    "damaged": "delay 2ms corrupt 2%",
    "narrow": "rate 20mbit delay 5ms limit 50",
}


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, wire: Network) -> str:
    """The name of the path, which is in effect."""
    name: str = request.param
    for end in wire.ends:
        end.tc("qdisc", "add", "dev", CABLE, "root", "netem", *PATHS[name].split())
    return name


@pytest.fixture
def agents(wire: Network, start: Start) -> Agents:
    """With the patience that is usual: such a path is silent for seconds now and then."""
    return start(wire.left, 20), start(wire.right, 20)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("family", "via"), [("IPv4", "tcp"), ("IPv6", "cm")])
def test_connections(agents: Agents, family: str, via: str) -> None:
    """They are made, they carry what they were given, and nothing fails."""
    left, right = agents
    connect(agents, address_of(right.namespace, family), via)
    left.call("echo", count=30, size=200)
    left.call("echo", count=5, size=50_000)
    left.call("one_sided", rounds=3, size=30_000)


@pytest.mark.usefixtures("path")
def test_reliable_queue_pairs(agents: Agents) -> None:
    """With the timeouts that everybody uses, which are meant for networks that lose nothing."""
    there = pair(agents, "RC", "IPv4")
    exchange(agents, 30, 1000)
    exchange(agents, 3, 60_000)
    assert agents[0].call("reach", **there, size=50_000) == ["SUCCESS"] * 3


@pytest.mark.usefixtures("path")
def test_unreliable_queue_pairs(agents: Agents) -> None:
    """Their stream repeats what the network loses: it is not lost to them."""
    left, right = agents
    pair(agents, "UC", "IPv6")
    # What is sent before the peer has been heard of may be lost; it comes before the rest if not.
    exchange(agents, 30, 1000)
    right.call("post", count=3, size=60_000)
    assert left.call("send", count=3, size=60_000) == ["SUCCESS"] * 3
    assert right.call("receive", count=3, size=60_000) == ["SUCCESS"] * 3


def test_datagrams(agents: Agents, path: str) -> None:
    """May get lost, overtake each other, come twice; what comes is whole."""
    left, right = agents
    pair(agents, "UD", "IPv4")
    right.call("post", count=60, size=3000)
    assert left.call("send", count=50, size=3000) == ["SUCCESS"] * 50
    numbers = right.call("datagrams", most=60, sent=50, size=3000)
    assert numbers
    if path in ("far", "narrow"):
        assert numbers == sorted(set(numbers))
    if path != "doubled":
        assert len(numbers) == len(set(numbers))
