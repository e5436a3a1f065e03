"""The driver of the event loop: completion channels and connection-manager channels as readers.

These facts shaped the design:

- The descriptor of a completion channel becomes readable when an armed completion queue gets a
  completion. Arming covers only later completions. One turn therefore takes every event,
  acknowledges the events, arms the queue and polls until it is empty. A completion between polling
  and arming creates a new event, and the level-triggered descriptor calls again. No timer is needed
  (ibv_get_cq_event(3)).
- A `wr_id` alone identifies what was posted: it leads to a slot in the table
  (_datapath/work_queue.pyx).
- Waking a sleeping process on another core takes longer than all other work for a small message.
  After completions, the driver therefore polls again for a moment before the loop sleeps
  (`adaptive_polling`). It polls after the woken tasks have run, because polling earlier would delay
  what they post. An idle process never polls.
- The device reports an asynchronous event once, to the first reader (ibv_get_async_event(3)). The
  loops of a process share a context that the connection manager opened. Each loop therefore watches
  the context, and the first one takes all events for all loops (`ContextEvents`). An event often
  says why completions fail, and arrives before them. A work queue that sees a flush therefore takes
  the events first.

Only this module calls `loop.add_reader`. Everything here belongs to one event loop and runs in its
thread.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Self, cast

from .. import cm, verbs
from .._core.snapshot_types import DeviceState, PoolState, RegistrationCacheState
from .._datapath.memory import MACHINE, Clock
from .._datapath.rail import FATAL_EVENTS, REFUSALS, SendQueue
from .._datapath.work_queue import WorkRequestTable
from .._memory.registration_cache import RegistrationCache
from ..config import Config
from ..errors import DeviceEventError, InternalError, RDMAError
from ..mr_pool import MemoryPool
from . import device_failures, shutdown
from .coarse_timers import CoarseTimers
from .completion_reader import CompletionReader
from .loop_settings import Choice, ConfiguredResource
from .per_loop_resource import PerLoopResource
from .time_share import TimeShare

logger = logging.getLogger("aiordma.driver")

# Maximum number of connection-manager events handled per loop iteration. The descriptor stays
# readable while more events are pending. The value is an estimate. A listener accepts the same
# number of sockets per iteration (connect_tcp.py).
MAX_EVENTS = 64

# Errors which mean that opening the same device again would fail too.
DEVICE_GONE = frozenset({errno.ENODEV, errno.ENXIO, errno.EIO})

# Asynchronous events after which the affected queue pairs no longer work.
QP_ENDING_EVENTS = FATAL_EVENTS | REFUSALS

# Asynchronous events that are logged as warnings.
WARNING_EVENTS = (verbs.EventType.PORT_ERR, verbs.EventType.DEVICE_FATAL)

# Number of entries per completion queue, unless the device supports fewer. Many queue pairs share a
# completion queue.
CQ_ENTRIES = 4096


def stop_reading(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    if not loop.is_closed():
        loop.remove_reader(fd)


def uses_port(qp: verbs.QueuePair, port_num: int | None) -> bool:
    """Return whether the queue pair uses the port, or True if its port cannot be queried."""
    try:
        return qp.query().port_num == port_num
    except (RDMAError, OSError):
        return True


def affects(event: verbs.AsyncEvent, qp: verbs.QueuePair) -> bool:
    """Return whether an event affects the queue pair, its queues, its port or its device."""
    if event.element is not None:
        return event.element in (qp, qp.srq, qp.send_cq, qp.recv_cq)
    at_port = event.type is verbs.EventType.PORT_ERR and uses_port(qp, event.port_num)
    return at_port or event.type is verbs.EventType.DEVICE_FATAL


def clock_of(loop: asyncio.AbstractEventLoop) -> Clock:
    clock = getattr(loop, "clock", None)  # a program's own loop may use this name differently
    return clock if isinstance(clock, Clock) else MACHINE


class Driver(ConfiguredResource):
    """One event loop's resources on a device: protection domain, completion queues, memory pool.

    `for_context` and `for_device` return the driver for the running loop. Each driver must be
    released with `release`.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, key: object, context: verbs.Context, choice: Choice
    ) -> None:
        super().__init__(loop, key, context.name, choice)
        settings = choice.settings
        self.context = context
        self.clock: Clock = clock_of(loop)
        with ExitStack() as resources:  # a failure must not leave resources in the context
            self.pd: verbs.ProtectionDomain = resources.enter_context(context.alloc_pd())
            self.channel: verbs.CompletionChannel = resources.enter_context(
                context.create_comp_channel()
            )
            self.pool: MemoryPool = MemoryPool(
                self.pd, limit=settings.pool_limit, huge_pages=settings.huge_pages, clock=self.clock
            )
            resources.pop_all()
        self.registrations: RegistrationCache = RegistrationCache(
            self.pd, settings.cached_registrations
        )
        self.table: WorkRequestTable = WorkRequestTable(loop, self.clock)
        self._send_queues: dict[verbs.QueuePair, SendQueue] = {}
        self._cqs: list[verbs.CompletionQueue] = []
        self._broken: set[verbs.CompletionQueue] = set()
        """Queues that have overrun or otherwise failed, and are not used for new queue pairs."""
        self._cq_entries = min(CQ_ENTRIES, context.query_device().max_cqe)
        # Do not spin in virtual time, which stands still.
        spin_us = 0 if self.clock.call_at else math.ceil(settings.polling * 1e6)
        self._reader = CompletionReader(self.channel, self.table, self._send_queues, spin_us)
        self.timers: CoarseTimers = CoarseTimers(loop, self.clock)
        loop.add_reader(self.channel.fd, *self._reader.callback())
        loop.add_reader(self.timers.fd, self._on_timers)
        self._events = ContextEvents.for_context(context)
        self._event_subscription = self._events.subscribe(self._on_async_event)

    @classmethod
    def for_context(cls, context: verbs.Context, config: Config, opener: str) -> Driver:
        """Return the driver for an open context, for example one from the connection manager.

        `config` and `opener` are the arguments of `loop_settings.choose`.
        """
        return cls._acquire_configured(
            context, config, opener, lambda loop, choice: cls(loop, context, context, choice)
        )

    @classmethod
    def for_device(cls, device: verbs.Device, config: Config, opener: str) -> Driver:
        """Return the driver for a device, opening the device if this loop has not opened it yet.

        `config` and `opener` are the arguments of `loop_settings.choose`.
        """

        def make(loop: asyncio.AbstractEventLoop, choice: Choice) -> Driver:
            try:
                context = device.open()
            except OSError as error:
                if error.errno in DEVICE_GONE:
                    device_failures.report(loop, device.name, error)
                raise
            try:
                driver = cls(loop, device.name, context, choice)
            except BaseException:
                context.close()
                raise
            driver.has_idle_timeout = True
            device_failures.opened(loop, device.name)
            return driver

        return cls._acquire_configured(device.name, config, opener, make)

    def _reset_after_fork(self) -> None:
        super()._reset_after_fork()
        # If a callback of a drain has forked, `Wakeups.is_in_loop` would otherwise be true in the
        # child.
        self.table.wakeups.calling_back = False
        self._reader.close()

    # ---- work queues ---------------------------------------------------------------------

    def reserve_cq(self, entries: int) -> verbs.CompletionQueue:
        """Reserve `entries` entries in a completion queue, and return the queue.

        The full depth of each queue pair is reserved before the queue pair is created, so a
        completion queue cannot overrun. `release_cq` releases the reservation.
        """
        for cq in self._cqs:
            if cq not in self._broken and cq.available >= entries:
                break
        else:
            # Do not create an extended queue. The driver does not read its timestamps, which slow
            # down the device.
            size = max(self._cq_entries, entries)
            cq = self.context.create_cq(size, self.channel, extended=False)
            cq.req_notify()
            self._cqs.append(cq)
        cq.reserve(entries)
        return cq

    def release_cq(self, cq: verbs.CompletionQueue, entries: int) -> None:
        """Release a reservation of `reserve_cq`, and close the queue if it is no longer used."""
        if self._closed:
            return  # it was closed with the loop
        cq.release_when_empty(entries)
        # `in_use` already excludes these entries, so the last user closes the queue here, with any
        # completions left in it. The first queue stays open for later connections.
        if not cq.in_use and cq is not self._cqs[0]:
            self._cqs.remove(cq)
            self._broken.discard(cq)
            cq.close()
            # Closing the queue consumes all events of the channel. Poll soon, because some of them
            # may have announced completions in other queues.
            if not self.loop.is_closed():
                self.loop.call_soon(self._reader.on_completions)

    def attach(self, qp: verbs.QueuePair, send_queue: SendQueue) -> None:
        """Register the send queue that posts to `qp`. The send queue owns its slots in `table`."""
        qp.untrack()  # `table` does the accounting
        self._send_queues[qp] = send_queue

    def detach(self, qp: verbs.QueuePair) -> None:
        """Unregister a queue pair that is about to be destroyed. Further calls have no effect."""
        self._send_queues.pop(qp, None)

    def take_device_events(self) -> None:
        """Handle the device's pending asynchronous events."""
        self._events.take()

    def poll(self) -> bool:
        """Handle pending completions without waiting for the loop; return False if there are none.

        Tasks woken by these completions run in the loop's next iteration.
        """
        return self._reader.poll()

    def subscribe(self, listener: Callable[[verbs.AsyncEvent], None]) -> object:
        """Call `listener` for every event of the device; return a token for `unsubscribe`."""
        return self._events.subscribe(listener)

    def unsubscribe(self, token: object) -> None:
        self._events.unsubscribe(token)

    def figures(self) -> DeviceState:
        """Return this driver's part of `aiordma.snapshot`. Any thread may call this."""
        statistics = self.context.statistics()
        return {
            "name": self.context.name,
            "loop": id(self.loop),
            "connections": len(self._send_queues),
            "work_requests": len(self.table),
            "completions": self.channel.statistics().completions,
            "pool": cast("PoolState", self.pool.statistics()._asdict()),
            "registration_cache": cast(
                "RegistrationCacheState", self.registrations.counts()._asdict()
            ),
            "completion_queues": [
                {"entries": cq.cqe, "reserved": cq.reserved} for cq in list(self._cqs)
            ],
            "open": dict(statistics.open),
            "failures": dict(statistics.failures),
            "events": dict(statistics.events),
        }

    # ---- readers -------------------------------------------------------------------------

    def _on_timers(self) -> None:
        if not self._closed:  # the driver may have been closed since the fd became readable
            self.timers.fire()

    def report(self, send_queue: SendQueue, error: Exception) -> None:
        """Report an error in handling a completion, and break only the affected connection."""
        self.loop.call_exception_handler(
            {
                "message": f"aiordma: handling a completion of {send_queue!r} failed",
                "exception": error,
            }
        )
        internal = InternalError(f"handling a completion failed: {error!r}")
        internal.__cause__ = error
        send_queue.connection_broke(internal)

    def _on_async_event(self, event: verbs.AsyncEvent) -> None:
        """Deliver an event to the queue pairs that it affects."""
        if event.type is verbs.EventType.DEVICE_FATAL:
            # Make the next connection create a new driver, which opens the device again. Nobody can
            # acquire this driver any more, so it need not wait for another user.
            self._unregister()
            self.has_idle_timeout = False
            error = DeviceEventError(event.type.name, device=self.context.name)
            device_failures.report(self.loop, self.context.name, error)
        if event.type is verbs.EventType.CQ_ERR and event.element in self._cqs:
            self._broken.add(event.element)
        qps = list(self._send_queues)
        if isinstance(event.element, verbs.QueuePair):
            qps = [event.element] if event.element in self._send_queues else []
        affected = [self._send_queues[qp] for qp in qps if affects(event, qp)]
        if event.port_num is not None or event.type is verbs.EventType.DEVICE_FATAL:
            # Log the event before the errors that it causes.
            level = logging.WARNING if event.type in WARNING_EVENTS else logging.INFO
            port = f", port {event.port_num}" if event.port_num is not None else ""
            logger.log(level, "%s event on %s%s", event.type.name, self.context.name, port)
        for send_queue in affected:
            send_queue.device_event(event)

    def _release_unneeded(self) -> None:
        self.registrations.clear()

    def _close(self) -> None:
        self._reader.close()
        stop_reading(self.loop, self.channel.fd)
        stop_reading(self.loop, self.timers.fd)
        self.timers.close()
        self._events.unsubscribe(self._event_subscription)
        self._events.release()
        with ExitStack() as steps:  # in reverse order, and all of them even if one fails
            if not self.context.borrowed:
                steps.callback(self.context.close)
            steps.callback(self.pd.close)
            steps.callback(self.pool.close)
            steps.callback(self.registrations.clear)
            steps.callback(self.channel.close)
            for cq in self._cqs:
                steps.callback(cq.close)


