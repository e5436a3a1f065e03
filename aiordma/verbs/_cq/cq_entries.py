"""Accounting of completion queue entries, which prevents overruns.

An overrun breaks a completion queue and all queue pairs that use it (IBTA volume 1, clause
11.6.3.2). Entries are therefore reserved before any work can be posted. A queue pair reserves an
entry for every request that fits into its send queue and its receive queue. A shared receive queue
does the same on every completion queue on which its receives may complete.

After a queue pair or a shared receive queue is destroyed, the completion queue may still contain
completions from it. The reserved entries are therefore released only after a poll has found the
completion queue empty.
"""

from __future__ import annotations


class Entries:
    """The number of entries in a completion queue, and the number of reserved entries.

    The counts are stored outside the CompletionQueue object, which may be deleted before the
    objects that use the queue.

    Args:
        capacity: The total number of entries.
        channel_release_list: The channel's list of objects that are waiting to release entries.
            They release the entries when a drain leaves all of the channel's queues empty.
    """

    __slots__ = ("_channel_release_list", "capacity", "pending_release", "reserved")

    def __init__(self, capacity: int, channel_release_list: list[Entries] | None = None) -> None:
        self._channel_release_list = channel_release_list
        self.capacity: int = capacity
        self.reserved: int = 0
        self.pending_release: int = 0

    @property
    def available(self) -> int:
        """The number of entries that are not reserved."""
        return self.capacity - self.reserved

    def release(self, entries: int) -> None:
        """Release reserved entries immediately."""
        if entries > self.reserved - self.pending_release:
            held = self.reserved - self.pending_release
            raise ValueError(f"cannot release {entries} entries, because only {held} are reserved")
        self.reserved -= entries

    def release_when_empty(self, entries: int) -> None:
        """Release reserved entries when the queue is next found empty."""
        # An earlier call may have added this object. The list is cleared only when a drain of the
        # channel has left all of its queues empty.
        if self._channel_release_list is not None and self not in self._channel_release_list:
            self._channel_release_list.append(self)
        self.pending_release += entries

    def release_pending(self) -> None:
        """Release the entries marked for release. Call this when a poll finds the queue empty."""
        if self.pending_release:
            self.reserved -= self.pending_release
            self.pending_release = 0
