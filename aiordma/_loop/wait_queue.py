"""A first-come, first-served queue of tasks that wait for the same thing."""

from __future__ import annotations

import asyncio
from collections import deque

from .futures import settle


class WaitQueue:
    """The waiting tasks of one event loop.

    A task that was woken must check its condition again, because a wake-up guarantees nothing.
    """

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait until woken. A task that is cancelled after being woken wakes the next one."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except BaseException:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif not waiter.cancelled():
                self.wake()
            raise

    def wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if settle(waiter):
                return

    def wake_all(self) -> None:
        """Wake all tasks, because nothing more will come."""
        while self._waiters:
            self.wake()