class ContextEvents(PerLoopResource):
    """The only reader of a context's asynchronous events in one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, context: verbs.Context) -> None:
        super().__init__(loop, context)
        self._context = context
        self._listeners: dict[object, Callable[[verbs.AsyncEvent], None]] = {}
        # Store the descriptor, because `async_fd` changes if the connection manager reopens the
        # device.
        self._fd = context.async_fd
        loop.add_reader(self._fd, shutdown.loop_end(loop).bind_callback(self.take))

    @classmethod
    def for_context(cls, context: verbs.Context) -> ContextEvents:
        return cls._acquire(context, lambda loop: cls(loop, context))

    def take(self) -> None:
        """Read the device's pending events, and deliver them to the subscribers."""
        # Either may have been closed since the fd became readable.
        if not self._closed and not self._context.closed:
            for event in self._context.async_events():
                self.deliver(self._context, event)

    @classmethod
    def deliver(cls, context: verbs.Context, event: verbs.AsyncEvent) -> None:
        """Deliver an event to the subscribers of every loop.

        Each subscriber is called in the thread of its loop, so that a blocked loop does not delay
        the other loops.
        """
        here = asyncio.get_running_loop()
        for each in cls.all():
            if each._context is not context:
                continue
            if each.loop is here:
                each._notify(event)
            else:
                with suppress(RuntimeError):  # that loop was closed without a shutdown
                    each.loop.call_soon_threadsafe(each._notify, event)

    def _notify(self, event: verbs.AsyncEvent) -> None:
        for token, listener in list(self._listeners.items()):
            if token in self._listeners:
                listener(event)

    def subscribe(self, listener: Callable[[verbs.AsyncEvent], None]) -> object:
        """Call `listener` in this loop for every event; return a token for `unsubscribe`."""
        token = object()
        self._listeners[token] = listener
        return token

    def unsubscribe(self, token: object) -> None:
        """Stop delivering events, including events that are already scheduled in the loop."""
        self._listeners.pop(token, None)

    def _close(self) -> None:
        stop_reading(self.loop, self._fd)


