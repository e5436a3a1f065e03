"""The events of one connection-manager ID in the running loop, for the task that awaits them.

The connection manager responds to each step with an event on a channel that many IDs share. Here,
each ID has its own queue, so that a step is a call followed by an await.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection

from .. import cm, verbs
from ..errors import ConnectionManagerError, RDMAError, host_port
from .driver import EventDriver
from .shutdown import weak_method

logger = logging.getLogger("aiordma.cm")

ENDED = frozenset({cm.EventType.DISCONNECTED, cm.EventType.DEVICE_REMOVAL})


class IdEvents:
    """A connection-manager ID and the queue of its events."""

    def __init__(self, events: EventDriver, id: cm.ConnectionId) -> None:
        """Take ownership of `id` and of one reference to `events`."""
        self._events = events
        # Do not use an asyncio.Queue. If a queue is dropped together with a task that awaits it,
        # the queue calls its loop, which may be closed.
        self._seen: deque[cm.ConnectionEvent | None] = deque()  # None once the ID is closed
        self._next_arrival: asyncio.Future[None] | None = None
        self._connected = False
        self.id = id
        events.attach(id, weak_method(self._on_event))

    def _on_event(self, event: cm.ConnectionEvent) -> None:
        self._put(event)

    def _put(self, event: cm.ConnectionEvent | None) -> None:
        self._seen.append(event)
        if self._next_arrival is not None and not self._next_arrival.done():
            self._next_arrival.set_result(None)

    def _explained(self, error: ConnectionManagerError | None) -> RDMAError | None:
        """Return the exception to raise for an event's error. A subclass may add the reason."""
        return error

    async def expect(self, wanted: cm.EventType) -> cm.ConnectionEvent:
        """Wait for the next event, which must be `wanted`.

        Raises:
            BufferStateError: If the ID was closed in the meantime.
            ConnectionManagerError: If a different event arrives.
        """
        if not isinstance(wanted, cm.EventType):
            raise TypeError(f"wanted must be a member of EventType, not {wanted!r}")
        if not self._seen:
            self._events.take()  # within one host, the event may already be there
        while not self._seen:
            self._next_arrival = self._events.loop.create_future()
            await self._next_arrival
        event = self._seen.popleft()
        if event is None:
            raise self.id.closed_error()
        if event.type is not wanted:
            raise self._explained(event.error()) or ConnectionManagerError(
                f"received the event {event.type.name} instead of {wanted.name}",
                event=event.type.name,
                status=event.status,
            )
        return event

    def _disconnect(self) -> None:
        """Disconnect this end. The peer must disconnect too. Further calls have no effect."""
        if self._connected:
            self._connected = False
            try:
                self.id.disconnect()
            except (RDMAError, OSError) as error:
                # The peer or the device has already ended the connection.
                logger.debug("cannot disconnect: %s", error)

    def release(self) -> None:
        """Close the ID. For internal use only."""
        self._events.detach(self.id)
        try:
            self.id.close()
        finally:
            self._events.release()
            if not self._events.loop.is_closed():
                self._put(None)  # make `expect` fail


def make_id(
    library: verbs.Library, port_space: cm.PortSpace
) -> tuple[EventDriver, cm.ConnectionId]:
    """Return a new ID on the running loop's event channel, with a reference to the channel."""
    events = EventDriver.for_library(library)
    try:
        return events, events.channel.create_id(port_space)
    except BaseException:
        events.release()
        raise


def check_device_name(
    id: cm.ConnectionId, names: Collection[str] | None, address: cm.Address
) -> None:
    """Raise ConnectionManagerError if `address` resolved to a device that is not in `names`.

    If `names` is None, any device is accepted.
    """
    assert id.context is not None
    if names is not None and id.context.name not in names:
        named = " or ".join(map(repr, names))
        raise ConnectionManagerError(
            f"{host_port(address)} is reached through device {id.context.name!r}, not {named}; "
            f"pass device={id.context.name!r}, or use an address of {named}"
        )
