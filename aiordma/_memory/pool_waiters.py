"""The tasks that wait for memory of a pool, in two queues.

- *Internal* needs are the library's own, over as soon as the device is done: frames, receives,
  staging.  They are served first, and never wait for a user's need.  Otherwise a task that holds a
  buffer and sends would wait for one that wants more than there is now, which waits for that
  buffer.  But while users wait, the blocks that have overtaken them may be no more than a share of
  the pool at a time: they come back, and what is beyond that share is the users'.  Receives are
  exempt from that count: they are kept, so a frame must not wait for one of them.
- *User* needs, leases and fetched messages, are served in the order in which they came, whatever
  their size: small ones do not overtake a large one for ever.

Memory that has come back is handed out in the loop's next iteration, not where it came back: that
may be a finalizer, in the middle of anything.  For the tasks of one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from typing import Generic, Protocol, TypeVar

from .._datapath.memory import Clock
from .._datapath.work_queue import Wait
from .._loop.futures import settle
from ..errors import QuotaError


class Leased(Protocol):
    """A leased block, as a waiter gets it."""

    @property
    def size(self) -> int: ...
    def release(self) -> None: ...


B = TypeVar("B", bound=Leased)


class PoolWaiters(Generic[B]):
    """The waiters of one pool.  `take` makes a leased block, or raises QuotaError if it cannot now.

    `share` is how many bytes internal needs that have overtaken users may have at a time.
    """

    def __init__(self, take: Callable[[int], B], share: int, clock: Clock) -> None:
        self._take = take
        self._share = share
        # Of each its size, and whether it may count as overtaking.
        self._internal: dict[asyncio.Future[B], tuple[int, bool]] = {}
        self._user: dict[asyncio.Future[B], tuple[int, bool]] = {}
        self._overtaking: set[B] = set()
        self._overtaking_bytes = 0
        self._scheduled = False
        self._wait = Wait(clock)
        self.on_wait: Callable[[], None] = lambda: None
        """Called when a task begins to wait."""

    def __len__(self) -> int:
        """The number of waiters."""
        return len(self._internal) + len(self._user)

    def count_wait(self) -> None:
        """Counts whether, and until now how long, any of them waits."""
        self._wait.for_memory(len(self) > 0)

    @property
    def queues(self) -> tuple[Sized, Sized]:
        """The internal needs and the user needs: as they are at any time."""
        return self._internal, self._user

    def join(self, size: int, *, internal: bool, exempt: bool = False) -> asyncio.Future[B]:
        """Queues for a block.  A waiter that is given up, or whose block is unused, must `leave`.

        Where others wait a newcomer queues too, though there may be memory for it.  `exempt`: it is
        served as an internal need, and does not come back soon.
        """
        waiter: asyncio.Future[B] = asyncio.get_running_loop().create_future()
        if internal:
            self._internal[waiter] = size, not exempt
            self.serve_soon()
        else:
            if not self._user:
                self._overtaking.clear()
                self._overtaking_bytes = 0
            self._user[waiter] = size, False
        self.count_wait()
        self.on_wait()
        return waiter

    async def wait(self, size: int, among: set[asyncio.Future[B]], *, internal: bool) -> B:
        """Waits for a block, `among` the caller's waiters; one of a cancelled task is withdrawn."""
        waiter = self.join(size, internal=internal)
        among.add(waiter)
        try:
            return await waiter
        except BaseException:
            self.withdraw(waiter)
            raise
        finally:
            among.discard(waiter)
            del waiter  # the frames of its error have this one

    def returned(self, block: B) -> None:
        """A block has come back.  Must be called while there are waiters."""
        if block in self._overtaking:
            self._overtaking.remove(block)
            self._overtaking_bytes -= block.size
        self.serve_soon()

    def withdraw(self, waiter: asyncio.Future[B]) -> None:
        """The block, there already or not, is not wanted; others may have waited behind it."""
        self._internal.pop(waiter, None)
        self._user.pop(waiter, None)
        self.count_wait()
        if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            waiter.result().release()
        if not waiter.get_loop().is_closed():
            waiter.cancel()
        self.serve_soon()

    def serve_soon(self) -> None:
        """Memory may have come back."""
        waiting = self._internal or self._user
        if waiting and not self._scheduled:
            loop = next(iter(waiting)).get_loop()
            if not loop.is_closed():
                self._scheduled = True
                loop.call_soon(self._serve_all)

    def _serve_all(self) -> None:
        self._scheduled = False
        if self._serve(self._internal):
            self._serve(self._user)
        if self._internal and not self._user:
            self._serve(self._internal)  # they overtake no user any more
        self.count_wait()

    def _serve(self, queue: dict[asyncio.Future[B], tuple[int, bool]]) -> bool:
        """False when there is not enough yet for the first: the others wait behind it."""
        while queue:
            waiter, (size, counts) = next(iter(queue.items()))
            overtakes = counts and bool(self._user)
            if overtakes and self._overtaking and self._overtaking_bytes + size > self._share:
                return True  # what is there is for users
            try:
                block = None if waiter.done() else self._take(size)
            except QuotaError:
                return False
            except Exception as error:
                waiter.set_exception(error)
            else:
                if block is not None:
                    waiter.set_result(block)
                    if overtakes:
                        self._overtaking.add(block)
                        self._overtaking_bytes += block.size
            del queue[waiter]
        return True

    def fail(self, error: Exception) -> None:
        """Ends all waiters with `error`: no memory comes any more."""
        for queue in (self._internal, self._user):
            for waiter in queue:
                settle(waiter, None, error)
            queue.clear()
        self.count_wait()

        def take(_: int) -> B:
            raise error

        # Its callbacks refer to the pool, which refers to this.
        self._take, self.on_wait = take, lambda: None
