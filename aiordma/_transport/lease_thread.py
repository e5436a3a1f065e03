"""The end of leases on time: one daemon thread of the process, as long as a lease has an end.

The owner's event loop may be computing when a lease ends, so the key is withdrawn by this thread,
which needs only the GIL.  What belongs to the loop follows in the loop.  After `Deadline.cancel`
has returned, the action has been done, or never will be.

No lock is held here, since the collector can run a destructor at any step, in any thread, and that
may wait for another thread which needs the lock.  What threads share is changed by single steps of
the interpreter.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from .._core.arguments import real
from .._datapath.memory import MACHINE, Clock
from .._native import fork
from .._native.service_thread import ServiceThread
from ..errors import RDMAError

logger = logging.getLogger("aiordma.connection")

LONGEST = 4294967
"""Seconds of a lease at most: as milliseconds they have 32 bits in messages."""

Lease = float | Literal["default"] | None
"""Seconds, None: without an end, or "default": `Config.lease`."""


def lease_seconds(lease: Lease, default: float | None = None) -> float | None:
    """The lease as a float, whatever number it is; "default" is `default`."""
    if isinstance(lease, str) and lease == "default":
        lease = default
    if lease is None:
        return None
    length = real("a lease", lease, "a number of seconds, or None for no end")
    if not 0 < length <= LONGEST:
        raise ValueError(f"a lease is more than 0 and at most {LONGEST} seconds, not {length}")
    return length


def milliseconds(lease: float | None) -> int:
    """As in a token and in messages; 0: without an end."""
    return 0 if lease is None else max(1, round(lease * 1000))


class Deadline:
    """An action that is due at a time, once."""

    __slots__ = ("_action", "_forks", "_over", "_threads", "when")

    def __init__(self, when: float, action: Callable[[], object]) -> None:
        self.when = float(when)
        self._action = [action]  # a thread that takes it out runs it, or never lets it run
        self._over = threading.Lock()  # while it has not run
        self._over.acquire()
        self._forks = fork.generation()
        self._threads: list[_LeaseThread] = []  # that know of it

    @property
    def pending(self) -> bool:
        return bool(self._action)

    def cancel(self) -> None:
        """Waits for an action that is under way.  Idempotent."""
        try:
            self._action.pop()
        except IndexError:
            if self._forks == fork.generation() and not self._runs_here():
                with self._over:
                    pass
        else:
            self._over.release()
            for thread in self._threads:
                thread.cancelled()

    def _runs_here(self) -> bool:
        """True if the caller is a thread of this deadline: a destructor, within the action."""
        here = threading.get_ident()
        return any(thread.ident == here for thread in self._threads)

    def run(self) -> None:
        try:
            action = self._action.pop()
        except IndexError:
            return  # cancelled
        try:
            action()
        except BaseException:  # the others have to end in time as well
            logger.exception("the end of a lease failed")
        finally:
            self._over.release()


class _LeaseThread(ServiceThread):
    """Runs deadlines, until it has none.  It alone uses the heap."""

    def __init__(self) -> None:
        super().__init__(self._main, "aiordma leases")
        self._new: deque[Deadline] = deque()
        self._cancelled: deque[None] = deque()  # one for each since the heap was searched
        # Taken by the thread as it waits, released by what wakes it.  Not a SimpleQueue: in Python
        # 3.11 and 3.12 its `get` waits for ever when the time is over before it begins to wait.
        self._asleep = threading.Lock()
        self._asleep.acquire()
        self._heap: list[tuple[float, int, Deadline]] = []
        self._numbers = itertools.count()  # of deadlines at the same time
        self._looks_at = -math.inf  # when it looks by itself: as it begins
        self._search_after = 1  # so many are cancelled
        self.ending = False
        """It takes no more deadlines than it has."""

    # Another thread changes something, then looks whether this one has to be told; this one says
    # when it looks next, then looks whether something has changed.

    def add(self, deadline: Deadline) -> None:
        """If it is `ending` afterwards, it may not have seen it."""
        deadline._threads.append(self)
        self._new.append(deadline)
        if deadline.when < self._looks_at:
            self._wake()

    def cancelled(self) -> None:
        """One more is: when half of them are, they go; without any the thread ends."""
        self._cancelled.append(None)
        if len(self._cancelled) >= self._search_after:
            self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # it has been woken already
            self._asleep.release()

    def _main(self) -> None:
        while True:
            self._looks_at = -math.inf
            self._take_new()
            while self._heap and self._heap[0][0] <= MACHINE.now():
                heapq.heappop(self._heap)[2].run()
            if len(self._cancelled) >= self._search_after:
                self._drop_cancelled()
            if self._heap:
                self._wait(self._heap[0][0])
            elif self.ending and not self._new:
                return
            else:
                self.ending = True

    def _take_new(self) -> None:
        with suppress(IndexError):
            while True:
                deadline = self._new.popleft()
                if deadline.pending:  # one that is not may have been counted before the last search
                    heapq.heappush(self._heap, (deadline.when, next(self._numbers), deadline))

    def _drop_cancelled(self) -> None:
        self._cancelled.clear()  # first: what is cancelled from now on counts for the next time
        self._heap = [entry for entry in self._heap if entry[2].pending]
        heapq.heapify(self._heap)

    def _wait(self, when: float) -> None:
        self._looks_at = when
        self._search_after = (len(self._heap) + 1) // 2
        if not self._new and len(self._cancelled) < self._search_after:
            self._asleep.acquire(timeout=max(0.0, min(when - MACHINE.now(), LONGEST)))


_thread: _LeaseThread | None = None


def at(clock: Clock, when: float, action: Callable[[], object]) -> Deadline:
    """Calls `action` at that time of the clock, if that is the machine's in the thread.  It must be
    quick, and thread-safe.

    RDMAError when there can be no thread: then it is never called.
    """
    global _thread  # noqa: PLW0603 - one for the process
    deadline = Deadline(when, action)
    if clock.call_at is not None:
        clock.call_at(when, deadline.run)
        return deadline
    known = _thread
    if known is not None and not known.ending:
        known.add(deadline)
        if not known.ending:
            return deadline
    thread = _LeaseThread()
    thread.add(deadline)
    try:
        thread.start()
    except RuntimeError as error:
        deadline.cancel()
        raise RDMAError(
            f"the memory is not shared: the thread that would end its lease cannot be "
            f"started ({error}); end other threads, raise their limit (ulimit -u, "
            f"pids.max), or share without a lease"
        ) from error
    _thread = thread  # another thread may have begun one at the same time: each ends its own
    return deadline


def _reset_in_child() -> None:
    global _thread  # noqa: PLW0603 - the parent's, as are the keys
    _thread = None


fork.reset_in_child(_reset_in_child)
