"""How long the receives of a connection are, and how that changes while it is used.

The compiled rules are those of `ReceiveQueue` (aiordma/_datapath/receives.pyx) for this side's, and
of `MessageChannel` (channel.pyx) for the peer's.

Some facts: a receive is filled by the next frame, whatever its length; a frame that is longer than
its receive breaks the queue pair (IBTA volume 1, clause 9.7.4.1.6), one that is much shorter wastes
memory.  Receives are used in the order in which they were posted, and every frame and every write
with immediate data uses up one.

So the receives of a side may change their size at any time, if the peer is told from which one on:
both sides count.  Receives begin small, since most connections are idle and most messages short.  A
message that does not fit is a rendezvous, which costs two frames and a READ instead of one frame;
when several of those would have fitted `largest`, the receives grow, and when a good while nothing
has needed that, they shrink again.
"""

from __future__ import annotations

from collections import deque

from aiordma.errors import ProtocolError

GROW_AFTER = 4
"""Messages that would have fitted larger receives, before there are any."""
SHRINK_AFTER = 256
"""Frames that have fitted the small ones, before the receives are small again."""
MAX_CHANGES = 8
"""Changes that a peer may tell of ahead of its use: it has no reason for more than one."""


class OwnReceives:
    """The sizes of this side's receives: `smallest`, or `largest`."""

    __slots__ = ("_enough", "_missed", "largest", "posted", "size", "smallest")

    def __init__(self, smallest: int, largest: int) -> None:
        self.smallest = smallest
        self.largest = max(smallest, largest)
        self.size = smallest
        """Of those that are posted from now on."""
        self.posted = 0
        """How many have been posted."""
        self._missed = 0
        self._enough = 0

    def arrived(self, length: int) -> None:
        """A frame of so many bytes is here, or the request of a message that would make one."""
        if length <= self.smallest:
            self._enough += 1
        elif length <= self.largest:
            self._enough = 0
            self._missed += self.size == self.smallest

    @property
    def wanted(self) -> int:
        """The size that would be right."""
        if self.size == self.smallest:
            return self.largest if self._missed >= GROW_AFTER else self.smallest
        return self.smallest if self._enough >= SHRINK_AFTER else self.largest

    def change(self) -> None:
        """From now on they are posted as they are wanted; the peer is being told."""
        self.size = self.wanted
        self._missed = self._enough = 0

    def stay(self) -> None:
        """It could not be done: look again after as many messages more."""
        self._missed = self._enough = 0


class PeerReceives:
    """What the next frame to the peer may be as long as: `size`, and never more than `most`."""

    __slots__ = ("_changes", "_most", "_sent", "size")

    def __init__(self, size: int, most: int) -> None:
        self._most = most
        self._sent = 0
        self._changes: deque[tuple[int, int]] = deque()
        self.size = self._within(size)

    def _within(self, size: int) -> int:
        return min(size, self._most)

    def sent(self) -> None:
        """A frame or a write with immediate data has been sent."""
        self._sent += 1
        if self._changes:
            self._look()

    def told(self, first: int, size: int) -> None:
        """The receives from number `first` on (counted from 0) have `size` bytes.

        ProtocolError when that is no news, or more of it than anyone needs.
        """
        if first < (self._changes[-1][0] if self._changes else self._sent):
            raise ProtocolError(
                f"the peer tells of the size of its receive {first}, which has been used"
            )
        if len(self._changes) == MAX_CHANGES:
            raise ProtocolError("the peer changes the size of its receives all the time")
        self._changes.append((first, size))
        self._look()

    def _look(self) -> None:
        while self._changes and self._changes[0][0] <= self._sent:
            self.size = self._within(self._changes.popleft()[1])
