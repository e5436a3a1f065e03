"""Which peer goes for a new one, and which hosts are turned away: rules without any peer."""

from __future__ import annotations

import pytest

from aiordma._transport import failure_limit
from aiordma._transport.failure_limit import FailureLimit
from aiordma._transport.fair_share import FairShare, NoRoomError, network_of

LIMIT = 16  # of which two are a host's share


def filled(*hosts: str, proved: bool = False) -> FairShare[int]:
    share: FairShare[int] = FairShare(LIMIT, proved=proved)
    for number, host in enumerate(hosts):
        assert share.make_room(host) is None
        share.add(number, host)
    return share


MANY = [f"10.0.0.{n}" for n in range(LIMIT)]


def test_the_oldest_goes() -> None:
    share = filled(*MANY)
    assert share.make_room("new") == 0
    share.add(100, "new")
    assert share.make_room("newer") == 1


def test_a_host_beyond_its_share_loses_its_own_oldest() -> None:
    share = filled(*MANY[:10], *["flood"] * 6)
    assert share.make_room("new") == 10
    share.add(100, "new")
    assert share.make_room("flood") == 11
    share.add(101, "flood")
    assert share.make_room(MANY[0]) == 12


def test_within_its_share_a_host_is_as_others() -> None:
    share = filled(*MANY[:14], "two", "two")
    assert share.make_room("new") == 0
    share.add(100, "new")
    assert share.make_room("two") == 14  # it would be its third


def test_those_that_have_proved_themselves_stay() -> None:
    share = filled(*MANY, proved=True)
    for host in ("new", MANY[0]):
        with pytest.raises(NoRoomError):
            share.make_room(host)
    assert len(share) == LIMIT


def test_those_that_have_proved_themselves_have_a_share_too() -> None:
    share = filled(*["greedy"] * LIMIT, proved=True)
    with pytest.raises(NoRoomError):
        share.make_room("greedy")
    assert share.make_room("other") == 0


def test_what_has_gone_may_go_again() -> None:
    share = filled("a", "a", "b")
    for _ in range(2):
        share.remove(1)
    assert len(share) == 2
    assert list(share) == [0, 2]
    share.remove(0)
    assert list(share) == [2]


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%2", "fe80::1"),
        ("fe80::2", "fe80::2"),
        ("::1", "::1"),
        ("", ""),
    ],
)
def test_an_ipv6_host_has_a_whole_network(host: str, network: str) -> None:
    assert network_of(host) == network


def test_failures_are_forgotten_in_time() -> None:
    limit = FailureLimit(0.0)
    for _ in range(failure_limit.HOST_BURST):
        assert limit.wait("a", 0.0) == 0
        limit.failed("a", 0.0)
    assert limit.wait("a", 0.0) == 1 / failure_limit.HOST_RATE
    assert limit.wait("a", 1 / failure_limit.HOST_RATE) == 0
    limit.failed("a", 1.0)
    assert limit.wait("b", 1.0) == 0


def test_failures_that_were_under_way_count() -> None:
    """Many at a time are not more tries than one after the other, but for another burst."""
    limit = FailureLimit(0.0)
    for _ in range(1000):
        limit.failed("a", 0.0)
    assert limit.wait("a", 0.0) == (1 + failure_limit.HOST_BURST) / failure_limit.HOST_RATE


def test_no_more_hosts_are_remembered_than_are_allowed() -> None:
    limit = FailureLimit(0.0)
    for number in range(2 * failure_limit.MAX_HOSTS):
        limit.failed(str(number), 0.0)
    assert len(limit._hosts) == failure_limit.MAX_HOSTS


def test_a_host_is_reported_once_until_it_is_forgotten() -> None:
    limit = FailureLimit(0.0)
    assert not limit.first_report("a")
    limit.failed("a", 0.0)
    assert [limit.first_report("a") for _ in range(3)] == [True, False, False]
    assert limit.wait("a", 1000.0) == 0
    limit.failed("a", 1000.0)
    assert limit.first_report("a")
