"""Who waits for memory of a pool, in two lines.

- *Brief* needs are the library's own, over as soon as the device is done: frames, receives,
  staging.  They are served first, and never stand behind a user's need.  Otherwise a task that
  holds a buffer and sends would wait for one that wants more than there is now, which waits for
  that buffer.  But while users wait, what has gone past them may be no more than a share of the
  pool at a time: it comes back, and what is beyond that share is theirs.  Receives are not counted
  in that: they are kept, so who needs a frame must not have to wait for one of them.
- Users' needs, leases and fetched messages, are served in the order in which they came, whatever
  their size: who wants much is not overtaken for ever by those who want little.

What has come back is handed out in the loop's next turn, not where it came back: that may be a
finalizer, in the middle of anything.  For the tasks of one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from typing import Generic, Protocol, TypeVar

from .errors import QuotaError


class Leased(Protocol):
    """What is waited for."""

    @property
    def size(self) -> int: ...
    def release(self) -> None: ...


B = TypeVar("B", bound=Leased)


class MemoryLine(Generic[B]):
    """The lines of one pool.  `take` makes a leased block, or raises QuotaError for the moment.

    `share` is how many bytes brief needs may have at a time that have gone past users who wait.
    """

    def __init__(self, take: Callable[[int], B], share: int) -> None:
        self._take = take
        self._share = share
        self._brief: dict[asyncio.Future[B], int] = {}
        self._users: dict[asyncio.Future[B], int] = {}
        self._kept: set[asyncio.Future[B]] = set()  # of the brief ones: not to be counted
        self._passed: set[B] = set()
        self._passed_bytes = 0
        self._looking = False

    def __len__(self) -> int:
        """How many wait."""
        return len(self._brief) + len(self._users)

    @property
    def waiting(self) -> tuple[Sized, Sized]:
        """Who has a brief need, and who another: as they are at any time."""
        return self._brief, self._users

    def join(self, size: int, *, brief: bool, kept: bool = False) -> asyncio.Future[B]:
        """A place in line for a block.  Who wants it no more, or has not used it, must `leave`.

        Where others wait a newcomer joins them, though there may be memory for it.  `kept`: it is
        served as a brief need, and not soon over.
        """
        turn: asyncio.Future[B] = asyncio.get_running_loop().create_future()
        if brief:
            self._brief[turn] = size
            if kept:
                self._kept.add(turn)
            self.look_soon()
        else:
            if not self._users:
                self._passed.clear()
                self._passed_bytes = 0
            self._users[turn] = size
        return turn

    def returned(self, block: B) -> None:
        """A block has come back.  Must be told while anybody waits."""
        if block in self._passed:
            self._passed.remove(block)
            self._passed_bytes -= block.size
        self.look_soon()

    def leave(self, turn: asyncio.Future[B]) -> None:
        """The block, there already or not, is not wanted; others may have waited behind it."""
        self._brief.pop(turn, None)
        self._users.pop(turn, None)
        self._kept.discard(turn)
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            turn.result().release()
        turn.cancel()
        self.look_soon()

    def look_soon(self) -> None:
        """Memory may have come back."""
        waiting = self._brief or self._users
        if waiting and not self._looking:
            loop = next(iter(waiting)).get_loop()
            if not loop.is_closed():
                self._looking = True
                loop.call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        if self._serve(self._brief):
            self._serve(self._users)
        if self._brief and not self._users:
            self._serve(self._brief)  # nobody is gone past any more

    def _serve(self, waiting: dict[asyncio.Future[B], int]) -> bool:
        """False when there is not enough yet for the first: the others wait behind it."""
        while waiting:
            turn, size = next(iter(waiting.items()))
            passes = waiting is self._brief and bool(self._users) and turn not in self._kept
            if passes and self._passed and self._passed_bytes + size > self._share:
                return True  # what is there is for users
            try:
                block = None if turn.done() else self._take(size)
            except QuotaError:
                return False
            except Exception as error:
                turn.set_exception(error)
            else:
                if block is not None:
                    turn.set_result(block)
                    if passes:
                        self._passed.add(block)
                        self._passed_bytes += block.size
            del waiting[turn]
            self._kept.discard(turn)
        return True

    def fail(self, error: Exception) -> None:
        """Nothing will come any more."""
        for waiting in (self._brief, self._users):
            for turn in waiting:
                if not turn.done():
                    turn.set_exception(error)
            waiting.clear()
        self._kept.clear()
