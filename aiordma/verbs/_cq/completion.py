"""Completion queues, classic and extended, and the channels that deliver their events."""

from __future__ import annotations

import errno
import math
import select
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol, TypeAlias

from aiordma import verbs
from aiordma._core.arguments import I32_MAX, integer, seconds
from aiordma._native import CompletionArray, Record, failure, ffi, lib
from aiordma._native import handles as h
from aiordma.errors import BusyError, VerbsError, WorkCompletionError

from .._device.enums import CQFlags, WCFields
from .._device.resource import Node, Resource
from .._device.statistics import ChannelStatistics, CQStatistics
from .._qp.posted_work import PostedWork
from .completion_cursor import CompletionCursor
from .cq_entries import Entries
from .work_completion import WorkCompletion

# The maximum duration of a busy poll in C, in seconds. Signals such as Ctrl-C are handled only
# between polls. The value is a rough estimate.
_MAX_BUSY_POLL = 0.001

# The maximum duration of a sleep, in seconds. A longer sleep could overflow the timeout of poll(2),
# which is an int in milliseconds.
_MAX_SLEEP = 3600.0


# The result of a drain. The first element says whether the drain found completions or the device
# made progress, for example with a long message. The second element says whether more completions
# may be available although the fd is not readable. A plain tuple is faster than a named tuple.
Drained: TypeAlias = tuple[bool, bool]

# The bits of the result of a table's `drain`.
_FOUND_WORK, _MAY_HAVE_MORE = 1, 2
_DRAINED: tuple[Drained, ...] = tuple(
    (bool(bits & _FOUND_WORK), bool(bits & _MAY_HAVE_MORE)) for bits in range(4)
)


class Table(Protocol):
    """The interface that a higher layer implements to keep track of posted work."""

    def drain(self, state: int, most: int, polls_again: bool, /) -> int: ...


