"""Completion queues, classic and extended, and the channels of their events."""

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

# Seconds that a busy poll stays in C at most, since Python handles signals: a judgement.
_SLICE = 0.001

# Seconds of one sleep at most, since poll(2) counts milliseconds in an int.
_LONGEST_SLEEP = 3600.0


# The result of a drain: whether there were completions, or the device made progress, as in the
# middle of a long message; and whether there may be more, of which the fd does not tell. Plain
# tuples, which are unpacked faster.
Drained: TypeAlias = tuple[bool, bool]

_DRAINED: tuple[Drained, ...] = tuple((bool(n & 1), bool(n & 2)) for n in range(4))


class Table(Protocol):
    """A table of posted work, whose owner is above this package."""

    def drain(self, state: int, most: int, polls_again: bool, /) -> int: ...


class CompletionChannel(Resource[h.ibv_comp_channel]):
    """Takes the events of completion queues; ``fd`` is for an event loop.

    ``fd`` never blocks. It is readable while there is an event; it may be readable earlier, when
    looking for an event does the device's work that leads to it.
    """

    def __init__(self, context: verbs.Context, pointer: h.ibv_comp_channel) -> None:
        self.context = context
        self.fd: int = pointer.fd
        self.drain_state: h.aiordma_drain = ffi.new("struct aiordma_drain *")
        self.drain_state.calls = self._calls = context.library.table
        self.drain_state.channel = pointer
        self._state_address = int(ffi.cast("uintptr_t", self.drain_state))
        self.leaving: list[Entries] = []
        drain_state, leaving = self.drain_state, self.leaving

        def end_and_destroy(channel: h.ibv_comp_channel) -> None:
            lib.aiordma_drain_end(drain_state)
            leaving.clear()  # each refers to it
            context.library.calls.ibv_destroy_comp_channel(channel)

        super().__init__(Node("CompletionChannel", pointer, end_and_destroy, [context.node]))
        code = lib.aiordma_set_nonblocking(self._calls, self.fd)
        if code:
            self.close()
            raise failure("fcntl", code, "the completion channel's fd")
        self.queues: weakref.WeakValueDictionary[int, CompletionQueue] = (
            weakref.WeakValueDictionary()
        )
        self._events = 0
        self._event_taken = threading.Condition()
        self._a_thread_takes = False

    def _peer_wakeups(self) -> int:
        """A number for :meth:`_wrote_to_polling_peers`."""
        return lib.aiordma_peer_wakeups(self._calls)

    def _wrote_to_polling_peers(self, since: int) -> bool:
        """Has the device written to peers since :meth:`_peer_wakeups`, all of which were polling?

        False where the device cannot tell.
        """
        now = self._peer_wakeups()
        return now != since and now >> 32 == since >> 32

    @property
    def events(self) -> int:
        """Completion events taken so far."""
        return self._events + self.drain_state.events

    def statistics(self) -> ChannelStatistics:
        """Counts of its events, drains and completions so far."""
        state = self.drain_state
        return ChannelStatistics(len(self.queues), self.events, state.drains, state.completions)

    def get_event(self) -> CompletionQueue | None:
        """Take and acknowledge one event; its queue, None when there is no event.

        The queue is not armed any more: call its ``req_notify()``, then poll it until it is
        empty. Events of a queue whose object is gone are taken and passed over.
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

    def _sleep_for(self, queue: CompletionQueue, seen: int, end: float) -> None:
        """Sleep until ``queue._events_taken`` is not ``seen``, or time.monotonic() is ``end``.

        Of several threads that sleep, one takes the events of all: the fd shows an event to each of
        them, but to none that looks after it is taken.
        """
        with self._event_taken:
            while queue._events_taken == seen and (left := end - time.monotonic()) > 0:
                left = min(left, _LONGEST_SLEEP)
                if self._a_thread_takes:
                    self._event_taken.wait(left)
                    continue
                self._a_thread_takes = True
                self._event_taken.release()
                try:
                    self._take_event(left)
                finally:
                    self._event_taken.acquire()
                    self._a_thread_takes = False
                    self._event_taken.notify_all()

    def _take_event(self, seconds: float) -> None:
        """Take an event, or sleep until there may be one."""
        if (queue := self.get_event()) is not None:
            queue._events_taken += 1
            return
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        poll.poll(math.ceil(seconds * 1000))

    def _drain_to(self, table: Table, capacity: int, polls_again: bool) -> Drained:
        """Take every event, acknowledge, arm again, and poll all queues: in one call of C.

        Completions, at most ``capacity``, go to their work in ``table``, for queue pairs that are
        not tracked. Each queue must have been armed once.

        With ``polls_again`` the caller will poll again soon if there was something; peers need not
        notify it until then.
        """
        if self.node.pointer is None:  # as `self.pointer` does, but faster
            raise self.closed_error()
        return self._drained(table.drain(self._state_address, capacity, polls_again))

    def _reader(
        self, capacity: int, otherwise: Callable[[int], object]
    ) -> tuple[int, int, list[Entries], Callable[[int], object]]:
        """The arguments of a poller's ``serve`` or ``spin_once``, to do as :meth:`_drain_to` does.

        ``otherwise`` is called with the result of a drain that did more than to find completions;
        :meth:`_drained` reads it.
        """
        return self._state_address, capacity, self.leaving, otherwise

    def _drained(self, result: int) -> Drained:
        """Reads the result of a table's ``drain``; VerbsError if the channel failed."""
        if result < 0:
            raise failure("ibv_get_cq_event", -result, f"draining {self!r}")
        if self.leaving and not result & 2:
            for queue in self.leaving:
                queue.seen_empty()
            self.leaving.clear()
        return _DRAINED[result]

    def _details(self) -> str:
        return f"fd {self.fd}"


