"""Timers of seconds behind one descriptor, so that the event loop itself has none.

A loop that has a timer asks the kernel to end each of its sleeps when that is due: the kernel makes
a timer of its own each time, and takes it away with the next message, which is 0.3 us of every
message that wakes the loop (measured).  So what is due in seconds, as long as a connection lives,
is kept here, behind one descriptor that becomes readable in time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from .._native import failure, lib

# What the kernel's clock can be set to, and longer than any timer here: a century.
FAR = 3e9
# Cancelled timers stay in the heap until there are so many, and as many as the others.
MOST_CANCELLED = 64


class CoarseTimer:
    """One call that is due; `cancel` may be called more than once."""

    __slots__ = ("_timers", "callback")

    def __init__(self, timers: CoarseTimers, callback: Callable[[], None]) -> None:
        self._timers = timers
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback = None
            self._timers.cancelled()

    def fire(self) -> None:
        callback, self.callback = self.callback, None
        if callback is not None:
            callback()


class CoarseTimers:
    """The timers of one event loop.  Its driver watches `fd`, and calls `fire` when readable."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # A heap: when each is due, and a number, so that no two timers are compared themselves.
        self._timers: list[tuple[float, int, CoarseTimer]] = []
        self._number = 0
        self._cancelled = 0
        self._set_for = FAR
        self.fd: int = lib.aiordma_timer_open()
        if self.fd < 0:
            raise failure("timerfd_create", -self.fd)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> CoarseTimer:
        """Calls `callback` in the loop, not before `seconds` have gone by."""
        timer = CoarseTimer(self, callback)
        self._number += 1
        due = min(time.monotonic() + seconds, FAR)
        heappush(self._timers, (due, self._number, timer))
        if due < self._set_for:
            self._set()
        return timer

    def cancelled(self) -> None:
        """Counts a cancelled timer.  The heap drops them when there are many."""
        self._cancelled += 1
        if self._cancelled > max(MOST_CANCELLED, len(self._timers) // 2):
            self._timers = [entry for entry in self._timers if entry[2].callback is not None]
            heapify(self._timers)
            self._cancelled = 0

    def fire(self) -> None:
        """Has those that are due called by the loop."""
        try:
            os.read(self.fd, 8)
        except BlockingIOError:
            return  # it was set anew meanwhile
        self._set_for = FAR
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, _, timer = heappop(self._timers)
            if timer.callback is None:
                self._cancelled -= 1
            else:
                self._loop.call_soon(timer.fire)
        self._set()

    def _set(self) -> None:
        """For the first of them.  Too early is harmless, and cheaper than setting it twice."""
        if self._timers and self._timers[0][0] < self._set_for:
            self._set_for = self._timers[0][0]
            code = lib.aiordma_timer_set(self.fd, int(self._set_for * 1e9) + 1)
            if code:
                raise failure("timerfd_settime", code)

    def close(self) -> None:
        """After the last watcher of `fd`; timers that are left are dropped."""
        self._timers.clear()
        os.close(self.fd)