class CompletionChannel(Resource[h.ibv_comp_channel]):
    """A channel that delivers events for completion queues.

    Add the file descriptor ``fd`` to an event loop. It is non-blocking and becomes readable when an
    event is pending. It may also become readable without an event, because some devices only do
    their work when the program asks for an event.
    """

    def __init__(self, context: verbs.Context, pointer: h.ibv_comp_channel) -> None:
        self.context = context
        self.fd: int = pointer.fd
        # The C state for taking events and polling all of the channel's queues in a single call.
        self.drain_state: h.aiordma_drain = ffi.new("struct aiordma_drain *")
        self.drain_state.calls = self._calls = context.library.table
        self.drain_state.channel = pointer
        self._state_address = int(ffi.cast("uintptr_t", self.drain_state))
        self.entries_to_release: list[Entries] = []
        # The node keeps `end_and_destroy` alive, which must not keep this object alive.
        drain_state, entries_to_release = self.drain_state, self.entries_to_release

        def end_and_destroy(channel: h.ibv_comp_channel) -> None:
            lib.aiordma_drain_end(drain_state)
            entries_to_release.clear()  # each Entries object in the list refers to the list
            context.library.calls.ibv_destroy_comp_channel(channel)

        super().__init__(Node("CompletionChannel", pointer, end_and_destroy, [context.node]))
        code = lib.aiordma_set_nonblocking(self._calls, self.fd)
        if code:
            self.close()
            raise failure("fcntl", code, "cannot make the completion channel non-blocking")
        self.queues: weakref.WeakValueDictionary[int, CompletionQueue] = (
            weakref.WeakValueDictionary()
        )
        self._events = 0
        self._event_taken = threading.Condition()
        self._has_event_reader = False

    def _peer_wakeups(self) -> int:
        """Return the current wake-up counters, for :meth:`_wrote_to_polling_peers`."""
        return lib.aiordma_peer_wakeups(self._calls)

    def _wrote_to_polling_peers(self, earlier: int) -> bool:
        """Return whether the device has written to peers, and all of these peers were polling.

        Args:
            earlier: An earlier result of :meth:`_peer_wakeups`. Only later writes are considered.

        Returns:
            False if there were no writes, or if the device does not count its writes.
        """
        current = self._peer_wakeups()
        # The upper 32 bits count the writes that had to wake the peer, and the lower 32 bits all
        # other writes.
        has_woken_peer = current >> 32 != earlier >> 32
        return current != earlier and not has_woken_peer

    @property
    def events(self) -> int:
        """The number of completion events received so far."""
        return self._events + self.drain_state.events

    def statistics(self) -> ChannelStatistics:
        """Return the channel's counters and its number of queues."""
        state = self.drain_state
        return ChannelStatistics(len(self.queues), self.events, state.drains, state.completions)

    def get_event(self) -> CompletionQueue | None:
        """Return the queue that the next completion event belongs to, without waiting.

        The event is acknowledged, and the queue is disarmed. Call the queue's ``req_notify()``, and
        then poll the queue until it is empty. An event for a queue whose Python object no longer
        exists is discarded.

        Returns:
            The queue, or None if no event is pending.
        """
        cq = ffi.new("struct ibv_cq **")
        context = ffi.new("void **")
        calls = self.context.library.calls
        while calls.ibv_get_cq_event(self.pointer, cq, context):
            self._events += 1
            calls.ibv_ack_cq_events(cq[0], 1)
            queue = self.queues.get(int(ffi.cast("uintptr_t", cq[0])))
            if queue is not None:
                return queue
        return None

    def _sleep_for(self, queue: CompletionQueue, events_taken_before: int, deadline: float) -> None:
        """Sleep until ``queue`` has an event, but no longer than until the time ``deadline``.

        If several threads are sleeping, only one of them polls the fd, takes the events, and wakes
        the others. If every thread polled the fd, a thread could miss its event, because another
        thread might take the event first.

        Args:
            queue: The completion queue.
            events_taken_before: The value of ``queue._events_taken`` before the queue was armed.
            deadline: The time at which to give up, as returned by ``time.monotonic()``.
        """
        with self._event_taken:
            while (
                queue._events_taken == events_taken_before
                and (remaining := deadline - time.monotonic()) > 0
            ):
                remaining = min(remaining, _MAX_SLEEP)
                if self._has_event_reader:
                    self._event_taken.wait(remaining)
                    continue
                self._has_event_reader = True
                self._event_taken.release()
                try:
                    self._take_event(remaining)
                finally:
                    self._event_taken.acquire()
                    self._has_event_reader = False
                    self._event_taken.notify_all()

    def _take_event(self, seconds: float) -> None:
        """Take a pending event. If none is pending, wait up to ``seconds`` for the fd."""
        if (queue := self.get_event()) is not None:
            queue._events_taken += 1
            return
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        poll.poll(math.ceil(seconds * 1000))

    def _drain_to(self, table: Table, capacity: int, polls_again: bool) -> Drained:
        """Take and acknowledge all events, and rearm and poll the queues, in a single C call.

        Each queue must have been armed before.

        Args:
            table: The table that receives the completions of untracked queue pairs.
            capacity: The maximum number of completions.
            polls_again: Whether the caller will poll again soon if this call finds work. Peers need
                not notify the caller until then.
        """
        if self.node.pointer is None:  # like reading `self.pointer`, but faster
            raise self.closed_error()
        return self._drained(table.drain(self._state_address, capacity, polls_again))

    def _poller_arguments(
        self, capacity: int, on_more_work: Callable[[int], object]
    ) -> tuple[int, int, list[Entries], Callable[[int], object]]:
        """Return the arguments for the methods of a `Poller` that drain this channel.

        Args:
            capacity: The maximum number of completions per call.
            on_more_work: A function that the poller calls with the result if there is more to do.
                The function must pass the result to :meth:`_drained`.
        """
        return self._state_address, capacity, self.entries_to_release, on_more_work

    def _drained(self, result: int) -> Drained:
        """Decode the result of a table's ``drain``.

        Raises:
            VerbsError: If the channel failed.
        """
        if result < 0:
            raise failure("ibv_get_cq_event", -result, f"cannot drain {self!r}")
        if self.entries_to_release and not result & _MAY_HAVE_MORE:
            for entries in self.entries_to_release:
                entries.release_pending()
            self.entries_to_release.clear()
        return _DRAINED[result]

    def _details(self) -> str:
        return f"fd {self.fd}"


