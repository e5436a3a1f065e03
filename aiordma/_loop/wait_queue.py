"""A queue of tasks that wait for the same thing, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque

from .futures import settle


class WaitQueue:
    """A task that is woken checks again for what it wants: being woken promises nothing.

    For the tasks of one event loop.
    """

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Waits until woken.  A task that is cancelled after that wakes the next one."""
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
        """Wakes all: nothing more will come."""
        while self._waiters:
            self.wake()
