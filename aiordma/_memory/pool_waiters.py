"""Queues of tasks that wait for pool memory.

Each pool has two queues:

- *Internal* requests are for the library's own frames, receives and staging buffers, and end as
  soon as the device has finished. They are served first and never wait for users. Otherwise, a task
  that holds a buffer and sends would wait for a larger user request, which waits for that buffer.
  While users wait, the blocks of internal requests served ahead of them may take only a share of
  the pool at a time. These blocks come back, and memory beyond the share goes to the users.
  Receives do not count towards the share: they keep their memory, and a frame must not wait for one
  of them.
- *User* requests are for leases and fetched messages. They are served in order of arrival, so that
  small requests cannot starve a large one.

Memory may be returned by a finalizer, which can run at any point in the code. Waiters are therefore
served in the loop's next iteration. All waiters of a pool belong to the same event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from typing import Generic, Protocol, TypeVar

from .._datapath.memory import Clock
from .._datapath.work_queue import Wait
from .._event_loop.futures import settle
from ..errors import QuotaError


class Leased(Protocol):
    """The interface of the leased blocks that waiters receive."""

    @property
    def size(self) -> int: ...
    def release(self) -> None: ...


B = TypeVar("B", bound=Leased)


class PoolWaiters(Generic[B]):
    """The tasks that wait for one pool's memory.

    `take` returns a leased block, or raises QuotaError if the pool does not have enough memory now.
    While users wait, internal requests that overtake them may hold up to `share` bytes.
    """

    def __init__(self, take: Callable[[int], B], share: int, clock: Clock) -> None:
        self._take = take
        self._share = share
        # The size of each request, and whether it counts towards `share` if it overtakes users.
        self._internal: dict[asyncio.Future[B], tuple[int, bool]] = {}
        self._user: dict[asyncio.Future[B], tuple[int, bool]] = {}
        # The blocks of internal requests that were served while users were waiting.
        self._overtaking_blocks: set[B] = set()
        self._overtaking_bytes = 0
        self._scheduled = False
        self._wait = Wait(clock)
        self.on_wait: Callable[[], None] = lambda: None
        """The function to call each time a task starts to wait."""

    def __len__(self) -> int:
        """Return the number of waiters."""
        return len(self._internal) + len(self._user)

    def update_statistics(self) -> None:
        """Update the statistics on how often and how long tasks wait for memory."""
        self._wait.for_memory(len(self) > 0)

    @property
    def queues(self) -> tuple[Sized, Sized]:
        """The live queues of internal requests and user requests."""
        return self._internal, self._user

    def join(self, size: int, *, internal: bool, exempt: bool = False) -> asyncio.Future[B]:
        """Queue a request for a block, and return the future that will hold the block.

        The caller must pass the future to `withdraw` if it gives up or does not use the block. A
        new request waits behind earlier requests, even if the pool has memory for it. An internal
        request may keep its block for a long time if it is `exempt`, because it does not count
        towards the share.
        """
        waiter: asyncio.Future[B] = asyncio.get_running_loop().create_future()
        if internal:
            self._internal[waiter] = size, not exempt
            self.serve_soon()
        else:
            # Blocks of internal requests that overtook earlier users do not count for this one.
            if not self._user:
                self._overtaking_blocks.clear()
                self._overtaking_bytes = 0
            self._user[waiter] = size, False
        self.update_statistics()
        self.on_wait()
        return waiter

    async def wait(self, size: int, waiters: set[asyncio.Future[B]], *, internal: bool) -> B:
        """Wait for a block. `waiters` contains the future meanwhile, so that its owner can fail it.

        If the wait fails or is cancelled, the request is withdrawn.
        """
        waiter = self.join(size, internal=internal)
        waiters.add(waiter)
        try:
            return await waiter
        except BaseException:
            self.withdraw(waiter)
            raise
        finally:
            waiters.discard(waiter)
            del waiter  # the traceback of its error refers to this frame

    def on_block_returned(self, block: B) -> None:
        """Record the return of a block. This must be called for every block while tasks wait."""
        if block in self._overtaking_blocks:
            self._overtaking_blocks.remove(block)
            self._overtaking_bytes -= block.size
        self.serve_soon()

    def withdraw(self, waiter: asyncio.Future[B]) -> None:
        """Remove a request and release its block, if any. Other requests may then be served."""
        self._internal.pop(waiter, None)
        self._user.pop(waiter, None)
        self.update_statistics()
        if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            waiter.result().release()
        if not waiter.get_loop().is_closed():
            waiter.cancel()
        self.serve_soon()

    def serve_soon(self) -> None:
        """Schedule a callback that serves the waiters in the loop's next iteration."""
        waiting = self._internal or self._user
        if waiting and not self._scheduled:
            loop = next(iter(waiting)).get_loop()
            if not loop.is_closed():
                self._scheduled = True
                loop.call_soon(self._serve_all)

    def _serve_all(self) -> None:
        """Serve internal requests, and then user requests with the remaining memory."""
        self._scheduled = False
        if self._serve(self._internal):
            self._serve(self._user)
        # The share limits internal requests only while users wait. If all users have been served,
        # continue with the internal requests beyond the share.
        if self._internal and not self._user:
            self._serve(self._internal)
        self.update_statistics()

    def _serve(self, queue: dict[asyncio.Future[B], tuple[int, bool]]) -> bool:
        """Serve a queue in order; return False if the pool has too little memory for a request."""
        while queue:
            waiter, (size, counts_towards_share) = next(iter(queue.items()))
            overtakes = counts_towards_share and bool(self._user)
            if (
                overtakes
                and self._overtaking_blocks
                and self._overtaking_bytes + size > self._share
            ):
                return True  # the remaining memory is for users
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
                        self._overtaking_blocks.add(block)
                        self._overtaking_bytes += block.size
            del queue[waiter]
        return True

    def fail(self, error: Exception) -> None:
        """Fail all current and future waiters with `error`."""
        for queue in (self._internal, self._user):
            for waiter in queue:
                settle(waiter, None, error)
            queue.clear()
        self.update_statistics()

        def take(_: int) -> B:
            raise error

        # Drop the callbacks, which refer to the pool, to break a reference cycle.
        self._take, self.on_wait = take, lambda: None
