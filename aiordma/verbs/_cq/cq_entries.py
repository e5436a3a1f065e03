"""The entries of a completion queue, counted so that it cannot overrun.

A completion queue that overruns is broken, and every queue pair on it with it (IBTA volume 1,
clause 11.6.3.2). So room is set aside before anything can be posted: for a queue pair the sizes of
its two queues, for a shared receive queue its size on every completion queue where its receives
may complete. When one of them has been destroyed, completions of it may still lie in the queue: its
room is free again when the queue has been seen empty after that.
"""

from __future__ import annotations


class Entries:
    """The count, without the queue itself, whose object may be gone before its users.

    ``channel`` collects those of its queues that have something leaving: draining the channel
    sees all of its queues empty at once.
    """

    __slots__ = ("_channel", "capacity", "leaving", "reserved")

    def __init__(self, capacity: int, channel: list[Entries] | None = None) -> None:
        self._channel = channel
        self.capacity: int = capacity
        self.reserved: int = 0
        self.leaving: int = 0

    @property
    def available(self) -> int:
        """Entries that are not reserved."""
        return self.capacity - self.reserved

    def release(self, entries: int) -> None:
        """Free reserved entries at once."""
        if entries > self.reserved - self.leaving:
            raise ValueError(f"{entries} entries released, {self.reserved - self.leaving} reserved")
        self.reserved -= entries

    def leave(self, entries: int) -> None:
        """Free reserved entries when the queue is next seen empty."""
        # It may still be there: a poll that sees the queue empty leaves the list to the next drain.
        if self._channel is not None and self not in self._channel:
            self._channel.append(self)
        self.leaving += entries

    def seen_empty(self) -> None:
        """A poll has found nothing more."""
        if self.leaving:
            self.reserved -= self.leaving
            self.leaving = 0
