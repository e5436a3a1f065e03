"""Timers of several seconds behind one descriptor, so that the event loop itself has no timers.

If a loop has a timer, each of its sleeps needs a timeout. The kernel sets up a timer for it and
removes it with the next message, and asyncio checks its own timers. For a small message that wakes
the loop, this takes a tenth of all instructions (measured). Timers that exist as long as a
connection are therefore kept here. One descriptor becomes readable when the first of them expires.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from .._datapath.memory import Clock
from .._native import failure, lib

# Latest clock time at which a timer can be due, in seconds. It is about a century, which the kernel
# still accepts.
MAX_TIME = 3e9
# Cancelled timers are removed only if the heap contains at least this many timers.
COMPACT_THRESHOLD = 64


class CoarseTimers:
    """The timers of an event loop. The driver watches `fd` and calls `fire` when it is readable."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop, self._clock = loop, clock
        # A heap of (time, number, timer). The numbers are unique, so timers are never compared.
        self._timers: list[tuple[float, int, asyncio.Handle]] = []
        self._number = 0
        self._compact_at = COMPACT_THRESHOLD  # heap size at which cancelled timers are removed
        self._armed_for = MAX_TIME  # the time at which `fd` becomes readable
        self._virtual_timer: Any = None  # the timer of a virtual clock
        self.fd: int = lib.aiordma_timer_open()
        if self.fd < 0:
            raise failure("timerfd_create", -self.fd)

    def _arm(self, when: float) -> None:
        """Make the timers fire at time `when`, replacing any time set earlier."""
        if self._clock.call_at is not None:  # a virtual clock
            self._disarm()
            self._virtual_timer = self._clock.call_at(when, self._fire_due)
            return
        # Add 1 because a time of 0 would disarm the timer.
        code = lib.aiordma_timer_set(self.fd, int(max(0.0, when) * 1e9) + 1)
        if code:
            raise failure("timerfd_settime", code)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> asyncio.Handle:
        """Schedule `callback` to run in the loop after at least `seconds`."""
        if len(self._timers) >= self._compact_at:
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapify(self._timers)
            self._compact_at = max(COMPACT_THRESHOLD, 2 * len(self._timers))
        timer = asyncio.Handle(callback, (), self._loop)
        self._number += 1
        due = min(self._clock.now() + seconds, MAX_TIME)
        heappush(self._timers, (due, self._number, timer))
        if due < self._armed_for:
            self._arm_for_first()
        return timer

    def _disarm(self) -> None:
        if self._virtual_timer is not None:
            self._virtual_timer.cancel()

    def fire(self) -> None:
        """Schedule the callbacks of the timers that are due."""
        try:
            os.read(self.fd, 8)
        except BlockingIOError:
            return  # the descriptor has been set again in the meantime
        self._fire_due()

    def _fire_due(self) -> None:
        self._armed_for = MAX_TIME
        now = self._clock.now()
        while self._timers and self._timers[0][0] <= now:
            self._loop.call_soon(run_timer, heappop(self._timers)[2])
        self._arm_for_first()

    def _arm_for_first(self) -> None:
        """Arm the descriptor for the earliest timer, unless it will fire by then anyway."""
        if self._timers and self._timers[0][0] < self._armed_for:
            self._armed_for = self._timers[0][0]
            self._arm(self._armed_for)

    def close(self) -> None:
        """Drop the remaining timers and close the descriptor, which must no longer be watched."""
        self._timers.clear()
        self._disarm()
        os.close(self.fd)


def run_timer(timer: asyncio.Handle) -> None:
    if not timer.cancelled():
        timer._run()