class CompletionQueue(Resource[h.ibv_cq]):
    """A queue of completions, in the order in which the device generated them.

    A queue is either classic or extended. On an extended queue, ``fields`` lists the fields that
    the queue reports. On a classic queue, ``fields`` is None. Classic and extended queues otherwise
    work the same way. There are four ways to get completions:

    - Polling: :meth:`poll` returns the available completions.
    - Busy polling: :meth:`wait` with ``spin=math.inf`` polls continuously.
    - Events: :meth:`wait` arms the queue and sleeps until the channel reports an event.
    - Adaptive polling: :meth:`wait` with ``spin`` polls for that many seconds before sleeping.
    """

    def __init__(
        self,
        context: verbs.Context,
        pointer: h.ibv_cq,
        channel: CompletionChannel | None,
        fields: WCFields | None = None,
        flags: CQFlags = CQFlags.NONE,
    ) -> None:
        self.context = context
        self.channel = channel
        self.fields = fields
        self.flags = flags
        self._posted_work: weakref.WeakValueDictionary[int, PostedWork] = (
            weakref.WeakValueDictionary()
        )
        """The posted work of the queue pairs that use this queue, by queue pair number."""
        self.entries: Entries = Entries(
            pointer.cqe, channel.entries_to_release if channel else None
        )
        self._array: CompletionArray | None = None
        self._polls = self._completions = self._arms = 0
        self._events_taken = 0
        """The number of this queue's events that the channel has taken for `wait`."""
        destroy = context.library.calls.ibv_destroy_cq
        if channel is None:
            super().__init__(Node("CompletionQueue", pointer, destroy, [context.node]))
        else:
            drain_state = channel.drain_state

            def forget_and_destroy(cq: h.ibv_cq) -> None:
                lib.aiordma_drain_forget(drain_state, cq)  # the next drain would poll this queue
                destroy(cq)

            super().__init__(
                Node("CompletionQueue", pointer, forget_and_destroy, [context.node, channel.node])
            )
            channel.queues[self.raw_handle] = self
        context._objects_by_address[self.raw_handle] = self

    # --- taking completions ----------------------------------------------------------------

    def poll(self, max: int = 16) -> list[WorkCompletion]:
        """Remove up to ``max`` completions from the queue and return them, without waiting.

        Returns:
            The completions. The list is empty if none are available.
        """
        return self._poll(integer("max", max), 0)

    def _poll(self, max: int, spin_us: int) -> list[WorkCompletion]:
        """Return up to ``max`` completions. Wait for the first one for up to ``spin_us``."""
        if self._array is None or self._array.capacity < max:
            self._array = CompletionArray(max)
        array = self._array
        count = lib.aiordma_poll(self.pointer, array.pointer, array.extended_fields, max, spin_us)
        if count < 0:
            raise failure("ibv_poll_cq", -count, f"cannot poll {self!r}")
        self._polls += 1
        self._completions += count
        if count < max:  # the queue is empty
            self.entries.release_pending()
        return [
            WorkCompletion.from_record(record, self._settle(record), extended_fields, self.fields)
            for record, extended_fields in array.records(count)
        ]

    def _settle(self, record: Record) -> WorkCompletionError | None:
        """Stop tracking the work that has completed. Return the exception if the work failed."""
        qp_num = record[6]
        work = self._posted_work.get(qp_num)
        return work.settle(record) if work is not None else None

    def statistics(self) -> CQStatistics:
        """Return the queue's size, counters and number of reserved entries."""
        return CQStatistics(self.cqe, self.reserved, self._polls, self._completions, self._arms)

    def start_poll(self) -> CompletionCursor:
        """Return a cursor that reads a completion's fields only when they are accessed.

        ::

            with cq.start_poll() as cursor:
                for completion in cursor:
                    print(completion.wr_id, completion.byte_len)

        See ibv_create_cq_ex(3).
        """
        return CompletionCursor(self)

    def wait(
        self, max: int = 16, *, timeout: float | None = None, spin: float = 0.0
    ) -> list[WorkCompletion]:
        """Wait for completions and return them.

        This method first polls for ``spin`` seconds without holding the GIL. It then arms the queue
        and sleeps until the channel reports an event for this queue. The queue is still armed when
        the method returns. Several threads may wait for different queues on the same channel. Do
        not use this method if an event loop is watching the channel.

        Args:
            max: The maximum number of completions to return.
            timeout: The maximum time to wait, in seconds. None waits forever.
            spin: How long to poll before sleeping, in seconds. 0 sleeps immediately, and
                ``math.inf`` never sleeps.

        Returns:
            The completions. The list is empty after a timeout.

        Raises:
            ValueError: If ``max`` is less than 1, or if the queue has no channel and ``spin`` is
                finite.
        """
        max, spin = integer("max", max), seconds("spin", spin, allow_infinity=True)
        if not max:
            raise ValueError("max must be at least 1, not 0")
        if self.channel is None and not math.isinf(spin):
            raise ValueError(
                f"{self!r} has no completion channel to wait on; create the queue with a channel, "
                "or use spin=math.inf"
            )
        now = time.monotonic()
        deadline = (
            math.inf if timeout is None else now + seconds("timeout", timeout, allow_infinity=True)
        )
        while True:
            if completions := self._spin(max, min(deadline, now + spin)):
                return completions
            if (now := time.monotonic()) >= deadline:
                return []
            if self.channel is None or math.isinf(spin):
                continue
            events_taken_before = self._events_taken
            self.req_notify()
            # Poll again, because completions that arrived before arming do not generate an event.
            if completions := self._poll(max, 0):
                return completions
            self.channel._sleep_for(self, events_taken_before, deadline)
            now = time.monotonic()

    def _spin(self, max: int, deadline: float) -> list[WorkCompletion]:
        """Poll at least once, until completions are found or the time ``deadline`` is reached."""
        while True:
            remaining = deadline - time.monotonic()
            completions = self._poll(
                max, math.ceil(min(remaining, _MAX_BUSY_POLL) * 1_000_000) if remaining > 0 else 0
            )
            if completions or remaining <= 0:
                return completions

    # --- events ----------------------------------------------------------------------------

    def req_notify(self, solicited_only: bool = False) -> None:
        """Arm the queue, so that the next completion generates an event on the channel.

        Completions already in the queue do not generate an event, so poll the queue after arming
        it.

        Args:
            solicited_only: Whether to limit events to failed completions and messages sent with
                SendFlags.SOLICITED.
        """
        code = lib.aiordma_req_notify(self.pointer, int(solicited_only))
        if code:
            raise failure(
                "ibv_req_notify_cq", code if code > 0 else errno.EIO, f"cannot arm {self!r}"
            )
        self._arms += 1

    def modify(self, *, cq_count: int, cq_period: float) -> None:
        """Limit events to one per ``cq_count`` completions or ``cq_period`` seconds.

        The device generates an event as soon as either limit is reached. Setting both to zero turns
        moderation off. See ibv_modify_cq(3).

        Args:
            cq_count: The number of completions.
            cq_period: The time in seconds, with a resolution of 1 microsecond and a maximum of
                65535 microseconds.

        Raises:
            ValueError: If the device does not support these values.
            UnsupportedError: If the device does not support moderation.
        """
        limits = self.context.query_device_ex().cq_mod_caps
        if not limits.max_cq_count and not limits.max_cq_period:
            raise self.context._unsupported_error("completion queue moderation", "ibv_modify_cq")
        cq_count = integer("cq_count", cq_count, None)
        period = round(seconds("cq_period", cq_period) * 1_000_000)
        if not 0 <= cq_count <= limits.max_cq_count or not 0 <= period <= limits.max_cq_period:
            raise ValueError(
                f"invalid moderation settings for {self!r}: cq_count={cq_count} (maximum"
                f" {limits.max_cq_count}), cq_period={period} us"
                f" (maximum {limits.max_cq_period} us)"
            )
        attr = ffi.new("struct ibv_modify_cq_attr *")
        attr.attr_mask = lib.IBV_CQ_ATTR_MODERATE
        attr.moderate.cq_count = cq_count
        attr.moderate.cq_period = period
        with self.context._requires_capability("completion queue moderation"):
            self.context.library.calls.ibv_modify_cq(self.pointer, attr)

    # --- size ------------------------------------------------------------------------------

    @property
    def handle(self) -> int:
        """The number that identifies the queue to the device (``ibv_cq.handle``)."""
        return self.pointer.handle

    @property
    def cqe(self) -> int:
        """The maximum number of completions the queue can hold."""
        return self.entries.capacity

    @property
    def reserved(self) -> int:
        """The number of reserved entries. See :mod:`aiordma.verbs._cq.cq_entries`."""
        return self.entries.reserved

    @property
    def available(self) -> int:
        """The number of entries that are not reserved."""
        return self.entries.available

    def resize(self, cqe: int) -> None:
        """Change the maximum number of completions the queue can hold.

        Completions already in the queue are kept. The device may choose a larger size than
        requested.

        Raises:
            ValueError: If ``cqe`` is less than the number of reserved entries.
            UnsupportedError: If the device cannot resize queues.
        """
        cqe = integer("cqe", cqe, 1, I32_MAX)
        if cqe < self.reserved:
            raise ValueError(
                f"cannot resize {self!r} to {cqe} entries, because {self.reserved} are reserved"
            )
        pointer = self.pointer
        with self.context._requires_capability("resizing completion queues"):
            self.context.library.calls.ibv_resize_cq(pointer, cqe)
        self.entries.capacity = pointer.cqe

    def reserve(self, entries: int) -> None:
        """Reserve entries for future completions.

        Raises:
            BusyError: If not enough entries are available. Resize the queue, or use another queue.
        """
        entries = integer("entries", entries)
        if entries > self.available:
            raise BusyError(
                f"{self!r} has {self.available} of {self.cqe} entries free, but {entries} are"
                " needed; resize the queue or use another queue"
            )
        self.entries.reserved += entries

    def make_room(self, entries: int) -> None:
        """Reserve entries, enlarging the queue if not enough are available.

        Raises:
            BusyError: If the device cannot make the queue large enough.
        """
        if entries > self.available:
            try:
                self.resize(self.reserved + entries)
            except VerbsError as error:
                raise BusyError(
                    f"{self!r} has {self.available} entries free, but {entries} are needed, and"
                    " the queue cannot be resized; create a larger queue or use another queue"
                ) from error
        self.reserve(entries)

    def release(self, entries: int) -> None:
        """Release reserved entries immediately. Their completions must already have been polled."""
        try:
            self.entries.release(entries)
        except ValueError as error:
            raise ValueError(f"{self!r}: {error}") from None

    def release_when_empty(self, entries: int) -> None:
        """Release reserved entries as soon as a poll finds the queue empty."""
        self.entries.release_when_empty(entries)

    @property
    def in_use(self) -> int:
        """The number of reserved entries that have not been released or marked for release."""
        return self.reserved - self.entries.pending_release

    def _details(self) -> str:
        kind = "" if self.fields is None else "extended, "
        return f"{kind}{self.cqe} entries, {self.reserved} reserved"


def reserve_entries(node: Node[Any], *wanted: tuple[CompletionQueue | None, int]) -> None:
    """Reserve completion queue entries for as long as the C object owned by ``node`` exists.

    Raises:
        BusyError: If a queue does not have enough entries and cannot be enlarged. In this case, the
            object is destroyed.
    """
    totals: Counter[CompletionQueue] = Counter()
    for cq, entries in wanted:
        if cq is not None:
            totals[cq] += entries
    with ExitStack() as rollback:
        rollback.callback(node.close)
        for cq, entries in totals.items():
            cq.make_room(entries)
            rollback.callback(cq.entries.release, entries)
        rollback.pop_all()
    reserved = [(cq.entries, entries) for cq, entries in totals.items() if entries]

    def release_entries() -> None:
        for queue_entries, entries in reserved:
            queue_entries.release_when_empty(entries)

    node.on_destroyed = release_entries
