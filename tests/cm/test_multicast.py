"""Tests of joining and leaving multicast groups, and of addresses that cannot be joined."""

from __future__ import annotations

import errno

import pytest

from aiordma import cm, verbs
from aiordma.cm import ConnectionId, EventType, PortSpace
from tests.cm.conftest import expect, refused

GROUP = ("239.17.4.1", 0)
GROUP6 = ("ff05::17:4", 0)


def bound(events: cm.EventChannel, host: str) -> ConnectionId:
    id = events.create_id(PortSpace.UDP)
    id.bind_addr((host, 0))
    return id


@pytest.mark.parametrize("send_only", [False, True])
def test_multicast_join_event_describes_the_group(
    events: cm.EventChannel, host: str, send_only: bool
) -> None:
    with bound(events, host) as id:
        id.join_multicast(GROUP, send_only=send_only)
        event = expect(events, EventType.MULTICAST_JOIN)
        assert event.id is id
        assert event.error() is None
        assert event.group == GROUP
        there = event.datagrams
        assert there is not None
        assert (there.qp_num, there.qkey) == (0xFFFFFF, cm.UDP_QKEY)
        assert there.private_data == b""
        assert there.vector is not None
        assert there.vector.dgid == verbs.GID.from_ip(GROUP[0])
        assert there.vector.port_num == 1
        id.leave_multicast(GROUP)


def test_queue_pair_can_join_two_multicast_groups(events: cm.EventChannel, host: str) -> None:
    with bound(events, host) as id:
        assert id.context is not None
        with id.context.alloc_pd() as pd, id.context.create_cq(16) as cq:
            id.create_qp(pd, cq)
            groups = [GROUP, ("239.17.4.2", 0)]
            for group in groups:
                id.join_multicast(group)
            seen = {expect(events, EventType.MULTICAST_JOIN).group for _ in groups}
            assert seen == set(groups)
            for group in groups:
                id.leave_multicast(group)
            refused(errno.EADDRNOTAVAIL, lambda: id.leave_multicast(GROUP))


@pytest.mark.needs("IPv6 multicast")
def test_join_multicast_accepts_ipv6_groups(
    events: cm.EventChannel, context: verbs.Context
) -> None:
    table = [entry.gid.ip for entry in context.query_gid_table()]
    host = next(ip for ip in table if ip.version == 6 and not ip.is_link_local)
    with bound(events, str(host)) as id:
        id.join_multicast(GROUP6)
        event = expect(events, EventType.MULTICAST_JOIN)
        assert event.group == GROUP6
        assert event.datagrams is not None
        assert event.datagrams.vector is not None
        assert event.datagrams.vector.dgid == verbs.GID.from_ip(GROUP6[0])


def test_closing_the_id_leaves_its_multicast_groups(events: cm.EventChannel, host: str) -> None:
    for _ in range(2):
        with bound(events, host) as id:
            id.join_multicast(GROUP)
            expect(events, EventType.MULTICAST_JOIN)


def test_join_multicast_requires_a_bound_udp_id(events: cm.EventChannel, host: str) -> None:
    with events.create_id(PortSpace.UDP) as id:  # and bound to a device
        refused(errno.EINVAL, lambda: id.join_multicast(GROUP))
    with events.create_id() as id:
        id.bind_addr((host, 0))
        error = refused(errno.EINVAL, lambda: id.join_multicast(GROUP))
        assert error.verb == "rdma_join_multicast_ex"
