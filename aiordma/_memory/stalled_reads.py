"""Connections whose peers hold memory of the pool by not answering the READs into it.

The memory of a long message is taken before its bytes have come, and a posted READ keeps it until
the queue pair is gone.  So while others wait for memory, a peer that answers its READs too slowly
loses its connection.  When no task waits, there is no timer, and a peer may take its time; but that
time counts as soon as a task waits, or one that waits for less than `timeout` would never
help.

Too slowly: the readers of a pool must make SLOWEST bytes a second together, each an equal part, so
that what they hold is back in a time that is bounded, however many they are.

For the tasks of one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from typing import Protocol

from .._datapath.memory import Clock

SLOWEST = 16 << 20


class Reader(Protocol):
    """A connection that has READs under way into large blocks of the pool."""

    @property
    def progress(self) -> int:
        """Bytes of those that have completed."""

    def stalled(self, timeout: float) -> None:
        """Ends the reads, which have not made their part in so many seconds."""


class StalledReads:
    """The readers of one pool, and since when each has not made its part."""

    def __init__(self, waiting: Sized, clock: Clock) -> None:
        self.timeout: float = 2.0
        """Seconds in which each must make its part."""
        self._waiting, self._clock = waiting, clock
        self._readers: dict[Reader, tuple[int, float]] = {}
        self._scheduled = False

    def begin(self, reader: Reader) -> None:
        self._readers[reader] = reader.progress, self._clock.now()
        self.look_soon()

    def end(self, reader: Reader) -> None:
        self._readers.pop(reader, None)

    def look_soon(self, seconds: float = 0) -> None:
        """A task has begun to wait for memory, perhaps."""
        if self._readers and len(self._waiting) and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._scheduled = False
        now = self._clock.now()
        part = SLOWEST / (len(self._readers) or 1)
        for reader, (progress, since) in list(self._readers.items()):
            if reader.progress - progress >= part * self.timeout:
                self._readers[reader] = reader.progress, now
            elif now - since >= self.timeout:
                self.end(reader)
                reader.stalled(self.timeout)
        if self._readers:
            self.look_soon(self.timeout / 4)
