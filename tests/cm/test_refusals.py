"""Tests of connections that cannot be established, and of their errors."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from aiordma import cm
from aiordma.cm import ConnectionId, ConnectionParameters, EventType
from aiordma.errors import AddressError, LimitError, RejectedError, host_port
from tests.cm.conftest import address_of, expect, with_qp


@pytest.fixture
def asking(events: cm.EventChannel, listener: ConnectionId) -> Iterator[ConnectionId]:
    """An ID that is ready to connect to the listener."""
    with with_qp(events, address_of(listener)) as (id, _pd, _cq):
        yield id


def test_reject_delivers_private_data_to_the_initiator(
    events: cm.EventChannel, asking: ConnectionId
) -> None:
    """The private data arrives complete in both directions."""
    question, answer = bytes(range(56)), bytes(range(100, 248))
    asking.connect(ConnectionParameters(question))
    request = expect(events, EventType.CONNECT_REQUEST)
    assert request.private_data == question
    request.id.reject(answer)
    event = expect(events, EventType.REJECTED)
    assert event.id is asking
    error = event.error()
    assert isinstance(error, RejectedError)
    assert isinstance(error, ConnectionRefusedError)
    assert error.reason == 28
    assert error.private_data[:148] == event.private_data[:148] == answer
    assert "the peer's application rejected the connection" in str(error)
    request.id.close()


def test_closing_a_connection_request_rejects_it(
    events: cm.EventChannel, asking: ConnectionId
) -> None:
    asking.connect()
    expect(events, EventType.CONNECT_REQUEST).id.close()
    event = expect(events, EventType.REJECTED)
    assert event.id is asking


def test_connect_without_listener_is_rejected(
    events: cm.EventChannel, asking: ConnectionId, listener: ConnectionId
) -> None:
    listener.close()
    asking.connect()
    event = expect(events, EventType.REJECTED)
    error = event.error()
    assert isinstance(error, RejectedError)
    assert error.reason == 8
    assert "no listener on that port" in str(error)


def test_private_data_limits_apply_to_connect_accept_and_reject(
    asking: ConnectionId, listener: ConnectionId
) -> None:
    with pytest.raises(LimitError, match=r"maximum 56 for connect\(\)"):
        asking.connect(ConnectionParameters(bytes(57)))
    with pytest.raises(LimitError, match=r"maximum 196 for accept\(\)"):
        asking.accept(ConnectionParameters(bytes(197)))
    with pytest.raises(LimitError, match=r"maximum 148 for reject\(\)"):
        asking.reject(bytes(149))


def test_resolve_addr_rejects_a_nonlocal_source_address(events: cm.EventChannel, host: str) -> None:
    """The address is reserved for documentation (RFC 5737), so this host does not have it."""
    with events.create_id() as id:
        with pytest.raises(AddressError, match=re.escape(host_port((host, 7471)))) as caught:
            id.resolve_addr((host, 7471), ("198.51.100.7", 0), timeout=1)
        assert caught.value.errno
        assert str(caught.value).count("[Errno") == 1
