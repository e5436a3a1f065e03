"""A line of tasks that wait for the same thing, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque


class Waiters:
    """Who waits looks again for what it wants whenever it is woken; being woken promises nothing.

    For the tasks of one event loop.
    """

    def __init__(self) -> None:
        self._line: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Join the line until woken. Who is cancelled after that passes its turn on."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(waiter)
        try:
            await waiter
        except BaseException:
            if waiter in self._line:
                self._line.remove(waiter)
            elif not waiter.cancelled():
                self.wake()
            raise

    def wake(self) -> None:
        """Let the one that waits longest look."""
        while self._line:
            waiter = self._line.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def wake_all(self) -> None:
        """Let everybody look: nothing more will come."""
        while self._line:
            self.wake()