class Watch:
    """A callback that the running loop calls while a file descriptor is readable, until `close`.

    It is used for descriptors that do not belong to a driver.
    """

    def __init__(self, fd: int, callback: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = fd
        self._loop.add_reader(fd, shutdown.loop_end(self._loop).bind_callback(callback))

    def close(self) -> None:
        """Stop watching. Call this before closing the descriptor. Further calls have no effect."""
        stop_reading(self._loop, self._fd)


async def writable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    is_writable = asyncio.Event()
    loop.add_writer(fd, is_writable.set)
    try:
        await is_writable.wait()
    finally:
        loop.remove_writer(fd)


class EventDriver(PerLoopResource):
    """One event loop's channel of connection-manager events, which is shared by its IDs."""

    has_idle_timeout = True

    def __init__(self, loop: asyncio.AbstractEventLoop, library: verbs.Library) -> None:
        super().__init__(loop, library.name)
        self.channel: cm.EventChannel = cm.EventChannel(library)
        self._handlers: dict[cm.ConnectionId, Callable[[cm.ConnectionEvent], None]] = {}
        self._start_reading()

    @classmethod
    def for_library(cls, library: verbs.Library) -> Self:
        return cls._acquire(library.name, lambda loop: cls(loop, library))

    def attach(self, id: cm.ConnectionId, handler: Callable[[cm.ConnectionEvent], None]) -> None:
        """Dispatch events of `id` to `handler`. A listener's handler also gets connect requests."""
        self._handlers[id] = handler

    def detach(self, id: cm.ConnectionId) -> None:
        self._handlers.pop(id, None)

    def take(self) -> None:
        """Dispatch pending events up to a limit, so that a flood of events starves no task."""
        for _ in range(MAX_EVENTS):
            if not self._take_one():
                return

    def _take_one(self) -> bool:
        """Pass an event to its listener's or ID's handler; return False if no event is pending."""
        if self._closed or (event := self.channel.get_event()) is None:
            return False
        handler = self._handlers.get(event.listen_id or event.id)
        if handler is not None:
            handler(event)
        elif event.type is cm.EventType.CONNECT_REQUEST:
            event.id.close()  # its listener has just been closed; the peer sees a rejection
        return True

    def _start_reading(self) -> None:
        self.loop.add_reader(self.channel.fd, shutdown.loop_end(self.loop).bind_callback(self.take))

    def _close(self) -> None:
        stop_reading(self.loop, self.channel.fd)
        self.channel.close()


class RequestDriver(EventDriver):
    """An `EventDriver` for one loop's listeners. It limits the time spent on their requests.

    When the time share is used up, further requests stay in the device's queue, which holds only a
    few requests from each network. The ID of a request must be migrated to another channel before
    its own events can be awaited.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, library: verbs.Library) -> None:
        super().__init__(loop, library)
        self.share: TimeShare = TimeShare(clock_of(loop))
        """The share of time for requests, whatever the response, and for handshakes."""

    def take(self) -> None:
        """Handle one event, or pause until the time share allows more work.

        The handshake for a request begins before the next event is handled. The time for each
        request is charged, even if the response is a challenge or a rejection.
        """
        wait = self.share.wait()
        if not wait or self._closed:
            began = self.share.now()
            self._take_one()
            self.share.use(self.share.now() - began)
            return
        stop_reading(self.loop, self.channel.fd)
        # Do not keep a reference to the timer. It would keep the `LoopEnd` alive.
        self.loop.call_later(wait, shutdown.loop_end(self.loop).bind_callback(self._start_reading))

    def _start_reading(self) -> None:
        if not self._closed:  # it may have been closed during the pause
            super()._start_reading()
