"""The end of leases on time: one daemon thread of the process, as long as a lease has an end.

The owner's event loop may be computing when a lease ends, so the key is withdrawn by this thread,
which needs only the GIL.  What belongs to the loop follows in the loop.  An action runs under the
lock of this module, as does `cancel`: after `cancel` has returned, the action has been done, or
never will be.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from .._native import fork
from ..errors import RDMAError

logger = logging.getLogger("aiordma.connection")

now = time.monotonic
"""The clock of all leases, in seconds."""


def check_lease(lease: float | None) -> None:
    if lease is not None and not 0 < lease <= 0xFFFFFFFF / 1000:
        raise ValueError(f"a lease is more than 0 and at most 4294967 seconds, not {lease}")


def milliseconds(lease: float | None) -> int:
    """As in a token and in messages; 0: without an end."""
    return 0 if lease is None else max(1, round(lease * 1000))


class Deadline:
    """An action that is due at a time, once."""

    __slots__ = ("_action", "when")

    def __init__(self, when: float, action: Callable[[], None]) -> None:
        self.when = when
        self._action: Callable[[], None] | None = action

    @property
    def pending(self) -> bool:
        return self._action is not None

    def cancel(self) -> None:
        """Waits for an action that is under way.  Idempotent."""
        with _changed:
            if self._action is not None:
                self._action = None
                _drop_cancelled()

    def run(self) -> None:
        action, self._action = self._action, None
        assert action is not None
        try:
            action()
        except Exception:  # the others have to end in time as well
            logger.exception("the end of a lease failed")


_changed = threading.Condition(threading.RLock())  # a finalizer may run within
_heap: list[tuple[float, int, Deadline]] = []
_numbers = itertools.count()  # of deadlines at the same time
_cancelled = 0  # of those in the heap
_thread: threading.Thread | None = None


def at(when: float, action: Callable[[], None]) -> Deadline:
    """Calls `action` in the thread, at `when` of `now`.  It must be quick, and thread-safe.

    RDMAError when there can be no thread: then it is never called.
    """
    global _thread  # noqa: PLW0603 - one for the process
    deadline = Deadline(when, action)
    with _changed:
        if _thread is None:
            _thread = threading.Thread(target=_run, name="aiordma leases", daemon=True)
            try:
                _thread.start()
            except RuntimeError as error:
                _thread = None  # the next deadline tries again
                raise RDMAError(
                    f"the memory is not shared: the thread that would end its lease cannot be "
                    f"started ({error}); end other threads, raise their limit (ulimit -u, "
                    f"pids.max), or share without a lease"
                ) from error
        heapq.heappush(_heap, (when, next(_numbers), deadline))
        if _heap[0][2] is deadline:
            _changed.notify()
    return deadline


def _drop_cancelled() -> None:
    """One more is cancelled: when half of them are, they go; without any the thread ends."""
    global _cancelled  # noqa: PLW0603
    _cancelled += 1
    if 2 * _cancelled >= len(_heap):
        _heap[:] = [entry for entry in _heap if entry[2].pending]
        heapq.heapify(_heap)
        _cancelled = 0
        _changed.notify()


def _run() -> None:
    global _cancelled, _thread  # noqa: PLW0603
    with _changed:
        while _heap:
            when, _, deadline = _heap[0]
            if not deadline.pending:
                heapq.heappop(_heap)
                _cancelled -= 1
            elif when > now():
                _changed.wait(when - now())
            else:
                heapq.heappop(_heap)
                deadline.run()
        _thread = None


def _reset_in_child() -> None:
    # The thread is the parent's, and it may have held the lock; so are the keys.
    global _cancelled, _changed, _thread  # noqa: PLW0603
    _changed = threading.Condition(threading.RLock())
    _heap.clear()
    _cancelled = 0
    _thread = None


fork.reset_in_child(_reset_in_child)
