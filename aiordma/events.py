"""`async for` over the asynchronous events of a device."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator

from . import verbs
from ._core.async_only import AsyncIteration
from ._loop import shutdown
from ._loop.affinity import LoopAffinity
from ._loop.driver import ContextEvents
from ._loop.wait_queue import WaitQueue
from .errors import BufferStateError

logger: logging.Logger = logging.getLogger("aiordma.driver")

# Events that wait to be read; then the oldest are dropped. A judgement: a port that comes and goes
# all the time must not fill the memory of a program that reads once a day.
KEPT = 1024


class DeviceEvents(shutdown.ClosesAtExit, AsyncIteration):
    """The events of a device, its ports, queue pairs and queues, as they happen.

    ::

        async with aiordma.device_events("mlx5_0") as events:
            async for event in events:
                print(event.type.name, event.port_num or event.element)

    Use :func:`device_events` to create one. It receives all events from then on. If several are
    open, each of them receives every event, and so do this library's connections. Up to 1024 events
    wait to be taken; then the oldest are dropped, and a warning is logged. If it is still open when
    it is dropped, or when its event loop ends, it is closed with a ResourceWarning.
    """

    def __init__(self, context: verbs.Context, *, owned: bool) -> None:
        self.context = context
        self._owned = owned
        self._source = ContextEvents.for_context(context)
        self._token = self._source.subscribe(shutdown.weakly(self._hear))
        self._events: deque[verbs.AsyncEvent] = deque()
        self._waiters = WaitQueue()
        self._closed = False
        self._affinity = LoopAffinity()
        self._loop_shutdown = shutdown.of_running_loop()
        self._loop_shutdown.add(self)

    def _hear(self, event: verbs.AsyncEvent) -> None:
        if len(self._events) == KEPT:
            lost = self._events.popleft()
            logger.warning("more than %d events of %r are waiting to be read; dropped %s",
                           KEPT, self.context, lost.type.name)  # fmt: skip
        self._events.append(event)
        self._waiters.wake()

    async def get(self) -> verbs.AsyncEvent:
        """Wait for the next event. Cancelling does not lose an event.

        Raises:
            BufferStateError: If it is closed, also while a task is waiting.
        """
        while not self._events:
            if self._closed:
                raise BufferStateError(f"{self!r} is closed")
            await self._waiters.wait()
        return self._events.popleft()

    def get_nowait(self) -> verbs.AsyncEvent | None:
        """Return the next event, or None if there is none.

        Raises:
            BufferStateError: If it is closed, and all events received before that have been taken.
        """
        if self._events:
            return self._events.popleft()
        if self._closed:
            raise BufferStateError(f"{self!r} is closed")
        return None

    async def __aiter__(self) -> AsyncIterator[verbs.AsyncEvent]:
        """Iterate over the events until it is closed, including those received before that."""
        while True:
            try:
                event = await self.get()
            except BufferStateError:
                return
            yield event

    def close(self) -> None:
        """Stop receiving events. If the device was opened for this, it is closed."""
        if self._closed:
            return
        self._end_without_loop()
        self._waiters.wake_all()

    def _end_without_loop(self) -> None:
        self._closed = True
        self._loop_shutdown.remove(self)
        self._source.unsubscribe(self._token)
        self._source.release()
        if self._owned:
            self.context.close()

    def __repr__(self) -> str:
        return f"<DeviceEvents of {self.context!r}, {len(self._events)} waiting>"


def device_events(device: str | verbs.Device | verbs.Context | None = None) -> DeviceEvents:
    """Return an asynchronous iterator over the events of a device. Requires a running event loop.

    Args:
        device: A name, or any argument of :func:`aiordma.verbs.find_device`. The device is opened
            for this and reports events of the device and its ports. An open context also reports
            events of the objects created on it, which ``context.async_events()`` then no longer
            returns.

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
