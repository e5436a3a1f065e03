"""Pool blocks for requests that must be served in order, even when the pool is exhausted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..mr_pool import Block, MemoryPool


class OrderedBlockSource:
    """A source of pool blocks for requests that must be served in order.

    If the pool has no memory for the first request, all later requests wait too. `on_memory` is
    called when memory is available again. It should then retry the request that is first in line.
    `internal` and `exempt` have the same meaning as for `PoolWaiters.join`.
    """

    def __init__(
        self,
        pool: MemoryPool,
        on_memory: Callable[[], None],
        *,
        internal: bool,
        exempt: bool = False,
    ) -> None:
        self.pool: MemoryPool = pool
        self._on_memory: Callable[[], None] | None = on_memory
        self._internal = internal
        self._exempt = exempt
        self._waiter: asyncio.Future[Block] | None = None
        self._granted_block: Block | None = None

    @property
    def waiting(self) -> bool:
        return self._waiter is not None

    def block(self, size: int) -> Block | None:
        """Return a block of at least `size` bytes, or None if the request has to wait.

        If the result is None, `on_memory` is called when the request should be retried.

        Raises:
            QuotaError: If the pool can never provide `size` bytes.
        """
        if self._waiter is not None:
            return None
        block, self._granted_block = self._granted_block, None
        if block is not None:
            if block.size >= size:
                return block
            block.release()
        block = self.pool._block_if_first(size)
        if block is None:
            self._waiter = self.pool._waiters.join(
                size, internal=self._internal, exempt=self._exempt
            )
            self._waiter.add_done_callback(self._on_waiter_done)
        return block

    def _on_waiter_done(self, waiter: asyncio.Future[Block]) -> None:
        """Retry the request that is first in line, and offer it the block that has been granted."""
        if waiter is not self._waiter:
            return  # closed in the meantime
        self._waiter = None
        # Drop any error, because the next request for a block gets the same device error and
        # reports it.
        self._granted_block = waiter.result() if waiter.exception() is None else None
        self._retry()
        if self._granted_block is not None:  # the block is no longer needed
            self._granted_block.release()
            self._granted_block = None

    def move(self, pool: MemoryPool) -> None:
        """Switch to `pool`, and retry any waiting request there."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self.pool._waiters.withdraw(waiter)
            waiter.get_loop().call_soon(self._retry)
        self.pool = pool

    def _retry(self) -> None:
        if self._on_memory is not None:
            self._on_memory()

    def close(self) -> None:
        """Cancel the waiting request, if any. `on_memory` is not called any more."""
        self._on_memory = None
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self.pool._waiters.withdraw(waiter)
