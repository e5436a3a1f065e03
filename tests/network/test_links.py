"""Tests of two cables with a device for each at both ends.

The devices are set by AIORDMA_EMBEDDED_DEVICES=cable,cable1.
"""

from __future__ import annotations

import pytest

from .conftest import AgentProcess, Agents, Start, address_of, connect, exchange, pair
from .namespaces import CABLE, Network

MUCH = 2 << 20  # bytes
LITTLE = MUCH // 16  # exceeds the background traffic of the kernels


@pytest.fixture
def cables() -> int:
    return 2


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIORDMA_EMBEDDED_DEVICES", f"{CABLE},{CABLE}1")


@pytest.fixture(params=["tcp", "roce"])
def rails(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, wire: Network, start: Start
) -> list[Agents]:
    """Provide the agents of both devices, with one process per end."""
    monkeypatch.setenv("AIORDMA_EMBEDDED_LINKS", request.param)
    left, right = map(start, wire.ends)
    made = [
        (left.of(f"embedded{number}", ends[0]), right.of(f"embedded{number}", ends[1]))
        for number, ends in enumerate(wire.cables)
    ]
    for agent in (agent for agents in made for agent in agents):
        agent.call("watch")
        while agent.call("port") == "DOWN":  # until the kernel detects the peer
            agent.call("event")
    return made


def test_device_lists_only_the_addresses_of_its_interface(wire: Network, start: Start) -> None:
    """The addresses of a cable include those with a label.

    An address that both cables have belongs to the first device. Without its interface, a device
    keeps its loopback addresses, but its port is down.
    """
    agent = start(wire.left)
    for number, (end, others) in enumerate(
        zip(
            (wire.left, wire.cables[1][0]),
            ({"127.0.0.1", "::1", "10.98.0.1", "10.99.0.1"}, {"127.0.0.2", "10.98.1.1"}),
            strict=True,
        )
    ):
        label = f"{end.cable}:more"
        end.ip("addr", "add", f"10.98.{number}.1/24", "dev", end.cable, "label", label)
        end.add("10.99.0.1/24")
        device = agent.of(f"embedded{number}", end)
        assert device.call("gids").keys() == {end.ipv4, end.ipv6, end.link_local} | others
    end.ip("link", "del", end.cable)
    assert device.call("gids").keys() == {"127.0.0.2"}
    assert device.call("port") == "DOWN"


@pytest.mark.parametrize("links", ["shared", "tcp"])
def test_processes_on_the_same_host_use_the_configured_link(
    monkeypatch: pytest.MonkeyPatch, wire: Network, start: Start, links: str
) -> None:
    """One of the processes has a single device for all addresses."""
    monkeypatch.setenv("AIORDMA_EMBEDDED_LINKS", links)
    end = wire.cables[1][0]
    several = start(end).of("embedded1", end)
    monkeypatch.delenv("AIORDMA_EMBEDDED_DEVICES")
    agents = several, start(end)
    pair(agents, "RC", "IPv4")
    exchange(agents, 1, 1000)
    assert several.call("wire") == {"shared": "shared memory", "tcp": "tcp"}[links]


def test_multicast_group_is_joined_on_every_interface(wire: Network, start: Start) -> None:
    agent = start(wire.left)
    agent.call("make", kind="UD", ip=wire.left.ipv4)
    agent.call("join", group="239.1.2.3")
    for end, _ in wire.cables:
        assert "239.1.2.3" in end.ip("maddr", "show", "dev", end.cable)


def test_multicast_group_is_joined_on_an_interface_with_one_gid(
    wire: Network, start: Start
) -> None:
    wire.left.ip("-6", "addr", "flush", "dev", wire.left.cable)
    agent = start(wire.left)
    agent.call("make", kind="UD", ip=wire.left.ipv4)
    agent.call("join", group="239.1.2.3")
    assert "239.1.2.3" in wire.left.ip("maddr", "show", "dev", wire.left.cable)


def carry(agents: Agents, via: str, family: str) -> None:
    """Transfer MUCH bytes in both directions over queue pairs or a connection."""
    left, right = agents
    if via == "queue pairs":
        pair(agents, "RC", family)
        exchange(agents, 1, MUCH)
        return
    connect(agents, address_of(right.namespace, family), via)
    left.call("echo", count=2, size=MUCH // 2)


@pytest.mark.parametrize("via", ["cm", "tcp", "queue pairs"])
def test_data_uses_the_interface_of_its_address(rails: list[Agents], via: str, family: str) -> None:
    for number in (1, 0):
        before = [agents[0].namespace.carried for agents in rails]
        carry(rails[number], via, family)
        after = [agents[0].namespace.carried for agents in rails]
        more = [late - early for early, late in zip(before, after, strict=True)]
        assert more[number] > 2 * MUCH
        assert more[1 - number] < LITTLE


def test_connection_has_a_rail_on_each_interface(
    rails: list[Agents], via: str, family: str
) -> None:
    for number in (1, 0):
        left, right = rails[number]
        connect(
            (left.of("all", left.namespace), right.of("all", right.namespace)),
            address_of(right.namespace, family),
            via,
        )
        for side in (0, 1):
            agent, other = rails[number][side], rails[1 - number][side]
            assert agent.of("all", agent.namespace).call("rails") == [
                [agent.device, "lead", address_of(agent.namespace, family)],
                [other.device, "up", address_of(other.namespace, family)],
            ]
        for agent in (left, right):
            agent.of("all", agent.namespace).call("close")


def port_becomes(agent: AgentProcess, event: str, state: str) -> None:
    """Check the type of the next event, ignoring address changes, and the state of the port."""
    while (told := agent.call("event")) == "GID_CHANGE":
        pass
    assert told == event
    assert agent.call("port") == state


def test_link_failure_affects_only_one_device(
    rails: list[Agents], wire: Network, family: str
) -> None:
    """Requests of the cut device wait until its port is up again."""
    for agents in rails:
        pair(agents, "RC", family)
        exchange(agents, 1, 1)  # the queue pairs must meet before the cut
        for agent in agents:
            agent.call("watch")
    for cut in (1, 0):
        (left, right), others = rails[cut], rails[1 - cut]
        wire.cables[cut][1].link("down")
        for agent in (left, right):
            port_becomes(agent, "PORT_ERR", "DOWN")
        right.call("post", count=1, size=1000)
        sent = left.start("send", count=1, size=1000)
        exchange(others, 20, 100_000)
        assert others[0].call("port") == "ACTIVE"
        assert not sent.done()
        wire.cables[cut][1].link("up")
        for agent in (left, right):
            port_becomes(agent, "PORT_ACTIVE", "ACTIVE")
        assert sent.result() == right.call("receive", count=1, size=1000) == ["SUCCESS"]


def test_link_failure_breaks_only_connections_on_that_link(
    rails: list[Agents], wire: Network, via: str
) -> None:
    for agents in rails:
        connect(agents, agents[1].namespace.ipv4, via)
        agents[0].call("echo", count=1, size=1)
    (left, right), others = rails[1], rails[0]
    wire.cables[1][1].link("down")
    for agent in (left, right):  # each detects the loss with its own request
        assert "ConnectionBrokenError" in agent.start("echo", count=1, size=1).error()
        assert agent.call("ended")[0] == "ConnectionBrokenError"
    others[0].call("echo", count=20, size=100_000)
