"""Accounting of the entries of a completion queue, so that it cannot overrun.

An overrun breaks a completion queue and every queue pair on it (IBTA volume 1, clause 11.6.3.2).
Entries are therefore reserved before anything can be posted. A queue pair reserves the sizes of its
two queues. A shared receive queue reserves its size on every completion queue where its receives
may complete. After one of these has been destroyed, the queue may still contain its completions.
Its entries are released when a poll has found the queue empty.
"""

from __future__ import annotations


class Entries:
    """The counts of a completion queue's entries.

    They are separate from the queue, because its object may be deleted before its users.

    Args:
        capacity: The number of entries.
        channel: The list of the channel's queues with entries to release. Draining the channel
            finds all of them empty at the same time.
    """

    __slots__ = ("_channel", "capacity", "leaving", "reserved")

    def __init__(self, capacity: int, channel: list[Entries] | None = None) -> None:
        self._channel = channel
        self.capacity: int = capacity
        self.reserved: int = 0
        self.leaving: int = 0

    @property
    def available(self) -> int:
        """The number of entries that are not reserved."""
        return self.capacity - self.reserved

    def release(self, entries: int) -> None:
        """Release reserved entries immediately."""
        if entries > self.reserved - self.leaving:
            held = self.reserved - self.leaving
            raise ValueError(f"cannot release {entries} entries, because only {held} are reserved")
        self.reserved -= entries

    def leave(self, entries: int) -> None:
        """Release reserved entries when the queue is next found empty."""
        # It may still be there: a poll that sees the queue empty leaves the list to the next drain.
        if self._channel is not None and self not in self._channel:
            self._channel.append(self)
        self.leaving += entries

    def seen_empty(self) -> None:
        """Release entries because a poll has found the queue empty."""
        if self.leaving:
            self.reserved -= self.leaving
            self.leaving = 0
