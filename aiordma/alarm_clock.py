"""Timers that leave the sleep of an event loop alone.

A loop that has a timer asks the kernel to end each of its sleeps when that is due: the kernel makes
a timer of its own each time, and takes it away with the next message, which is 0.3 us of every
message that wakes somebody (measured).  So what is due in seconds, as long as a connection lives,
is kept here, behind one descriptor that becomes readable in time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from ._native import failure, lib

# What the kernel's clock can be set to, and more than anybody waits: a century.
FAR = 3e9
# Alarms that were cancelled stay in their place until there are so many, and as many as the others.
MOST_CANCELLED = 64


class Alarm:
    """One call that is due; `cancel` when it is not wanted any more, as often as one likes."""

    __slots__ = ("_clock", "callback")

    def __init__(self, clock: AlarmClock, callback: Callable[[], None]) -> None:
        self._clock = clock
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback = None
            self._clock.cancelled()

    def ring(self) -> None:
        callback, self.callback = self.callback, None
        if callback is not None:
            callback()


class AlarmClock:
    """Of one event loop, in which somebody watches `fd`, and calls `ring` when it is readable."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # A heap: when each is due, and a number, so that no two are compared themselves.
        self._alarms: list[tuple[float, int, Alarm]] = []
        self._number = 0
        self._cancelled = 0
        self._set_for = FAR
        self.fd = lib.aiordma_timer_open()
        if self.fd < 0:
            raise failure("timerfd_create", -self.fd)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Alarm:
        """As the loop's: `callback` is called in it, not before `seconds` have gone by."""
        alarm = Alarm(self, callback)
        self._number += 1
        due = min(time.monotonic() + seconds, FAR)
        heappush(self._alarms, (due, self._number, alarm))
        if due < self._set_for:
            self._set()
        return alarm

    def cancelled(self) -> None:
        """One of them has been.  It is forgotten when many have."""
        self._cancelled += 1
        if self._cancelled > max(MOST_CANCELLED, len(self._alarms) // 2):
            self._alarms = [entry for entry in self._alarms if entry[2].callback is not None]
            heapify(self._alarms)
            self._cancelled = 0

    def ring(self) -> None:
        """Those that are due have their turn soon."""
        try:
            os.read(self.fd, 8)
        except BlockingIOError:
            return  # it was set anew meanwhile
        self._set_for = FAR
        now = time.monotonic()
        while self._alarms and self._alarms[0][0] <= now:
            _, _, alarm = heappop(self._alarms)
            if alarm.callback is None:
                self._cancelled -= 1
            else:
                self._loop.call_soon(alarm.ring)
        self._set()

    def _set(self) -> None:
        """For the first of them.  Too early is harmless, and cheaper than setting it twice."""
        if self._alarms and self._alarms[0][0] < self._set_for:
            self._set_for = self._alarms[0][0]
            code = lib.aiordma_timer_set(self.fd, int(self._set_for * 1e9) + 1)
            if code:
                raise failure("timerfd_settime", code)

    def close(self) -> None:
        """When nobody watches it any more, and nobody waits for it."""
        self._alarms.clear()
        os.close(self.fd)
