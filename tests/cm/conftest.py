"""Fixtures with two ids on one event channel of the device, and helpers for their events."""

from __future__ import annotations

import errno
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from aiordma import cm, verbs
from aiordma.cm import ConnectionEvent, ConnectionId, ConnectionParameters, EventType, PortSpace
from aiordma.errors import UnsupportedError, VerbsError

UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP)


def next_event(channel: cm.EventChannel, timeout: float = 100) -> ConnectionEvent:
    """Return the next event. Fail the test if none arrives in time."""
    while (event := channel.get_event()) is None:
        if not select.select([channel.fd], [], [], timeout)[0]:
            pytest.fail(f"no event within {timeout} s")
    return event


def expect(channel: cm.EventChannel, kind: EventType) -> ConnectionEvent:
    """Return the next event after checking its type."""
    event = next_event(channel)
    assert event.type is kind, (event, event.error())
    return event


def expect_all(channel: cm.EventChannel, *kinds: EventType) -> dict[EventType, ConnectionEvent]:
    """Return the next events, keyed by type. Their types must be `kinds`, in any order."""
    events = {event.type: event for event in (next_event(channel) for _ in kinds)}
    assert set(events) == set(kinds)
    return events


def refused(code: int, use: Callable[[], object]) -> VerbsError:
    """Check that a call fails with the errno `code`, and return its error."""
    with pytest.raises(VerbsError) as caught:
        use()
    if isinstance(caught.value, UnsupportedError) and code not in UNSUPPORTED:
        raise caught.value
    assert caught.value.errno == code
    return caught.value


@pytest.fixture
def events(device: verbs.Device) -> Iterator[cm.EventChannel]:
    with cm.EventChannel(device.library) as channel:
        yield channel


@pytest.fixture
def listener(events: cm.EventChannel, host: str) -> Iterator[ConnectionId]:
    """A connection ID that listens on a free port of the device's address."""
    with events.create_id() as id:
        id.bind_addr((host, 0))
        id.listen()
        yield id


def address_of(listener: ConnectionId) -> cm.Address:
    """Return the listener's address."""
    address = listener.local_address
    assert address is not None
    return address


def resolved(
    events: cm.EventChannel, address: cm.Address, port_space: PortSpace = PortSpace.TCP
) -> ConnectionId:
    """Return a connection ID whose address and route are resolved."""
    id = events.create_id(port_space)
    id.resolve_addr(address, timeout=30)
    expect(events, EventType.ADDR_RESOLVED)
    id.resolve_route(timeout=30)
    expect(events, EventType.ROUTE_RESOLVED)
    return id


@contextmanager
def with_qp(
    events: cm.EventChannel, address: cm.Address, port_space: PortSpace = PortSpace.TCP
) -> Iterator[tuple[ConnectionId, verbs.ProtectionDomain, verbs.CompletionQueue]]:
    """Provide a resolved ID with a queue pair, protection domain and completion queue."""
    with resolved(events, address, port_space) as id:
        assert id.context is not None
        with id.context.alloc_pd() as pd, id.context.create_cq(16) as cq:
            id.create_qp(pd, cq)
            yield id, pd, cq
            id.destroy_qp()


class Connected:
    """Both ends of a connection on one channel, each with a queue pair and memory."""

    def __init__(
        self,
        events: cm.EventChannel,
        address: cm.Address,
        ack_timeout: float | None = None,
        send_ops: verbs.SendOps = verbs.SendOps.NONE,
    ) -> None:
        self.active = resolved(events, address)
        context = self.active.context
        assert context is not None
        self.context = context
        self.pd = context.alloc_pd()
        self.cq = context.create_cq(64)
        self.active.create_qp(self.pd, self.cq, send_ops=send_ops)
        if ack_timeout is not None:
            self.active.set_ack_timeout(ack_timeout)
        self.active.connect(ConnectionParameters(b"question"))
        self.request = expect(events, EventType.CONNECT_REQUEST)
        self.passive = self.request.id
        self.passive.create_qp(self.pd, self.cq, send_ops=send_ops)
        self.passive.accept(ConnectionParameters(b"answer"))
        self.established = [expect(events, EventType.ESTABLISHED) for _ in range(2)]

    def close(self) -> None:
        self.active.close()
        self.passive.close()
        self.cq.close()
        self.pd.close()


@pytest.fixture
def connected(events: cm.EventChannel, listener: ConnectionId) -> Iterator[Connected]:
    connected = Connected(events, address_of(listener))
    yield connected
    connected.close()
