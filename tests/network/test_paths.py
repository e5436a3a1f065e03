"""Tests of paths that fail temporarily or for good, and of addresses that are removed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from aiordma.verbs import GID, Endpoint

from .agent import SECONDS
from .conftest import IMPATIENCE, Agents, Order, Start, address_of, connect, exchange, pair
from .namespaces import Namespace, Network

# A path is cut for this many seconds. TCP loses a retransmission in this time, but the path timeout
# does not expire.
A_WHILE = 1.0


@pytest.fixture(params=["IPv4-cm", "IPv6-tcp"])
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Provide an address family and a connection method. The two pairs cover all four values."""
    family, via = request.param.split("-")
    return family, via


@pytest.fixture(params=["left", "right"])
def cut(request: pytest.FixtureRequest, wire: Network) -> Namespace:
    """Provide the left or the right end of the cable. The test takes this end down."""
    end: Namespace = getattr(wire, request.param)
    return end


def stays_open(order: Order, seconds: float) -> None:
    """Check that a command does not finish within `seconds`."""
    deadline = time.monotonic() + seconds
    while not order.done() and (left := deadline - time.monotonic()) > 0:
        order.agent.read(left)
    assert not order.done(), order.agent.answers


# ---- for a while ---------------------------------------------------------------------------------


def test_idle_connection_survives_a_temporary_link_failure(
    agents: Agents, cut: Namespace, way: tuple[str, str]
) -> None:
    """The link goes down while the connection is idle. Later messages wait until it is up."""
    left, right = agents
    connect(agents, address_of(right.namespace, way[0]), way[1])
    left.call("echo", count=10, size=1000)
    for count, size in ((10, 1000), (20, 1 << 20)):
        cut.link("down")
        echo = left.start("echo", count=count, size=size)
        stays_open(echo, A_WHILE)
        cut.link("up")
        echo.result()
    left.call("one_sided", rounds=3, size=100_000)


def test_frames_in_flight_survive_a_temporary_link_failure(
    agents: Agents, cut: Namespace, family: str
) -> None:
    """Frames of RC and UC queue pairs are in flight in both directions."""
    left, right = agents
    for kind in ("RC", "UC"):
        there = pair(agents, kind, family)
        exchange(agents, 1, 1)
        right.call("post", count=8, size=200_000)
        receiving = right.start("receive", count=8, size=200_000)
        left.call("post", count=8, size=200_000)
        answer = left.start("receive", count=8, size=200_000)
        orders = [agent.start("send", count=8, size=200_000) for agent in (left, right)]
        cut.link("down")
        left.read(A_WHILE)
        cut.link("up")
        for order in (receiving, answer, *orders):
            assert order.result() == ["SUCCESS"] * 8
        if kind == "RC":
            assert left.call("reach", **there, size=100_000) == ["SUCCESS"] * 3


def test_connection_survives_temporary_loss_of_its_address(
    agents: Agents, cut: Namespace, way: tuple[str, str]
) -> None:
    """The device reports the change, and the connection waits for the address."""
    left, right = agents
    family, via = way
    address = f"{address_of(cut, family)}/{24 if family == 'IPv4' else 64}"
    agent = left if cut is left.namespace else right
    connect(agents, address_of(right.namespace, family), via)
    index = agent.call("gids")[address_of(cut, family)]
    agent.call("watch")
    cut.remove(address)
    assert agent.call("event") == "GID_CHANGE"
    assert address_of(cut, family) not in agent.call("gids")
    echo = left.start("echo", count=10, size=10_000)
    stays_open(echo, A_WHILE)
    cut.add(address)
    assert agent.call("event") == "GID_CHANGE"
    assert agent.call("gids")[address_of(cut, family)] == index
    echo.result()


def test_stopped_peer_process_does_not_break_the_connection(
    impatient: Agents, wire: Network, via: str
) -> None:
    """The peer's kernel still answers probes, so operations wait beyond the path timeout."""
    left, right = impatient
    connect(impatient, wire.right.ipv4, via)
    left.call("echo", count=1, size=1)  # the queue pairs must meet before the stop
    right.stop()
    echo = left.start("echo", count=8, size=8 << 20)
    stays_open(echo, 2 * IMPATIENCE)
    right.go_on()
    echo.result()


# ---- for good ------------------------------------------------------------------------------------


def lost(order: Order, since: float) -> list[str]:
    """Check that the network failure ended the connection, and return the reported error."""
    told: list[str] = order.result()
    kind, text, cause = told
    assert kind == "ConnectionBrokenError", told
    assert "network has failed" in text, told
    assert cause != "None", told
    # The kernel sends its first probe after an idle period of half the path timeout. This period
    # may have begun before the cut, so the error may come less than a path timeout after it.
    assert time.monotonic() - since > IMPATIENCE / 3, "sooner than it may"
    return told


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_both_sides_detect_a_lost_path(
    impatient: Agents, cut: Namespace, way: tuple[str, str], busy: bool
) -> None:
    """The requester and the responder detect the loss independently."""
    left, right = impatient
    connect(impatient, address_of(right.namespace, way[0]), way[1])
    left.call("echo", count=1, size=1)
    since = time.monotonic()
    cut.link("down")
    echo = left.start("echo", count=20, size=1 << 20) if busy else None
    ends = [agent.start("ended") for agent in impatient]
    if echo is not None:
        assert "ConnectionBrokenError" in echo.error()
    for end in ends:
        lost(end, since)


