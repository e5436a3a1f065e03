"""`async for` over the asynchronous events of a device."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator

from . import verbs
from ._loop import shutdown
from ._loop.affinity import LoopAffinity
from ._loop.driver import ContextEvents
from ._loop.wait_queue import WaitQueue
from .errors import BufferStateError

logger: logging.Logger = logging.getLogger("aiordma.driver")

# Events that wait to be read; then the oldest are dropped. A judgement: a port that comes and goes
# all the time must not fill the memory of a program that reads once a day.
KEPT = 1024


class DeviceEvents(shutdown.ClosesAtExit):
    """The events of a device, its ports, queue pairs and queues, as they happen.

    ::

        async with aiordma.device_events("mlx5_0") as events:
            async for event in events:
                print(event.type.name, event.port_num or event.element)

    Made by :func:`device_events`. It hears what happens from then on; of several that are open at
    once each hears of everything, and so do the connections of this library. Up to 1024 events
    wait to be looked at; then the oldest are dropped, and a warning is logged. What is open when
    it is dropped, or when its event loop ends, is closed with a ResourceWarning.
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
            logger.warning("%d events of %r wait to be read: %s is dropped",
                           KEPT, self.context, lost.type.name)  # fmt: skip
        self._events.append(event)
        self._waiters.wake()

    async def get(self) -> verbs.AsyncEvent:
        """The next event, waited for. Cancelling loses none.

        BufferStateError once it has been closed, also for tasks that wait then.
        """
        while not self._events:
            if self._closed:
                raise BufferStateError(f"{self!r} is closed")
            await self._waiters.wait()
        return self._events.popleft()

    def get_nowait(self) -> verbs.AsyncEvent | None:
        """The next event that is there, None when there is none."""
        return self._events.popleft() if self._events else None

    async def __aiter__(self) -> AsyncIterator[verbs.AsyncEvent]:
        """Events until it is closed; what has been heard by then is still given."""
        while True:
            try:
                event = await self.get()
            except BufferStateError:
                return
            yield event

    def close(self) -> None:
        """Hear no more. A device that was opened for this is closed."""
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
    """The asynchronous events of a device, to be iterated over; in a running event loop.

    ``device`` is a name, or what :func:`aiordma.verbs.find_device` finds, and is opened for this:
    it tells of the device and its ports. An open context tells of what was made with it, too, and
    of nothing more by ``context.async_events()`` as long as this is open. DeviceNotFoundError for
    a name that is not there.
    """
    if isinstance(device, verbs.Context):
        return DeviceEvents(device, owned=False)
    opened = device.open() if isinstance(device, verbs.Device) else verbs.open_device(device)
    try:
        return DeviceEvents(opened, owned=True)
    except BaseException:
        opened.close()
        raise
