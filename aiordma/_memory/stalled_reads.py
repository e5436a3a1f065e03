"""Detection of connections whose peers hold pool memory by responding slowly to READs.

The memory of a long message is allocated before its data arrives, and a posted READ keeps it until
the queue pair is destroyed. Therefore, if tasks wait for memory, a connection is ended if its peer
responds too slowly to READs. If no task waits, there is no timer, and a peer may be slow. This time
counts as soon as a task waits. Otherwise, tasks that wait for less than `timeout` would never cause
a connection to end.

Together, all readers of a pool must read at least MIN_BYTES_PER_SECOND bytes per second, each of
them an equal part. This limits the time for which they hold memory, whatever their number. All
readers of a pool belong to the same event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from typing import Protocol

from .._datapath.memory import Clock

MIN_BYTES_PER_SECOND = 16 << 20


class Reader(Protocol):
    """A connection with READs in flight into large blocks of the pool."""

    @property
    def progress(self) -> int:
        """The number of bytes of completed READs."""

    def stalled(self, timeout: float) -> None:
        """Abort the READs, which have been too slow for `timeout` seconds."""


class StalledReads:
    """The readers of one pool, and the time when each reader last made enough progress."""

    def __init__(self, waiting: Sized, clock: Clock) -> None:
        self.timeout: float = 2.0
        """The time in seconds in which each reader must read its part."""
        self._waiting, self._clock = waiting, clock
        # The progress of each reader when it was last fast enough, and the time of that check.
        self._readers: dict[Reader, tuple[int, float]] = {}
        self._scheduled = False

    def begin(self, reader: Reader) -> None:
        self._readers[reader] = reader.progress, self._clock.now()
        self.check_soon()

    def end(self, reader: Reader) -> None:
        self._readers.pop(reader, None)

    def check_soon(self, seconds: float = 0) -> None:
        """Schedule a check after `seconds` if tasks are waiting for memory."""
        if self._readers and len(self._waiting) and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(seconds, self._check)

    def _check(self) -> None:
        """Abort the READs of every connection that has read too slowly for `timeout` seconds."""
        self._scheduled = False
        now = self._clock.now()
        # The pool's connections must read at the minimum rate together, each an equal part.
        min_rate = MIN_BYTES_PER_SECOND / (len(self._readers) or 1)
        for reader, (progress, progress_at) in list(self._readers.items()):
            if reader.progress - progress >= min_rate * self.timeout:
                self._readers[reader] = reader.progress, now
            elif now - progress_at >= self.timeout:
                self.end(reader)
                reader.stalled(self.timeout)
        if self._readers:
            self.check_soon(self.timeout / 4)
