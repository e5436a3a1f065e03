"""A first-come, first-served queue of tasks that wait for the same thing."""

from __future__ import annotations

import asyncio
from collections import deque

from .futures import settle


class WaitQueue:
    """A FIFO queue of tasks in one event loop.

    A woken task must check its condition again, because the condition may no longer hold.
    """

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait for a wake-up. A task that is cancelled after its wake-up wakes the next task."""
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
        """Wake all waiting tasks."""
        while self._waiters:
            self.wake()
