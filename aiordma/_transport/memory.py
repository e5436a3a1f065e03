"""One connection's access to the memory pool, and user memory in its operations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from .. import verbs
from .._loop.driver import Driver
from .._loop.futures import settle
from .._memory.block_source import OrderedBlockSource
from .._memory.registration_cache import KeptMemory, RegistrationCache
from ..config import Config
from ..mr_pool import Block, Buffer, LocalMemory, MemoryPool, OwnMemory, Region
from ..verbs._memory.buffers import AnyMemory, bytes_of, keeper_of

# Unregistered memory up to this size is copied through the pool. Larger memory is registered for
# the one operation. A copy of 64 KiB takes a few microseconds, and a registration on a card takes
# tens of microseconds.
STAGING_LIMIT = 64 << 10


class Moved(Exception):
    """Memory now comes from another pool, which must be asked instead."""


class Memory:
    """Blocks and buffers of the pool, and registrations of user memory."""

    staging_limit = STAGING_LIMIT

    def __init__(
        self,
        pool: MemoryPool,
        registrations: RegistrationCache,
        config: Config,
        waiter_error: Callable[[BaseException], BaseException],
    ) -> None:
        self.pool: MemoryPool = pool
        self.registrations: RegistrationCache = registrations
        self._config = config
        registrations.set_up(config.cached_registrations)
        self._waiter_error = waiter_error
        self._waiters: set[asyncio.Future[Block]] = set()
        self._sources: list[OrderedBlockSource] = []
        self._drivers: list[Driver] = []
        self._ended: BaseException | None = None

    @property
    def pd(self) -> verbs.ProtectionDomain:
        return self.pool.pd

    async def block(self, size: int, *, internal: bool = True) -> Block:
        """Wait for a block. If the connection ends first, its error is raised.

        Raises:
            QuotaError: If the pool can never provide this size. This is raised immediately.
        """
        while True:
            if self._ended is not None:
                raise self._waiter_error(self._ended)
            block = self.pool._block_if_first(size)
            if block is None:
                try:
                    block = await self.pool._waiters.wait(size, self._waiters, internal=internal)
                except Moved:
                    continue
            return block

    async def lease(self, size: int, *, internal: bool) -> Buffer:
        """Wait for a buffer of `size` bytes, as `block` does."""
        return Buffer(await self.block(size, internal=internal), size)

    def register(self, data: object, view: memoryview) -> Region | KeptMemory:
        """Register user memory for one operation. Close the result afterwards.

        `view` shows the bytes of `data`. It is released, so that the frames of an error pin
        nothing.
        """
        with view:  # registered memory has its own view
            kept = self.registrations.find(data)
            return Region(self.pd.reg_mr(view)) if kept is None else kept

    def block_source(
        self, on_memory: Callable[[], None], *, internal: bool, exempt: bool = False
    ) -> OrderedBlockSource:
        """Create a source of blocks for requests served in order: sends, fetches or receives."""
        source = OrderedBlockSource(self.pool, on_memory, internal=internal, exempt=exempt)
        self._sources.append(source)
        return source

    def move(self, driver: Driver) -> None:
        """Take memory from the driver of the new lead.

        The driver is held until `close`, because blocks of its pool may be in use longer.
        """
        driver.hold()
        self._drivers.append(driver)
        self.pool, self.registrations = driver.pool, driver.registrations
        self.registrations.set_up(self._config.cached_registrations)
        for source in self._sources:
            source.move(self.pool)
        for waiter in list(self._waiters):
            settle(waiter, None, Moved())

    def end(self, error: BaseException) -> None:
        """Fail all waiters for memory with `error`, because the connection has ended."""
        self._ended = error
        for source in self._sources:
            source.close()
        for waiter in list(self._waiters):
            settle(waiter, None, self._waiter_error(error))

    def close(self) -> None:
        """Release the pools when no block is in use any more."""
        with ExitStack() as steps:  # runs all steps, even if one fails
            while self._drivers:
                steps.callback(self._drivers.pop().release)


class UserMemory:
    """User memory that is registered, or copied through the pool, for one operation.

    `async with` waits for memory from the pool. `with` raises QuotaError instead.
    """

    def __init__(self, memory: Memory, data: AnyMemory, *, target: bool) -> None:
        self._memory = memory
        self._data = data
        self._target = target
        self._view = bytes_of(data, target)
        if target and self._view.readonly:
            self._view.release()
            raise ValueError(f"cannot read into {type(data).__name__}: it is read-only")
        self._keeper = keeper_of(self._view)
        self._short = len(self._view) <= STAGING_LIMIT
        self._local: OwnMemory | None = None

    def __enter__(self) -> LocalMemory:
        try:
            return self._begin(self._memory.pool.alloc(len(self._view)) if self._short else None)
        except BaseException:
            self._view.release()
            raise

    async def __aenter__(self) -> LocalMemory:
        try:
            size = len(self._view)
            return self._begin(
                await self._memory.lease(size, internal=True) if self._short else None
            )
        except BaseException:
            self._view.release()
            raise

    def _begin(self, staging: Buffer | None) -> LocalMemory:
        if staging is None:
            self._local = self._memory.register(self._data, self._view)
        else:
            self._local = staging
            if not self._target:
                staging.view[:] = self._view
                self._view.release()
        return self._local

    def land(self) -> None:
        """Copy the bytes that were read to their destination, if necessary."""
        if isinstance(self._local, Buffer):
            self._view[:] = self._local.view

    def __exit__(self, *_: object) -> None:
        assert self._local is not None
        self._local._give_back()
        self._view.release()
        self._keeper = None

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()
