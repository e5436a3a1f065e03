"""Test the exceptions of events."""

from __future__ import annotations

import errno

import pytest

from aiordma import cm, verbs
from aiordma.cm import ConnectionEvent, ConnectionParameters, EventType
from aiordma.errors import (
    AddressError,
    ConnectionManagerError,
    RejectedError,
    RouteError,
    UnreachableError,
)

# The other events are none.
FAILURES: dict[EventType, type[ConnectionManagerError]] = {
    EventType.ADDR_ERROR: AddressError,
    EventType.ROUTE_ERROR: RouteError,
    EventType.CONNECT_ERROR: ConnectionManagerError,
    EventType.UNREACHABLE: UnreachableError,
    EventType.REJECTED: RejectedError,
    EventType.DEVICE_REMOVAL: ConnectionManagerError,
    EventType.MULTICAST_ERROR: ConnectionManagerError,
}


@pytest.mark.parametrize("kind", EventType)
def test_event_error_class_matches_the_event_type(device: verbs.Device, kind: EventType) -> None:
    with cm.EventChannel(device.library) as channel, channel.create_id() as id:
        event = ConnectionEvent(
            kind, id, None, -errno.ETIMEDOUT, ConnectionParameters(b"why" + bytes(5))
        )
    error = event.error()
    if kind not in FAILURES:
        assert error is None
        return
    assert type(error) is FAILURES[kind]
    assert error.event == f"RDMA_CM_EVENT_{kind.name}"
    assert error.status == -errno.ETIMEDOUT
    if isinstance(error, OSError):
        assert error.errno == errno.ETIMEDOUT
    if isinstance(error, RejectedError):
        assert error.private_data == b"why" + bytes(5)