def test_request_on_a_lost_path_fails_with_retry_exceeded(
    impatient: Agents, cut: Namespace, family: str
) -> None:
    """A request is pending when the link is cut, however slow the machine is.

    The responder is stopped until the cut, so that it cannot respond earlier.
    """
    left, right = impatient
    pair(impatient, "RC", family)
    exchange(impatient, 1, 100)
    right.call("post", count=2, size=100)
    right.stop()
    left.call("begin_sending", count=1, size=100)
    cut.link("down")
    right.go_on()
    assert left.call("sent", count=1) == ["RETRY_EXC_ERR"]
    assert left.call("state") == "ERR"
    # The responder does not monitor its peer, so it stays in RTS.
    assert right.call("receive", count=1, size=100) == ["SUCCESS"]
    assert right.call("state") == "RTS"


def test_ack_timeout_can_extend_the_path_timeout(impatient: Agents, wire: Network) -> None:
    """A queue pair's timeout and retry count can extend the path timeout (IBTA 9.7.6.1.3)."""
    left, right = impatient
    pair(impatient, "RC", "IPv4", ack_timeout=8.0)  # eight attempts of 2^21 * 4.096 us
    exchange(impatient, 1, 100)
    right.call("post", count=1, size=100)
    wire.right.link("down")
    send = left.start("send", count=1, size=100)
    stays_open(send, 2 * IMPATIENCE)
    wire.right.link("up")
    assert send.result() == ["SUCCESS"]
    assert right.call("receive", count=1, size=100) == ["SUCCESS"]


def test_removing_an_address_breaks_only_connections_using_it(
    impatient: Agents, wire: Network, via: str
) -> None:
    """The address cannot be used for new connections."""
    left, right = impatient
    wire.left.add("10.77.0.11/24")
    port = right.call("listen", host=wire.right.ipv4, via=via)
    serving = right.start("serve")
    left.call("connect", host=wire.right.ipv4, port=port, via=via, source="10.77.0.11")
    serving.result()
    left.call("echo", count=1, size=1000)
    since = time.monotonic()
    wire.left.remove("10.77.0.11/24")
    echo = left.start("echo", count=1, size=1000)
    for end in [agent.start("ended") for agent in impatient]:
        lost(end, since)
    echo.error()
    for agent in impatient:
        agent.call("close")
    port = right.call("listen", host=wire.right.ipv4, via=via)
    serving = right.start("serve")
    refused = left.start(
        "connect", host=wire.right.ipv4, port=port, via=via, source="10.77.0.11"
    ).error()
    assert "10.77.0.11" in refused
    left.call("connect", host=wire.right.ipv4, port=port, via=via)
    serving.result()
    left.call("echo", count=10, size=1000)


# ---- unreachable hosts ---------------------------------------------------------------------------


def test_missing_route_fails_the_transition_to_rtr(agents: Agents, family: str) -> None:
    """The transition looks up a route from the queue pair's own address."""
    left, right = agents
    version, there = {"IPv4": ("-4", "192.0.2.1"), "IPv6": ("-6", "2001:db8::1")}[family]
    own, gateway = (address_of(agent.namespace, family) for agent in agents)
    peer = Endpoint.unpack(bytes.fromhex(right.call("make", kind="RC", ip=gateway)["peer"]))
    away = {"peer": replace(peer, gid=GID.from_ip(there).raw).pack().hex(), "ack_timeout": 1.0}
    for change, reason in (
        ((), "Network is unreachable"),
        (("route", "add", "unreachable", there), "No route to host"),
        (("route", "replace", there, "via", gateway), ""),
        (("rule", "add", "from", own, "unreachable"), "Network is unreachable"),
    ):
        if change:
            left.namespace.ip(version, *change)
        left.call("make", kind="RC", ip=own)
        if not reason:
            left.call("bring_up", **away)
            continue
        error = left.start("bring_up", **away).error()
        for part in (reason, f"{there} from GID index", own, "check its address and the routes"):
            assert part in error


LOOPBACKS = ["127.0.0.1", "::1", "127.9.9.1"]


@pytest.mark.parametrize("own", LOOPBACKS)
@pytest.mark.parametrize("links", ["tcp", "roce"])
def test_loopback_gid_cannot_be_the_source_for_a_remote_peer(
    wire: Network, start: Start, monkeypatch: pytest.MonkeyPatch, links: str, own: str
) -> None:
    monkeypatch.setenv("AIORDMA_EMBEDDED_LINKS", links)
    wire.left.ip("addr", "replace", f"{LOOPBACKS[-1]}/8", "dev", "lo")
    left, right = start(wire.left), start(wire.right)
    away = address_of(wire.right, "IPv6" if ":" in own else "IPv4")
    for kind in ("RC", "UD"):
        peer = right.call("make", kind=kind, ip=away)["peer"]
        left.call("make", kind=kind, ip=own)
        error = left.start("bring_up", peer=peer, ack_timeout=1.0).error()
        for part in ("Network is unreachable", own, "can reach only peers on the same host"):
            assert part in error
    port = right.call("listen", host=away, via="cm")
    error = left.start("connect", host=away, port=port, via="cm", source=own).error()
    for part in ("AddressError", "Network is unreachable", f"from {own} to "):
        assert part in error


def test_connect_error_includes_the_host_when_a_link_is_down(
    agents: Agents, cut: Namespace, way: tuple[str, str]
) -> None:
    """The error arrives within the time limit of the call.

    If the local link is down, the connection manager fails immediately and needs no limit.
    """
    left, right = agents
    family, via = way
    host = address_of(right.namespace, family)
    port = right.call("listen", host=host, via=via)
    cut.link("down")
    at_once = via == "cm" and cut is left.namespace
    seconds = SECONDS if at_once else 1.0
    error = left.start("connect", host=host, port=port, via=via, seconds=seconds).error()
    assert host in error
    assert error.startswith("AddressError" if at_once else "UnreachableError")
    cut.link("up")
    serving = right.start("serve")
    left.call("connect", host=host, port=port, via=via)
    serving.result()
    left.call("echo", count=1, size=1000)
