"""Tests of RoCE v2 between two machines, in separate packets over an unreliable network."""

from __future__ import annotations

import sys
from subprocess import PIPE, Popen, run

import pytest

from softdev.tests.programs.conftest import installed, run_pair_when

from .conftest import Agents, Start, address_of, connect, exchange, pair
from .namespaces import CABLE, Network


@pytest.fixture(autouse=True)
def roce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the agents' devices use RoCE v2."""
    monkeypatch.setenv("AIORDMA_EMBEDDED_LINKS", "roce")


@pytest.mark.parametrize("cable", [1280, 1500, 4500], ids="cable of {}".format)
def test_roce_queue_pairs_limit_packets_to_the_interface_mtu(
    agents: Agents, wire: Network, cable: int
) -> None:
    """The device reports an MTU whose packets fit the cable, because longer ones would be lost."""
    for end in wire.ends:
        end.link("mtu", str(cable))
    there = pair(agents, "RC", "IPv4")
    assert [agent.call("wire") for agent in agents] == ["roce", "roce"]
    for size in (0, 1, 1200, 65_537):
        exchange(agents, 20, size)
    exchange(agents, 1, 2 << 20)
    assert agents[0].call("reach", **there, size=1_000_003) == ["SUCCESS"] * 3
    pair(agents, "UC", "IPv4")
    for size in (1, 4096, 10_000):
        exchange(agents, 5, size)  # few enough for a socket buffer, because UC does not retransmit
    pair(agents, "UD", "IPv4")
    mtu = agents[0].call("longest_datagram")
    assert mtu == {1280: 1024, 1500: 1024, 4500: 4096}[cable]
    for size in (0, 1, mtu):
        exchange(agents, 5, size)


@pytest.mark.parametrize("kind", ["IPv6", "link-local"])
def test_roce_queue_pairs_exchange_data_over_ipv6(agents: Agents, kind: str) -> None:
    there = pair(agents, "RC", kind)
    for size in (1, 65_537):
        exchange(agents, 20, size)
    assert agents[0].call("reach", **there, size=100_003) == ["SUCCESS"] * 3
    pair(agents, "UD", kind)
    exchange(agents, 20, 1000)


@pytest.mark.parametrize("kind", ["IPv4", "IPv6"])
def test_roce_ignores_the_path_mtu_of_routes(agents: Agents, wire: Network, kind: str) -> None:
    """ICMP can forge a path MTU, so only the interface's MTU counts."""
    for end, peer in (wire.ends, wire.ends[::-1]):
        end.ip("route", "add", address_of(peer, kind), "dev", CABLE, "mtu", "1280")
    for end in wire.ends:
        end.link("mtu", "4500")
    pair(agents, "RC", kind)
    exchange(agents, 20, 65_537)


def test_connections_exchange_messages_over_roce(
    agents: Agents, wire: Network, family: str, via: str
) -> None:
    """The connection manager's packets are RoCE packets, too."""
    connect(agents, address_of(wire.right, family), via)
    left, _ = agents
    for size in (0, 1000, 4 << 20):
        left.call("echo", count=5, size=size)
    left.call("one_sided", rounds=3, size=1_000_003)


def test_datagrams_use_a_new_address_and_mtu_while_device_is_open(
    agents: Agents, wire: Network
) -> None:
    """A host may add an address and change its MTU while the device is open."""
    wire.left.link("mtu", "4500")
    pair(agents, "UD", "IPv4")
    left, right = agents
    assert left.call("longest_datagram") == 4096
    left.call("watch")
    wire.left.link("mtu", "1500")
    wire.left.add("10.77.0.11/24")
    assert left.call("event") == "GID_CHANGE"
    assert left.call("longest_datagram") == 1024
    ends = [left.call("make", kind="UD", ip="10.77.0.11")]
    ends.append(right.call("make", kind="UD", ip=wire.right.ipv4))
    for agent, peer in zip(agents, ends[::-1], strict=True):
        agent.call("bring_up", peer=peer["peer"], ack_timeout=1.0)
    exchange(agents, 5, 100)


@pytest.mark.parametrize(
    ("server", "client", "port"),
    [
        ("ibv_ud_pingpong -g 0 -s 1024", "{host}", 18515),
        ("rping -C 3 -a {host}", "-c", 4791),
        ("ucmatose", "-s {host}", 4791),
        ("udaddy", "-s {host}", 4791),
        ("ib_send_bw -R", "{host}", 4791),
        ("fi_pingpong -p verbs -e msg -S 64 -I 10", "{host}", 47592),
        ("fi_pingpong -p verbs -d embedded0-dgram -e dgram -S 64 -I 10", "{host}", 47592),
        ("fi_pingpong -p verbs;ofi_rxm -e rdm -S 64 -I 10", "{host}", 47592),
    ],
)
def test_rdma_programs_exchange_data_over_roce(
    wire: Network, server: str, client: str, port: int
) -> None:
    """These programs send datagrams or connect through librdmacm."""
    waits, asks = (f"{server} {last}".format(host=wire.right.ipv4) for last in ("", client))
    waits += " -s" * waits.startswith("rping")
    installed(waits.split(maxsplit=1)[0])

    def ready() -> bool:
        command = wire.right.command("cat", "/proc/net/tcp", "/proc/net/udp")
        tables = run(command, check=True, capture_output=True, text=True)
        return f":{port:04X} " in tables.stdout

    right, left = wire.right.command(*waits.split()), wire.left.command(*asks.split())
    for ended in run_pair_when(ready, right, left):
        ended.expect()


def test_request_to_an_exited_peer_fails_with_retry_exceeded(impatient: Agents) -> None:
    """The end of a peer is not announced, so the request fails after its retries as on a card."""
    left, right = impatient
    pair(impatient, "RC", "IPv4", ack_timeout=0.02)
    right.end()
    assert left.call("send", count=1, size=10) == ["RETRY_EXC_ERR"]


def test_several_processes_can_share_a_roce_address(
    wire: Network, start: Start, family: str
) -> None:
    """One process receives for the others. When it ends, another one takes over."""
    couples = [(start(wire.left), start(wire.right)) for _ in range(3)]
    for agents in couples:
        pair(agents, "RC", family)
    while couples:
        for agents in couples:
            exchange(agents, 20, 65_537)
        for agent in couples.pop(0):
            agent.end()


def test_bring_up_fails_when_the_roce_port_is_in_use(agents: Agents, wire: Network) -> None:
    """The kernel's rdma_rxe, for example, or another process may hold the port."""
    script = (
        "import socket, sys; taken = socket.socket(type=socket.SOCK_DGRAM);"
        "taken.bind(('', 4791)); print(flush=True); sys.stdin.read()"
    )
    command = wire.left.command(sys.executable, "-c", script)
    with Popen(command, stdin=PIPE, stdout=PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        ends = [agent.call("make", kind="RC", ip=agent.namespace.ipv4) for agent in agents]
        bring_up = agents[0].start("bring_up", peer=ends[1]["peer"], ack_timeout=1.0)
        assert "Address already in use" in bring_up.error()
        holder.communicate()
