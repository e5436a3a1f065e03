"""A daemon thread that ends leases on time. It exists only while a lease has a deadline.

The owner's event loop may be busy when a lease ends, so this thread, which needs only the GIL,
revokes the memory key. The loop does the rest of the work later. When `Deadline.cancel` has
returned, the action has completed or will never run.

This code must not protect shared data with a lock, because the garbage collector can run a
finalizer in any thread at any point. If the finalizer waited for a thread that needs the lock, both
would deadlock. Shared data is therefore changed only by atomic operations of the interpreter. The
two locks in this module are used as events: one thread waits until another one releases the lock.
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

MAX_LEASE = 4294967
"""The longest lease in seconds. In messages, it is a number of milliseconds with 32 bits."""

Lease = float | Literal["default"] | None
"""A lease in seconds, None for no time limit, or "default" for `Config.lease`."""


def lease_seconds(lease: Lease, default: Lease = "default") -> float | None:
    """Return the lease as a float in seconds, or None for no time limit.

    A lease can be any real number. "default" selects the `default` argument, which must then be
    given.
    """
    if isinstance(lease, str) and lease == "default":
        lease = default
    if lease is None:
        return None
    length = real("a lease", lease, "a number of seconds, or None for no end")
    if not 0 < length <= MAX_LEASE:
        raise ValueError(f"a lease must be positive and at most {MAX_LEASE} seconds, not {length}")
    return length


def milliseconds(lease: float | None) -> int:
    """Convert a lease to milliseconds for tokens and messages, where 0 means no time limit."""
    return 0 if lease is None else max(1, round(lease * 1000))


class Deadline:
    """An action that runs once at a given time, unless it is cancelled."""

    __slots__ = ("_action", "_finished", "_fork_generation", "_threads", "when")

    def __init__(self, when: float, action: Callable[[], object]) -> None:
        self.when = float(when)
        self._action = [action]  # the thread that removes the action runs or cancels it
        # An event rather than a lock that protects data: `cancel` waits by acquiring it, and it is
        # released once the action has run or been cancelled.
        self._finished = threading.Lock()
        self._finished.acquire()
        self._fork_generation = fork.generation()
        # The threads that have this deadline: two if the first one was about to end.
        self._threads: list[_LeaseThread] = []

    @property
    def pending(self) -> bool:
        return bool(self._action)

    def cancel(self) -> None:
        """Cancel the action. If it has already started, wait until it has completed."""
        try:
            self._action.pop()
        except IndexError:
            if self._fork_generation == fork.generation() and not self._is_current_thread():
                with self._finished:
                    pass
        else:
            self._finished.release()
            for thread in self._threads:
                thread.on_cancelled()

    def _is_current_thread(self) -> bool:
        """Return whether this is the lease thread, which must not wait for its own action."""
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
            self._finished.release()


class _LeaseThread(ServiceThread):
    """A thread that runs actions until no deadline is left. Only this thread uses the heap."""

    def __init__(self) -> None:
        super().__init__(self._main, "aiordma leases")
        self._new_deadlines: deque[Deadline] = deque()
        self._cancelled: deque[None] = deque()
        """One item per cancellation since cancelled deadlines were last removed from the heap."""
        # The thread waits by acquiring this lock, and other threads wake it by releasing the lock.
        # SimpleQueue is not an option, because its `get` in Python 3.11 and 3.12 waits forever if
        # the timeout expires before the wait begins.
        self._wake_lock = threading.Lock()
        self._wake_lock.acquire()
        self._heap: list[tuple[float, int, Deadline]] = []
        self._numbers = itertools.count()  # tie-breakers for equal times
        self._next_check = -math.inf  # time of the next check; -inf while it is running
        self._removal_threshold = 1  # number of cancellations that triggers `_remove_cancelled`
        self.ending = False
        """Whether the thread is about to end and may not see further deadlines."""

    # To avoid lost wake-ups, other threads make their change before they check whether this thread
    # must be woken. This thread publishes the time of its next check before it looks for changes.

    def add(self, deadline: Deadline) -> None:
        """Add a deadline. If `ending` is True afterwards, the thread may end without running it."""
        deadline._threads.append(self)
        self._new_deadlines.append(deadline)
        if deadline.when < self._next_check:
            self._wake()

    def on_cancelled(self) -> None:
        """Count a cancellation. Wake the thread once half of the heap's deadlines are cancelled."""
        self._cancelled.append(None)
        if len(self._cancelled) >= self._removal_threshold:
            self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # it has already been woken
            self._wake_lock.release()

    def _main(self) -> None:
        while True:
            self._next_check = -math.inf
            self._add_new()
            while self._heap and self._heap[0][0] <= MACHINE.now():
                heapq.heappop(self._heap)[2].run()
            if len(self._cancelled) >= self._removal_threshold:
                self._remove_cancelled()
            if self._heap:
                self._wait(self._heap[0][0])
            elif self.ending and not self._new_deadlines:
                return
            else:
                # Look for new deadlines once more, because another thread may have added one before
                # it could see `ending`.
                self.ending = True

    def _add_new(self) -> None:
        with suppress(IndexError):
            while True:
                deadline = self._new_deadlines.popleft()
                # A cancelled deadline must not enter the heap. If `_remove_cancelled` has already
                # cleared its count, the deadline would stay in the heap until its time.
                if deadline.pending:
                    heapq.heappush(self._heap, (deadline.when, next(self._numbers), deadline))

    def _remove_cancelled(self) -> None:
        self._cancelled.clear()  # first, because later cancellations count for the next removal
        self._heap = [entry for entry in self._heap if entry[2].pending]
        heapq.heapify(self._heap)

    def _wait(self, when: float) -> None:
        self._next_check = when
        self._removal_threshold = (len(self._heap) + 1) // 2
        if not self._new_deadlines and len(self._cancelled) < self._removal_threshold:
            self._wake_lock.acquire(timeout=max(0.0, min(when - MACHINE.now(), MAX_LEASE)))


_thread: _LeaseThread | None = None


def schedule(clock: Clock, when: float, action: Callable[[], object]) -> Deadline:
    """Schedule `action` to run in the lease thread at the time `when`.

    If `clock` is virtual, its event loop runs the action instead. The action must be fast and
    thread-safe.

    Raises:
        RDMAError: If the lease thread cannot be started. In this case, the action never runs.
    """
    global _thread  # noqa: PLW0603 - one for the process
    deadline = Deadline(when, action)
    if clock.call_at is not None:
        clock.call_at(when, deadline.run)
        return deadline
    current = _thread
    if current is not None and not current.ending:
        current.add(deadline)
        if not current.ending:
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
    _thread = thread  # if another thread started one too, each ends when idle
    return deadline


def _reset_in_child() -> None:
    global _thread  # noqa: PLW0603 - the thread and the keys are the parent's
    _thread = None


fork.reset_in_child(_reset_in_child)
