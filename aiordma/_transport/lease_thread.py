"""A daemon thread that ends leases on time. It exists only while a lease has a deadline.

The owner's event loop may be busy when a lease ends, so this thread, which needs only the GIL, ends
the key. Everything that belongs to the loop follows in the loop. When `Deadline.cancel` has
returned, the action has completed or will never run.

No lock is held here, because the garbage collector can run a finalizer at any point in any thread.
The finalizer may wait for another thread that needs the lock. Shared data is only changed by single
steps of the interpreter.
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
"""The longest lease in seconds. In messages, it is a number of milliseconds with 32 bits."""

Lease = float | Literal["default"] | None
"""A lease in seconds, None for no time limit, or "default" for `Config.lease`."""


def lease_seconds(lease: Lease, default: Lease = "default") -> float | None:
    """Return the lease as a float, or None for no time limit.

    Any kind of number is accepted. "default" stands for the value `default`. Without one, it is
    refused.
    """
    if isinstance(lease, str) and lease == "default":
        lease = default
    if lease is None:
        return None
    length = real("a lease", lease, "a number of seconds, or None for no end")
    if not 0 < length <= LONGEST:
        raise ValueError(f"a lease must be positive and at most {LONGEST} seconds, not {length}")
    return length


def milliseconds(lease: float | None) -> int:
    """Return a lease as it appears in tokens and messages, where 0 means no time limit."""
    return 0 if lease is None else max(1, round(lease * 1000))


class Deadline:
    """An action that runs once, at a given time."""

    __slots__ = ("_action", "_forks", "_over", "_threads", "when")

    def __init__(self, when: float, action: Callable[[], object]) -> None:
        self.when = float(when)
        self._action = [action]  # the thread that removes it either runs it or cancels it
        self._over = threading.Lock()  # held until the action has run or been cancelled
        self._over.acquire()
        self._forks = fork.generation()
        self._threads: list[_LeaseThread] = []  # threads that have this deadline

    @property
    def pending(self) -> bool:
        return bool(self._action)

    def cancel(self) -> None:
        """Cancel the action, or wait until it has completed. A second call has no effect."""
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
        """Return whether this runs in a thread of the deadline: a finalizer within the action."""
        here = threading.get_ident()
        return any(thread.ident == here for thread in self._threads)

    def run(self) -> None:
        try:
            action = self._action.pop()
        except IndexError:
            return  # it was cancelled
        try:
            action()
        except BaseException:  # other leases must still end in time
            logger.exception("ending a lease failed")
        finally:
            self._over.release()


class _LeaseThread(ServiceThread):
    """A thread that runs deadlines until none is left. Only this thread uses the heap."""

    def __init__(self) -> None:
        super().__init__(self._main, "aiordma leases")
        self._new: deque[Deadline] = deque()
        self._cancelled: deque[None] = deque()  # one item per cancellation since the last search
        # The thread acquires this lock to wait, and other threads release it to wake the thread. A
        # SimpleQueue would not work: in Python 3.11 and 3.12, its `get` waits forever if the
        # timeout expires before it begins to wait.
        self._asleep = threading.Lock()
        self._asleep.acquire()
        self._heap: list[tuple[float, int, Deadline]] = []
        self._numbers = itertools.count()  # tie-breakers for equal times
        self._looks_at = -math.inf  # time of the next check; -inf while it is running
        self._search_after = 1  # number of cancellations after which it searches
        self.ending = False
        """Whether the thread is about to end and may not see further deadlines."""

    # Other threads first make a change, and then check whether this thread must be woken. This
    # thread first announces when it checks next, and then checks for changes. No change is
    # therefore missed.

    def add(self, deadline: Deadline) -> None:
        """Add a deadline. If the thread is `ending` afterwards, it may not have seen it."""
        deadline._threads.append(self)
        self._new.append(deadline)
        if deadline.when < self._looks_at:
            self._wake()

    def cancelled(self) -> None:
        """Count a cancelled deadline, and wake the thread to drop them if they are half of all."""
        self._cancelled.append(None)
        if len(self._cancelled) >= self._search_after:
            self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # it has already been woken
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
                if deadline.pending:  # a cancelled one may have been counted before the last search
                    heapq.heappush(self._heap, (deadline.when, next(self._numbers), deadline))

    def _drop_cancelled(self) -> None:
        self._cancelled.clear()  # first, because later cancellations count for the next search
        self._heap = [entry for entry in self._heap if entry[2].pending]
        heapq.heapify(self._heap)

    def _wait(self, when: float) -> None:
        self._looks_at = when
        self._search_after = (len(self._heap) + 1) // 2
        if not self._new and len(self._cancelled) < self._search_after:
            self._asleep.acquire(timeout=max(0.0, min(when - MACHINE.now(), LONGEST)))


_thread: _LeaseThread | None = None


def at(clock: Clock, when: float, action: Callable[[], object]) -> Deadline:
    """Call `action` in the lease thread at the time `when`.

    With a clock in virtual time, its loop calls `action` instead. The action must be quick and
    thread-safe.

    Raises:
        RDMAError: If no thread can be started. The action is never called then.
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
            f"cannot share the memory: failed to start the lease thread ({error}); stop other "
            f"threads, raise the thread limit (ulimit -u, pids.max), or share without a lease"
        ) from error
    _thread = thread  # another thread may have started one too; each one ends in time
    return deadline


def _reset_in_child() -> None:
    global _thread  # noqa: PLW0603 - the parent's, as are the keys
    _thread = None


fork.reset_in_child(_reset_in_child)
