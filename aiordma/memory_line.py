"""Who waits for memory of a pool, in two lines.

- *Brief* needs are the library's own, over as soon as the device is done: frames, receives,
  staging.  They are served first, and never stand behind a user's need.  Otherwise a task that
  holds a buffer and sends would wait for one that wants more than there is now, which waits for
  that buffer.
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

    def release(self) -> None: ...


B = TypeVar("B", bound=Leased)


class MemoryLine(Generic[B]):
    """The lines of one pool.  `take` makes a leased block, or raises QuotaError for the moment."""

    def __init__(self, take: Callable[[int], B]) -> None:
        self._take = take
        self._brief: dict[asyncio.Future[B], int] = {}
        self._users: dict[asyncio.Future[B], int] = {}
        self._looking = False

    def __len__(self) -> int:
        """How many wait."""
        return len(self._brief) + len(self._users)

    @property
    def waiting(self) -> tuple[Sized, Sized]:
        """Who has a brief need, and who another: as they are at any time."""
        return self._brief, self._users

    def free_for(self, *, brief: bool) -> bool:
        """Whether nobody waits whose turn would come before that of a newcomer."""
        return not self._brief if brief else not len(self)

    def join(self, size: int, *, brief: bool) -> asyncio.Future[B]:
        """A place in line for a block.  Who wants it no more, or has not used it, must `leave`."""
        turn: asyncio.Future[B] = asyncio.get_running_loop().create_future()
        (self._brief if brief else self._users)[turn] = size
        return turn

    def leave(self, turn: asyncio.Future[B]) -> None:
        """The block, there already or not, is not wanted; others may have waited behind it."""
        self._brief.pop(turn, None)
        self._users.pop(turn, None)
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
        for waiting in (self._brief, self._users):
            while waiting:
                turn, size = next(iter(waiting.items()))
                try:
                    block = None if turn.done() else self._take(size)
                except QuotaError:
                    return  # not enough yet for the first: the others wait behind it
                except Exception as error:
                    turn.set_exception(error)
                else:
                    if block is not None:
                        turn.set_result(block)
                del waiting[turn]

    def fail(self, error: Exception) -> None:
        """Nothing will come any more."""
        for waiting in (self._brief, self._users):
            for turn in waiting:
                if not turn.done():
                    turn.set_exception(error)
            waiting.clear()
