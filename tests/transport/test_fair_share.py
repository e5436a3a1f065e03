"""Test which peer is evicted for a new one, and which hosts are turned away, without real peers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aiordma._transport import admission_control
from aiordma._transport.admission_control import FailureLimit, FairShare, NoRoomError, networks_of

LIMIT = 16  # each network's share is two


def first(_: int) -> int:
    """Choose index 0, which is the oldest peer."""
    return 0


def last(count: int) -> int:
    return count - 1


def share_with_peers(
    *hosts: str, trusted: bool = False, draw: Callable[[int], int] = first
) -> FairShare[int]:
    share: FairShare[int] = FairShare(LIMIT, trusted=trusted, draw=draw)
    for number, host in enumerate(hosts):
        assert share.make_room(networks_of(host)) is None
        share.add(number, networks_of(host))
    return share


def add_peer(share: FairShare[int], host: str, number: int = 100) -> int | None:
    """Add a peer and return the one evicted to make room, if any."""
    evicted = share.make_room(networks_of(host))
    share.add(number, networks_of(host))
    return evicted


def unrelated_hosts(count: int) -> list[str]:
    """Return hosts that have no network in common."""
    return [f"10.{n}.0.1" for n in range(count)]


MANY = unrelated_hosts(LIMIT)
FLOOD = "192.0.2.1"


def test_eviction_considers_all_peers_when_no_network_exceeds_its_share() -> None:
    for draw, expected in ((first, 0), (last, LIMIT - 1)):
        assert add_peer(share_with_peers(*MANY, draw=draw), FLOOD) == expected


def test_eviction_picks_a_random_peer_from_the_network_over_its_share() -> None:
    drawn = []

    def draw(count: int) -> int:
        drawn.append(count)
        return 3

    assert add_peer(share_with_peers(*MANY[:10], *[FLOOD] * 6, draw=draw), "10.99.0.1") == 13
    assert drawn == [6]


def test_new_peer_replaces_a_peer_of_the_host_over_its_share() -> None:
    share = share_with_peers(*MANY[:10], *[FLOOD] * 6)
    assert add_peer(share, "10.99.0.1") == 10
    assert add_peer(share, FLOOD, 101) == 11
    assert add_peer(share, MANY[0], 102) == 12


def test_new_peer_from_a_host_at_its_share_replaces_a_peer_of_that_host() -> None:
    assert add_peer(share_with_peers(*MANY[:14], FLOOD, FLOOD), "10.99.0.1") == 0
    # the new peer would be its third
    assert add_peer(share_with_peers(*MANY[:14], FLOOD, FLOOD), FLOOD) == 14


FLOODS = {
    "/64": [f"2001:db8:1:2::{n}" for n in range(14)],
    "/56": [f"2001:db8:1:{n:x}::1" for n in range(14)],
    "/48": [f"2001:db8:1:{n:x}00::1" for n in range(14)],
    "/24": [f"192.0.2.{n}" for n in range(14)],
}


@pytest.mark.parametrize("network", FLOODS)
def test_hosts_in_one_network_compete_for_a_single_share(network: str) -> None:
    """Otherwise an attacker would have as many shares as addresses to choose from."""
    share = share_with_peers("10.1.0.1", "2001:db8:2::1", *FLOODS[network])
    for number in range(100, 200):
        assert add_peer(share, FLOODS[network][number % 14], number) not in (0, 1)
        assert add_peer(share, "10.2.0.1", 1000 + number) not in (0, 1)
        share.remove(1000 + number)


def test_flooding_host_does_not_evict_other_hosts_in_its_network() -> None:
    """An honest host in the same network keeps its place."""
    share = share_with_peers("192.0.2.9", *["192.0.2.1"] * 8, *MANY[:7])
    for number in range(100, 120):
        assert add_peer(share, "192.0.2.1", number) != 0


def test_authenticated_peers_within_their_share_are_not_evicted() -> None:
    share = share_with_peers(*MANY, trusted=True)
    for host in ("10.99.0.1", MANY[0]):
        with pytest.raises(NoRoomError):
            share.make_room(networks_of(host))
    assert len(share) == LIMIT


def test_authenticated_peers_over_their_share_give_way_to_other_hosts() -> None:
    share = share_with_peers(*[FLOOD] * LIMIT, trusted=True)
    with pytest.raises(NoRoomError):
        share.make_room(networks_of(FLOOD))
    assert add_peer(share, "192.0.2.2") == 0


def test_removing_a_peer_twice_is_harmless() -> None:
    share = share_with_peers("10.0.0.1", "10.0.0.1", "10.0.0.2")
    for _ in range(2):
        share.remove(1)
    assert len(share) == 2
    assert list(share) == [0, 2]
    share.remove(0)
    assert list(share) == [2]
    share.remove(2)
    assert share._peers == {(): {}}
    assert not share._full_networks


@pytest.mark.parametrize(
    ("host", "networks"),
    [
        ("192.0.2.7", ("192.0.2.0/24", "192.0.2.7")),
        ("::ffff:192.0.2.7", ("192.0.2.0/24", "192.0.2.7")),
        ("2001:db8:1:234:5::6", ("2001:db8:1::/48", "2001:db8:1:200::/56", "2001:db8:1:234::/64")),
        ("2001:db8::1", ("2001:db8::/48", "2001:db8::/56", "2001:db8::/64")),
        ("fe80::1%2", ("fe80::1",)),
        ("fe80::2", ("fe80::2",)),
        ("::1", ("::1",)),
        ("", ("",)),
    ],
)
def test_networks_of_returns_enclosing_prefixes_of_an_address(
    host: str, networks: tuple[str, ...]
) -> None:
    assert networks_of(host) == networks


def test_failure_limit_expires_old_failures() -> None:
    limit = FailureLimit(0.0)
    for _ in range(admission_control.HOST_BURST):
        assert limit.wait_time("a", 0.0) == 0
        limit.record_failure("a", 0.0)
    assert limit.wait_time("a", 0.0) == 1 / admission_control.HOST_RATE
    assert limit.wait_time("a", 1 / admission_control.HOST_RATE) == 0
    limit.record_failure("a", 1.0)
    assert limit.wait_time("b", 1.0) == 0


def test_parallel_failures_add_at_most_one_extra_burst() -> None:
    """Parallel attempts must allow at most one burst more than sequential ones."""
    limit = FailureLimit(0.0)
    for _ in range(1000):
        limit.record_failure("a", 0.0)
    assert (
        limit.wait_time("a", 0.0)
        == (1 + admission_control.HOST_BURST) / admission_control.HOST_RATE
    )


def test_total_failure_limit_delays_only_hosts_with_failures() -> None:
    """Once the total limit is reached, a single failure makes a host wait.

    A host without failures need not wait.
    """
    limit = FailureLimit(0.0)
    for number in range(admission_control.TOTAL_BURST):
        assert limit.wait_time("a", 0.0) == 0
        limit.record_failure(f"a{number}" if number else "a", 0.0)
    assert limit.wait_time("a", 0.0) == 1 / admission_control.TOTAL_RATE
    assert limit.wait_time("b", 0.0) == 0


def test_failure_limit_remembers_at_most_max_hosts() -> None:
    limit = FailureLimit(0.0)
    for number in range(2 * admission_control.MAX_HOSTS):
        limit.record_failure(str(number), 0.0)
    assert len(limit._hosts) == admission_control.MAX_HOSTS


def test_failing_host_is_reported_once_until_its_failures_expire() -> None:
    limit = FailureLimit(0.0)
    assert not limit.mark_reported("a")
    limit.record_failure("a", 0.0)
    assert [limit.mark_reported("a") for _ in range(3)] == [True, False, False]
    assert limit.wait_time("a", 1000.0) == 0
    limit.record_failure("a", 1000.0)
    assert limit.mark_reported("a")
