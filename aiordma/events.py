"""Asynchronous device events, for use with `async for`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator

from . import verbs
from ._core.async_only import AsyncIteration
from ._event_loop import shutdown
from ._event_loop.affinity import LoopAffinity
from ._event_loop.driver import ContextEvents
from ._event_loop.wait_queue import WaitQueue
from .errors import BufferStateError

logger: logging.Logger = logging.getLogger("aiordma.driver")

# The maximum number of stored events. Beyond this number, the oldest events are dropped, so that a
# flapping port cannot fill the memory of a program that rarely reads events. The value is an
# educated guess.
MAX_STORED = 1024


class DeviceEvents(shutdown.ClosesAtExit, AsyncIteration):
    """An asynchronous iterator over events from a device, its ports, and the objects created on it.

    ::

        async with aiordma.device_events("mlx5_0") as events:
            async for event in events:
                print(event.type.name, event.port_num or event.element)

    Use :func:`device_events` to create an iterator. The iterator receives every event that occurs
    after the iterator is created. All open iterators and this library's connections receive the
    same events.

    Up to 1024 events are stored until you retrieve them. If more events arrive, the oldest events
    are dropped and a warning is logged. If you do not close an iterator, it is closed when its last
    reference is dropped or its event loop ends, and a ResourceWarning is issued.
    """

    def __init__(self, context: verbs.Context, *, owned: bool) -> None:
        self.context = context
        self._owns_context = owned
        self._source = ContextEvents.for_context(context)
        self._token = self._source.subscribe(shutdown.weak_method(self._on_event))
        self._events: deque[verbs.AsyncEvent] = deque()
        self._waiters = WaitQueue()
        self._closed = False
        self._affinity = LoopAffinity()
        self._loop_shutdown = shutdown.for_running_loop()
        self._loop_shutdown.add(self)

    def _on_event(self, event: verbs.AsyncEvent) -> None:
        if len(self._events) == MAX_STORED:
            lost = self._events.popleft()
            logger.warning("more than %d events of %r are waiting to be read; dropped %s",
                           MAX_STORED, self.context, lost.type.name)  # fmt: skip
        self._events.append(event)
        self._waiters.wake()

    async def get(self) -> verbs.AsyncEvent:
        """Wait for the next event and return it. No event is lost if the call is cancelled.

        Raises:
            BufferStateError: If the iterator is closed and all stored events have been returned.
        """
        while not self._events:
            if self._closed:
                raise BufferStateError(f"{self!r} is closed")
            await self._waiters.wait()
        return self._events.popleft()

    def get_nowait(self) -> verbs.AsyncEvent | None:
        """Return the next stored event without waiting, or None if no event is stored.

        Raises:
            BufferStateError: If the iterator is closed and all stored events have been returned.
        """
        if self._events:
            return self._events.popleft()
        if self._closed:
            raise BufferStateError(f"{self!r} is closed")
        return None

    async def __aiter__(self) -> AsyncIterator[verbs.AsyncEvent]:
        """Yield events until the iterator is closed and all received events have been yielded."""
        while True:
            try:
                event = await self.get()
            except BufferStateError:
                return
            yield event

    def close(self) -> None:
        """Stop receiving events, and close the device if it was opened by `device_events`."""
        if self._closed:
            return
        self._end_without_loop()
        self._waiters.wake_all()

    def _end_without_loop(self) -> None:
        self._closed = True
        self._loop_shutdown.remove(self)
        self._source.unsubscribe(self._token)
        self._source.release()
        if self._owns_context:
            self.context.close()

    def __repr__(self) -> str:
        return f"<DeviceEvents of {self.context!r}, {len(self._events)} waiting>"


def device_events(device: str | verbs.Device | verbs.Context | None = None) -> DeviceEvents:
    """Return an asynchronous iterator over a device's events. Requires a running event loop.

    Args:
        device: The name of a device, a Device, an open context, or None for the default device (see
            :func:`aiordma.verbs.find_device`). If you pass an open context, the iterator also
            reports events for objects created on this context. While the iterator is open, the
            context's ``async_events()`` returns no events. If you pass anything else, the function
            opens the device, and the iterator reports only events for the device and its ports.

    Raises:
        DeviceNotFoundError: If there is no such device.
    """
    if isinstance(device, verbs.Context):
        return DeviceEvents(device, owned=False)
    opened = device.open() if isinstance(device, verbs.Device) else verbs.open_device(device)
    try:
        return DeviceEvents(opened, owned=True)
    except BaseException:
        opened.close()
        raise
