"""Tests of datagram services.

The port of a service identifies a queue pair to send to, without a connection.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aiordma import cm, verbs
from aiordma.cm import ConnectionId, ConnectionParameters, EventType, PortSpace
from aiordma.errors import AddressError, ServiceRejectedError, UnsupportedError
from aiordma.verbs import QPState, QPType
from tests.cm.conftest import address_of, expect, refused, with_qp


@contextmanager
def listening(events: cm.EventChannel, address: cm.Address) -> Iterator[ConnectionId]:
    with events.create_id(PortSpace.UDP) as id:
        id.bind_addr(address)
        id.listen()
        yield id


def test_datagram_connect_exchanges_private_data(events: cm.EventChannel, host: str) -> None:
    question, answer = bytes(range(180)), bytes(range(60, 196))
    with (
        listening(events, (host, 0)) as listener,
        with_qp(events, address_of(listener), PortSpace.UDP) as (id, pd, cq),
    ):
        assert id.qp is not None
        assert id.qp.qp_type is QPType.UD
        assert id.qp.query().qp_state is QPState.RTS
        assert id.qp.query().qkey == cm.UDP_QKEY
        id.connect(ConnectionParameters(question))
        request = expect(events, EventType.CONNECT_REQUEST)
        assert request.listen_id is listener
        assert request.private_data == question
        assert request.datagrams == cm.DatagramParameters(question)
        assert request.id.port_space is PortSpace.UDP
        with request.id as passive:
            assert passive.peer_address is not None
            assert id.local_address is not None
            assert passive.peer_address[0] == id.local_address[0]
            qp = passive.create_qp(pd, cq)
            passive.accept(ConnectionParameters(answer))
            event = expect(events, EventType.ESTABLISHED)
            assert event.id is id
            assert event.private_data == answer
            there = event.datagrams
            assert there is not None
            assert (there.qp_num, there.qkey) == (qp.qp_num, cm.UDP_QKEY)
            assert there.vector is not None
            assert there.vector.dgid == verbs.GID.from_ip(host)
            assert there.vector.port_num == id.port_num
            assert events.get_event() is None


def test_datagram_accept_can_specify_another_queue_pair(events: cm.EventChannel, host: str) -> None:
    """One queue pair may serve all requests: rdma_accept(3), qp_num."""
    with (
        listening(events, (host, 0)) as listener,
        with_qp(events, address_of(listener), PortSpace.UDP) as (id, _pd, _cq),
    ):
        id.connect()
        with expect(events, EventType.CONNECT_REQUEST).id as passive:
            passive.accept(ConnectionParameters(qp_num=0x1234))
            there = expect(events, EventType.ESTABLISHED).datagrams
            assert there is not None
            assert there.qp_num == 0x1234


def test_rejected_datagram_request_raises_service_rejected_error(
    events: cm.EventChannel, host: str
) -> None:
    with (
        listening(events, (host, 0)) as listener,
        with_qp(events, address_of(listener), PortSpace.UDP) as (id, _pd, _cq),
    ):
        id.connect()
        with expect(events, EventType.CONNECT_REQUEST).id as passive:
            passive.reject(b"not today")
        event = expect(events, EventType.UNREACHABLE)
        error = event.error()
        assert isinstance(error, ServiceRejectedError)
        assert error.reason == 2
        assert error.private_data[:9] == b"not today"
        assert "the peer's application rejected the connection" in str(error)


def test_datagram_connect_reports_unreachable_without_a_listener(
    events: cm.EventChannel, host: str
) -> None:
    with listening(events, (host, 0)) as listener:
        address = address_of(listener)
    with with_qp(events, address, PortSpace.UDP) as (id, _pd, _cq):
        id.connect()
        error = expect(events, EventType.UNREACHABLE).error()
        assert isinstance(error, ServiceRejectedError)
        assert error.reason == 1
        assert "no listener on that port" in str(error)


def test_tcp_and_udp_port_spaces_are_independent(
    events: cm.EventChannel, listener: ConnectionId, host: str
) -> None:
    """A datagram port and a connection port may have the same number, as with UDP and TCP."""
    address = address_of(listener)
    with (
        listening(events, address) as here,
        with_qp(events, address, PortSpace.UDP) as (id, _pd, _cq),
    ):
        assert here.local_address == listener.local_address
        id.connect()
        request = expect(events, EventType.CONNECT_REQUEST)
        assert request.listen_id is here
        request.id.close()
        expect(events, EventType.UNREACHABLE)
        with events.create_id(PortSpace.UDP) as other:

            def listen() -> None:
                other.bind_addr(address)
                other.listen()

            with pytest.raises(AddressError) as caught:
                listen()
            assert caught.value.errno == errno.EADDRINUSE


def test_disconnect_fails_on_a_datagram_id(events: cm.EventChannel, host: str) -> None:
    with (
        listening(events, (host, 0)) as listener,
        with_qp(events, address_of(listener), PortSpace.UDP) as (id, _pd, _cq),
    ):
        refused(errno.EINVAL, id.disconnect)
        id.connect()
        expect(events, EventType.CONNECT_REQUEST).id.close()
        expect(events, EventType.UNREACHABLE)


def test_unsupported_port_space_error_includes_its_name(events: cm.EventChannel) -> None:
    lacks = {PortSpace.IPOIB} if events.library.name == "embedded" else set()
    for space in PortSpace:
        if space in lacks:
            with pytest.raises(UnsupportedError, match=space.name):
                events.create_id(space)
        else:
            events.create_id(space).close()
