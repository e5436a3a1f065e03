"""Tests of every kind of traffic between two machines, over IPv4 and IPv6, for each MTU."""

from __future__ import annotations

import pytest

from .conftest import Agents, Start, address_of, connect, exchange, pair
from .namespaces import CABLE, Network

# 1280 is the minimum MTU of IPv6 (RFC 8200, section 5), and 9000 is the usual MTU of jumbo frames.
MTUS = [(1500, 1500), (1280, 1280), (9000, 9000), (9000, 1280)]


@pytest.fixture(params=MTUS, ids=lambda mtus: f"{mtus[0]}-{mtus[1]}")
def mtus(request: pytest.FixtureRequest, wire: Network) -> tuple[int, int]:
    """Set the MTUs of both ends and provide them. They may differ."""
    value: tuple[int, int] = request.param
    for end, mtu in zip(wire.ends, value, strict=True):
        end.link("mtu", str(mtu))
    return value


def test_connections_transfer_messages_of_various_sizes(
    agents: Agents, wire: Network, family: str, via: str
) -> None:
    connect(agents, address_of(wire.right, family), via)
    left, _ = agents
    for size in (0, 1, 1000, 100_000):
        left.call("echo", count=20, size=size)
    left.call("echo", count=4, size=4 << 20)
    left.call("one_sided", rounds=5, size=1_000_003)


def test_queue_pairs_transfer_messages_of_various_sizes(
    agents: Agents, mtus: tuple[int, int], family: str
) -> None:
    """Test reliable and unreliable connections, and datagrams.

    The kernel reassembles a datagram from its fragments. A fragment that is longer than the
    receiver's MTU is lost, and the whole datagram with it.
    """
    there = pair(agents, "RC", family)
    for size in (1, 1200, 4096, 65_537):
        exchange(agents, 20, size)
    exchange(agents, 2, 1 << 20)
    assert agents[0].call("reach", **there, size=1_000_003) == ["SUCCESS"] * 3
    pair(agents, "UC", family)  # reliable in effect, because the cable loses nothing
    for size in (1, 4096, 65_537):
        exchange(agents, 20, size)
    pair(agents, "UD", family)
    for size in (1, 1000, 4096) if mtus[0] == mtus[1] else (1, 1000):
        exchange(agents, 20, size)


def test_connection_keeps_working_after_the_mtu_shrinks(
    agents: Agents, wire: Network, family: str, via: str
) -> None:
    """Frames in flight are segmented again when the MTU shrinks."""
    for end in wire.ends:
        end.link("mtu", "9000")
    connect(agents, address_of(wire.right, family), via)
    left, _ = agents
    left.call("echo", count=4, size=1 << 20)
    for end in wire.ends:
        end.link("mtu", "1280")
    left.call("echo", count=4, size=1 << 20)


def test_connections_use_several_addresses_of_an_interface_concurrently(
    agents: Agents, wire: Network, start: Start, via: str
) -> None:
    """Connections use IPv4, IPv6 and several addresses of one interface at the same time."""
    more = [("10.78.0", 24), ("fd78:", 64), ("10.79.0", 24)]
    for number, end in enumerate(wire.ends, 1):
        for prefix, length in more:
            separator = ":" if ":" in prefix else "."
            end.add(f"{prefix}{separator}{number}/{length}")
    hosts = [wire.right.ipv4, wire.right.ipv6, "10.78.0.2", "fd78::2", "10.79.0.2"]
    pairs = [agents, *((start(wire.left), start(wire.right)) for _ in hosts[1:])]
    for both, host in zip(pairs, hosts, strict=True):
        connect(both, host, via)
    orders = [both[0].start("echo", count=20, size=50_000) for both in pairs]
    for order in orders:
        order.result()


def test_connection_uses_the_requested_source_address(
    agents: Agents, wire: Network, via: str
) -> None:
    """Both ends report the requested address, although the kernel would choose another one."""
    wire.left.add("10.77.0.11/24")
    left, right = agents
    port = right.call("listen", host=wire.right.ipv4, via=via)
    serving = right.start("serve")
    told = left.call("connect", host=wire.right.ipv4, port=port, via=via, source="10.77.0.11")
    assert told[0] == serving.result()[0] == "10.77.0.11"
    left.call("echo", count=10, size=10_000)


def test_connections_work_over_link_local_addresses(
    agents: Agents, wire: Network, via: str
) -> None:
    """Link-local addresses need the name of the interface."""
    left, right = agents
    host = f"{wire.right.link_local}%{CABLE}"
    port = right.call("listen", host=host, via=via)
    serving = right.start("serve")
    left.call("connect", host=host, port=port, via=via)
    serving.result()
    left.call("echo", count=10, size=100_000)
    left.call("one_sided", rounds=2, size=100_000)


def test_queue_pairs_exchange_data_over_link_local_addresses(agents: Agents) -> None:
    """A GID has no interface, so the interface of the local GID entry is used."""
    for kind in ("RC", "UC", "UD"):
        pair(agents, kind, "link-local")
        exchange(agents, 20, 3000)
