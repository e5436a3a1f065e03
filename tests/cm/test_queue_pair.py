"""Tests of an id's queue pair: messages over connections, datagrams and multicast groups."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from aiordma import cm, verbs
from aiordma.cm import ConnectionId, EventType, PortSpace
from aiordma.errors import VerbsError
from aiordma.verbs import (
    QPCapabilities,
    QPType,
    ReceiveWorkRequest,
    ScatterGatherElement,
    SendOps,
    SendWorkRequest,
    WROpcode,
)
from tests.cm.conftest import Connected, address_of, expect, resolved

GROUP = ("239.17.4.3", 0)
ROOM = 256


def one(cq: verbs.CompletionQueue, timeout: float = 30) -> verbs.WorkCompletion:
    """Return the next completion. Fail the test if none arrives in time."""
    deadline = time.monotonic() + timeout
    while not (found := cq.poll(1)):
        if time.monotonic() > deadline:
            pytest.fail(f"no completion within {timeout} s")
    return found[0]


class Side:
    """A datagram ID with its queue pair, memory and one posted receive."""

    def __init__(self, id: ConnectionId, stack: ExitStack) -> None:
        self.id = id
        assert id.context is not None
        self.pd = stack.enter_context(id.context.alloc_pd())
        self.cq = stack.enter_context(id.context.create_cq(16))
        self.mr = stack.enter_context(self.pd.reg_mr(2 * ROOM))
        stack.callback(id.destroy_qp)
        self.qp = id.create_qp(self.pd, self.cq)
        place = ScatterGatherElement(self.mr.addr + ROOM, ROOM, self.mr.lkey)
        self.qp.post_recv([ReceiveWorkRequest(2, (place,))])

    def send(self, text: bytes, there: cm.DatagramParameters) -> None:
        """Send `text` to the destination `there` and wait for the completion."""
        assert there.vector is not None
        self.mr.buf[: len(text)] = text
        with self.pd.create_ah(there.vector) as ah:
            piece = ScatterGatherElement(self.mr.addr, len(text), self.mr.lkey)
            wr = SendWorkRequest(
                1, WROpcode.SEND, (piece,), ah=ah, remote_qpn=there.qp_num, remote_qkey=there.qkey
            )
            self.qp.post_send([wr])
            assert one(self.cq).ok

    def received(self) -> bytes:
        """Return the payload of the next message, without the 40-byte GRH."""
        wc = one(self.cq)
        assert wc.ok
        assert wc.wr_id == 2
        return bytes(self.mr.buf[ROOM + 40 : ROOM + wc.byte_len])


@contextmanager
def bound(events: cm.EventChannel, host: str) -> Iterator[Side]:
    with ExitStack() as stack:
        id = stack.enter_context(events.create_id(PortSpace.UDP))
        id.bind_addr((host, 0))
        yield Side(id, stack)


def test_datagram_reaches_the_resolved_service(events: cm.EventChannel, host: str) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(events.create_id(PortSpace.UDP))
        listener.bind_addr((host, 0))
        listener.listen()
        id = stack.enter_context(resolved(events, address_of(listener), PortSpace.UDP))
        asking = Side(id, stack)
        id.connect()
        request = stack.enter_context(expect(events, EventType.CONNECT_REQUEST).id)
        serving = Side(request, stack)
        request.accept()
        there = expect(events, EventType.ESTABLISHED).datagrams
        assert there is not None
        asking.send(b"to the service", there)
        assert serving.received() == b"to the service"


def test_datagram_reaches_the_multicast_group(events: cm.EventChannel, host: str) -> None:
    with bound(events, host) as member, bound(events, host) as sender:
        member.id.join_multicast(GROUP)
        assert expect(events, EventType.MULTICAST_JOIN).id is member.id
        sender.id.join_multicast(GROUP, send_only=True)
        event = expect(events, EventType.MULTICAST_JOIN)
        assert event.datagrams is not None
        sender.send(b"to the group", event.datagrams)
        assert member.received() == b"to the group"
        assert sender.cq.poll() == []  # a send-only member receives nothing


Ready = tuple[ConnectionId, verbs.ProtectionDomain, verbs.CompletionQueue]


@pytest.fixture
def ready(events: cm.EventChannel, listener: ConnectionId) -> Iterator[Ready]:
    """A resolved ID without a queue pair, and the objects to create one."""
    with resolved(events, address_of(listener)) as id:
        assert id.context is not None
        with id.context.alloc_pd() as pd, id.context.create_cq(64) as cq:
            yield id, pd, cq
            id.destroy_qp()


def test_id_queue_pair_gets_the_requested_capabilities(ready: Ready) -> None:
    wanted = QPCapabilities(20, 30, 3, 4, 48)
    id, pd, cq = ready
    with pd.context.create_cq(64) as other:
        qp = id.create_qp(pd, cq, other, wanted, sq_sig_all=True)
        assert qp.sq_sig_all
        assert (qp.send_cq, qp.recv_cq) == (cq, other)
        for name in ("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge"):
            assert getattr(qp.capabilities, name) >= getattr(wanted, name)
        assert qp.capabilities.max_inline_data >= 48


def test_id_queue_pair_created_with_send_ops_sends_a_message(
    events: cm.EventChannel, listener: ConnectionId
) -> None:
    """rdma_create_qp_ex(3) creates the queue pair, and ibv_wr_post(3) posts its requests."""
    connected = Connected(events, address_of(listener), send_ops=SendOps.SEND)
    assert connected.active.qp is not None
    assert connected.passive.qp is not None
    assert connected.active.qp.send_ops is SendOps.SEND
    with connected.pd.reg_mr(64) as mr:
        mr.buf[:5] = b"built"
        connected.passive.qp.post_recv_one(1, mr.addr + 32, 32, mr.lkey)
        connected.active.qp.post_send_one(2, WROpcode.SEND, 2, mr.addr, 5, mr.lkey)
        assert {one(connected.cq).wr_id, one(connected.cq).wr_id} == {1, 2}
        assert bytes(mr.buf[32:37]) == b"built"
    connected.close()


def test_id_create_qp_rejects_wrong_type_and_too_large_queues(ready: Ready) -> None:
    id, pd, cq = ready
    with pytest.raises(VerbsError, match="UD queue pair"):
        id.create_qp(pd, cq, qp_type=QPType.UD)
    most = pd.context.query_device().max_qp_wr
    with pytest.raises(VerbsError, match=f"max_send_wr must be at most {most}") as caught:
        id.create_qp(pd, cq, None, QPCapabilities(most + 1), reserved=True)
    assert caught.value.verb == "rdma_create_qp"
    assert id.qp is None
