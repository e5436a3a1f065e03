"""Test multicast groups of datagram queue pairs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from aiordma import verbs
from aiordma.errors import BufferStateError, VerbsError
from aiordma.verbs import (
    GID,
    GRH,
    GRH_SIZE,
    MULTICAST_QPN,
    AddressVector,
    Destination,
    QPCapabilities,
    QPType,
    ScatterGatherElement,
)
from conftest import End

pytestmark = pytest.mark.needs("UD")
QKEY = 0x77
NOT_HERE = "a multicast message does not come back to its host"
GROUP = GID.from_ip("239.17.5.1")
GROUPS = [GROUP, GID.from_ip("ff15::17:5")]


class Member(End):
    """A datagram queue pair in RTS."""

    def receive(self, wr_id: int) -> None:
        self.post_recv(wr_id, 1024)

    def send(self, vector: AddressVector, qpn: int, data: bytes) -> None:
        self.mr.buf[1024 : 1024 + len(data)] = data
        piece = ScatterGatherElement(self.mr.addr + 1024, len(data), self.mr.lkey)
        with self.qp.pd.create_ah(vector) as ah:
            with self.qp.batch() as batch:
                batch.send([piece], to=Destination(ah, qpn, QKEY), wr_id=1)
            while not any(wc.wr_id == 1 for wc in self.completions(1)):
                pass


@pytest.fixture
def members(context: verbs.Context, pd: verbs.ProtectionDomain) -> Iterator[list[Member]]:
    with ExitStack() as stack:

        def make() -> Member:
            cq = stack.enter_context(context.create_cq(64))
            qp = stack.enter_context(
                pd.create_qp(cq, capabilities=QPCapabilities(), qp_type=QPType.UD)
            )
            qp.start(qp.endpoint(qkey=QKEY))
            return Member(qp, cq, stack.enter_context(pd.reg_mr(2048)))

        yield [make() for _ in range(3)]


def to_group(context: verbs.Context, gid: GID) -> AddressVector:
    return AddressVector(dgid=gid, sgid_index=context.choose_gid().gid_index, hop_limit=1)


def to_host(context: verbs.Context) -> AddressVector:
    chosen = context.choose_gid()
    return AddressVector(dgid=chosen.gid, sgid_index=chosen.gid_index)


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_multicast_message_reaches_every_member(
    members: list[Member], context: verbs.Context, deviations: frozenset[str], group: GID
) -> None:
    sender, one, two = members
    with one.qp.attach_mcast(group) as attached, two.qp.attach_mcast(group):
        assert (attached.gid, attached.lid) == (group, 0)
        assert str(group) in repr(attached)
        for member in (one, two):
            member.receive(3)
        sender.send(to_group(context, group), MULTICAST_QPN, b"to all")
        if NOT_HERE in deviations:
            # The unicast datagram arrives first although it was sent later, so the multicast one
            # was not delivered.
            for member in (one, two):
                sender.send(to_host(context), member.qp.qp_num, b"to you")
                assert member.completion().byte_len == GRH_SIZE + 6
                assert bytes(member.mr.buf[GRH_SIZE:46]) == b"to you"
            return
        for member in (one, two):
            received = member.completion()
            assert (received.wr_id, received.src_qp) == (3, sender.qp.qp_num)
            assert bytes(member.mr.buf[GRH_SIZE:46]) == b"to all"
            assert GRH.parse(member.mr.buf[:GRH_SIZE]).dgid == group


def test_multicast_is_not_received_after_leaving_the_group(
    members: list[Member], context: verbs.Context, deviations: frozenset[str]
) -> None:
    sender, one, two = members
    attached = one.qp.attach_mcast(GROUP)
    one.receive(3)
    attached.close()
    assert attached.closed
    with two.qp.attach_mcast(GROUP):
        two.receive(3)
        sender.send(to_group(context, GROUP), MULTICAST_QPN, b"to two")
        if NOT_HERE not in deviations:
            assert two.completion().byte_len == GRH_SIZE + 6
    # A datagram sent to the group would have arrived before this one.
    sender.send(to_host(context), one.qp.qp_num, b"to you")
    assert one.completion().byte_len == GRH_SIZE + 6
    assert bytes(one.mr.buf[GRH_SIZE:46]) == b"to you"
    with pytest.raises(BufferStateError, match="is closed"), attached:
        pass


def test_closing_queue_pair_closes_its_memberships(members: list[Member]) -> None:
    _, one, _ = members
    groups = [one.qp.attach_mcast(GID.from_ip(f"239.17.5.{n}")) for n in range(10, 13)]
    assert not any(attached.closed for attached in groups)
    one.qp.close()
    assert all(attached.closed for attached in groups)


def test_attach_mcast_rejects_invalid_groups(
    members: list[Member], pd: verbs.ProtectionDomain
) -> None:
    one = members[0].qp
    for wrong in ("10.9.9.1", "fd00::1"):
        with pytest.raises(ValueError, match="is not a multicast address"):
            one.attach_mcast(GID.from_ip(wrong))
    with pytest.raises(ValueError, match="lid must be between 0 and 65535"):
        one.attach_mcast(GROUP, 1 << 16)
    with pd.create_qp(members[0].cq) as rc, pytest.raises(ValueError, match="only UD queue pairs"):
        rc.attach_mcast(GROUP)


def test_attach_mcast_error_reports_the_member_limit(
    context: verbs.Context, pd: verbs.ProtectionDomain
) -> None:
    most = context.query_device().max_mcast_qp_attach
    with context.create_cq(1) as cq, ExitStack() as stack:

        def join() -> None:
            qp = stack.enter_context(pd.create_qp(cq, qp_type=QPType.UD))
            stack.enter_context(qp.attach_mcast(GROUP))

        for _ in range(most):
            join()
        with pytest.raises(VerbsError, match=f" {most} queue pairs each") as raised:
            join()
        assert raised.value.verb == "ibv_attach_mcast"