class CompletionQueue(Resource[h.ibv_cq]):
    """Where completions of work are found, in the order in which they were made.

    ``fields`` is what an extended queue was made to tell, None for a classic queue; everything
    else is the same for both. A thread finds completions in one of four ways:

    - polling: :meth:`poll` takes what is there;
    - busy polling: :meth:`wait` with ``spin=math.inf`` polls without a pause;
    - by events: :meth:`wait` arms the queue and sleeps on its channel;
    - adaptive polling: :meth:`wait` with ``spin`` seconds polls for so long before it sleeps.
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
        """Of the queue pairs that complete here, by their numbers."""
        self.entries: Entries = Entries(pointer.cqe, channel.leaving if channel else None)
        self._array: CompletionArray | None = None
        self._polls = self._found = self._arms = 0
        self._events_taken = 0
        """The number of this queue's events that its channel has taken for `wait`."""
        destroy = context.library.calls.ibv_destroy_cq
        if channel is None:
            super().__init__(Node("CompletionQueue", pointer, destroy, [context.node]))
        else:
            drain_state = channel.drain_state

            def forget_and_destroy(cq: h.ibv_cq) -> None:
                lib.aiordma_drain_forget(drain_state, cq)
                destroy(cq)

            super().__init__(
                Node("CompletionQueue", pointer, forget_and_destroy, [context.node, channel.node])
            )
            channel.queues[self.raw_handle] = self
        context._elements[self.raw_handle] = self

    # --- taking completions ----------------------------------------------------------------

    def poll(self, max: int = 16) -> list[WorkCompletion]:
        """Take up to ``max`` completions; an empty list when there are none. Never waits."""
        return self._poll(integer("max", max), 0)

    def _poll(self, max: int, spin_us: int) -> list[WorkCompletion]:
        if self._array is None or self._array.capacity < max:
            self._array = CompletionArray(max)
        array = self._array
        count = lib.aiordma_poll(self.pointer, array.pointer, array.more, max, spin_us)
        if count < 0:
            raise failure("ibv_poll_cq", -count, f"the completion queue {self!r} is broken")
        self._polls += 1
        self._found += count
        if count < max:
            self.entries.seen_empty()
        return [
            WorkCompletion.from_record(record, self._settle(record), more, self.fields)
            for record, more in array.records(count)
        ]

    def _settle(self, record: Record) -> WorkCompletionError | None:
        """Settle the work of a completion, if it is tracked; the exception if it has failed."""
        work = self._posted_work.get(record[6])
        return work.settle(record) if work is not None else None

    def statistics(self) -> CQStatistics:
        """Its room, and what it has done so far."""
        return CQStatistics(self.cqe, self.reserved, self._polls, self._found, self._arms)

    def start_poll(self) -> CompletionCursor:
        """Completions one by one, each field read when it is asked for: ibv_create_cq_ex(3).

        ::

            with cq.start_poll() as cursor:
                for completion in cursor:
                    print(completion.wr_id, completion.byte_len)
        """
        return CompletionCursor(self)

    def wait(
        self, max: int = 16, *, timeout: float | None = None, spin: float = 0.0
    ) -> list[WorkCompletion]:
        """Wait for up to ``max`` completions; empty when ``timeout`` seconds have passed.

        It first polls for ``spin`` seconds (the GIL is free meanwhile), then arms the queue and
        sleeps until its channel has an event of it. ``spin=0`` sleeps at once, ``math.inf``
        never does. It leaves the queue armed. Threads may wait for queues of the same channel, each
        for its own. Not for a channel that an event loop watches.

        ValueError when it would have to sleep and the queue has no channel, or ``max`` is below 1.
        """
        max, spin = integer("max", max), seconds("spin", spin, endless=True)
        if not max:
            raise ValueError(f"{self!r}: a wait for up to 0 completions would not end")
        if self.channel is None and not math.isinf(spin):
            raise ValueError(f"{self!r} has no channel to sleep on: make it with one, or spin=inf")
        now = time.monotonic()
        end = math.inf if timeout is None else now + seconds("timeout", timeout, endless=True)
        while True:
            if found := self._spin(max, min(end, now + spin)):
                return found
            if (now := time.monotonic()) >= end:
                return []
            if self.channel is None or math.isinf(spin):
                continue
            seen = self._events_taken
            self.req_notify()
            # Completions from before arming make no event.
            if found := self._poll(max, 0):
                return found
            self.channel._sleep_for(self, seen, end)
            now = time.monotonic()

    def _spin(self, max: int, end: float) -> list[WorkCompletion]:
        """Poll until ``end``, at least once; back in Python every millisecond, for signals."""
        while True:
            left = end - time.monotonic()
            found = self._poll(max, math.ceil(min(left, _SLICE) * 1_000_000) if left > 0 else 0)
            if found or left <= 0:
                return found

    # --- events ----------------------------------------------------------------------------

    def req_notify(self, solicited_only: bool = False) -> None:
        """Arm: the next completion makes an event on the channel.

        Completions that are already there make none: poll after arming. With ``solicited_only``
        only a failure or a receive whose sender asked for it (SendFlags.SOLICITED) does.
        """
        code = lib.aiordma_req_notify(self.pointer, int(solicited_only))
        if code:
            raise failure("ibv_req_notify_cq", code if code > 0 else errno.EIO, f"arming {self!r}")
        self._arms += 1

    def modify(self, *, cq_count: int, cq_period: float) -> None:
        """Moderate events: one after ``cq_count`` completions or ``cq_period`` seconds.

        Whichever is first; 0 and 0 make one at once again. The period counts in microseconds,
        up to 65535. ValueError beyond what the device takes; UnsupportedError where it has no
        moderation. Source: ibv_modify_cq(3).
        """
        most = self.context.query_device_ex().cq_mod_caps
        if not most.max_cq_count and not most.max_cq_period:
            raise self.context._lacking("moderation of completion queues", "ibv_modify_cq")
        cq_count = integer("cq_count", cq_count, None)
        period = round(seconds("cq_period", cq_period) * 1_000_000)
        if not 0 <= cq_count <= most.max_cq_count or not 0 <= period <= most.max_cq_period:
            raise ValueError(
                f"{self!r}: moderation by {cq_count} completions and {period} us;"
                f" {self.context.name} takes up to {most.max_cq_count} and {most.max_cq_period}"
            )
        attr = ffi.new("struct ibv_modify_cq_attr *")
        attr.attr_mask = lib.IBV_CQ_ATTR_MODERATE
        attr.moderate.cq_count = cq_count
        attr.moderate.cq_period = period
        with self.context._offering("moderation of completion queues"):
            self.context.library.calls.ibv_modify_cq(self.pointer, attr)

    # --- size ------------------------------------------------------------------------------

    @property
    def handle(self) -> int:
        """Its number in the device (``ibv_cq.handle``)."""
        return self.pointer.handle

    @property
    def cqe(self) -> int:
        """Number of its entries."""
        return self.entries.capacity

    @property
    def reserved(self) -> int:
        """Entries that are set aside; see :mod:`aiordma.verbs._cq.cq_entries`."""
        return self.entries.reserved

    @property
    def available(self) -> int:
        """Entries that are not reserved."""
        return self.entries.available

    def resize(self, cqe: int) -> None:
        """Change the number of entries; completions inside are kept. The device may give more.

        ValueError below what is reserved, UnsupportedError where the device cannot.
        """
        cqe = integer("cqe", cqe, 1, I32_MAX)
        if cqe < self.reserved:
            raise ValueError(f"{self!r}: {self.reserved} entries are reserved, more than {cqe}")
        pointer = self.pointer
        with self.context._offering("resizing completion queues"):
            self.context.library.calls.ibv_resize_cq(pointer, cqe)
        self.entries.capacity = pointer.cqe

    def reserve(self, entries: int) -> None:
        """Set entries aside. BusyError when there are not enough; resize, or use another queue."""
        entries = integer("entries", entries)
        if entries > self.available:
            raise BusyError(
                f"{self!r} has {self.available} of {self.cqe} entries free, {entries} are wanted:"
                " resize() it, or use another one"
            )
        self.entries.reserved += entries

    def make_room(self, entries: int) -> None:
        """As :meth:`reserve`, after resizing the queue when there are not enough.

        BusyError when the device cannot, or has no larger queues.
        """
        if entries > self.available:
            try:
                self.resize(self.reserved + entries)
            except VerbsError as error:
                raise BusyError(
                    f"{self!r} has {self.available} entries free, {entries} are wanted, and it"
                    f" cannot grow: make it larger, or use another one"
                ) from error
        self.reserve(entries)

    def release(self, entries: int) -> None:
        """Give reserved entries back, which are free at once: its completions have been polled."""
        try:
            self.entries.release(entries)
        except ValueError as error:
            raise ValueError(f"{self!r}: {error}") from None

    def release_when_empty(self, entries: int) -> None:
        """Give reserved entries back, which are free when the queue has been seen empty."""
        self.entries.leave(entries)

    @property
    def in_use(self) -> int:
        """Entries that are reserved and have not been given back in either way."""
        return self.reserved - self.entries.leaving

    def _details(self) -> str:
        kind = "" if self.fields is None else "extended, "
        return f"{kind}{self.cqe} entries, {self.reserved} reserved"


def hold_room(node: Node[Any], *wanted: tuple[CompletionQueue | None, int]) -> None:
    """Set entries of completion queues aside until what ``node`` stands for has been destroyed.

    BusyError, and it is destroyed at once, when a queue has too few and cannot grow.
    """
    totals: Counter[CompletionQueue] = Counter()
    for cq, entries in wanted:
        if cq is not None:
            totals[cq] += entries
    with ExitStack() as undone:
        undone.callback(node.close)
        for cq, entries in totals.items():
            cq.make_room(entries)
            undone.callback(cq.entries.release, entries)
        undone.pop_all()
    held = [(cq.entries, entries) for cq, entries in totals.items() if entries]

    def leave() -> None:
        for counter, entries in held:
            counter.leave(entries)

    node.at_end = leave
