"""One connection's access to the memory pool and to user memory for its operations."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, cast

from .. import verbs
from .._datapath.work_queue import RailObserver
from .._event_loop.driver import Driver
from .._event_loop.futures import settle
from .._memory.block_source import OrderedBlockSource
from .._memory.registration_cache import CachedMemory, RegistrationCache
from ..dmabuf import DmabufRegion
from ..errors import VerbsError
from ..mr_pool import Block, Buffer, LocalMemory, MemoryPool, OwnMemory, Region, Registration
from ..verbs._memory.buffers import AnyMemory, bytes_of, keeper_of

if TYPE_CHECKING:
    from .._datapath.rail import SendQueue

# Unregistered memory up to this size is copied through the pool, and larger memory is registered
# for one operation. Copying 64 KiB takes a few microseconds, while registering memory on a card
# takes tens of microseconds.
STAGING_LIMIT = 64 << 10


class PoolChanged(Exception):
    """Raised in tasks waiting for memory when the connection changes pools. They must retry."""


class Memory(RailObserver):
    """One connection's access to pool memory and to registrations of user memory."""

    staging_limit = STAGING_LIMIT  # for `Fetcher` (inbox.pyx)

    def __init__(
        self, driver: Driver, waiter_error: Callable[[BaseException], BaseException]
    ) -> None:
        self._use(driver)
        self._waiter_error = waiter_error
        self._waiters: set[asyncio.Future[Block]] = set()
        self._sources: list[OrderedBlockSource] = []
        self._held_drivers: list[Driver] = []
        self._end_error: BaseException | None = None

    def _use(self, driver: Driver) -> None:
        self._driver = driver
        self.pool: MemoryPool = driver.pool
        self.registrations: RegistrationCache = driver.registrations

    @property
    def pd(self) -> verbs.ProtectionDomain:
        return self.pool.pd

    async def block(self, size: int, *, internal: bool = True) -> Block:
        """Wait for a pool block. If the connection ends first, raise the connection's error.

        Raises:
            QuotaError: If the pool can never provide this size. Raised without waiting.
        """
        while True:
            if self._end_error is not None:
                raise self._waiter_error(self._end_error)
            block = self.pool._block_if_first(size)
            if block is None:
                try:
                    block = await self.pool._waiters.wait(size, self._waiters, internal=internal)
                except PoolChanged:
                    continue
            return block

    async def lease(self, size: int, *, internal: bool) -> Buffer:
        """Wait for a buffer of `size` bytes. Raises the same errors as `block`."""
        return Buffer(await self.block(size, internal=internal), size)

    def register(self, data: object, view: memoryview) -> Region | CachedMemory:
        """Register user memory for one operation. The caller must release the result afterwards.

        `view` is a view of `data`. This method releases the view, so that the traceback of an error
        does not pin the memory.
        """
        with view:  # registered memory has its own view
            kept = self.registrations.find(data)
            return Region(self.pd.reg_mr(view)) if kept is None else kept

    def register_region(self, data: AnyMemory) -> Region:
        """Register user memory until its Region is closed, which keeps the driver open.

        If the device supports it, the registration allows memory windows, which shares use.
        """
        with bytes_of(data) as view:  # registered memory has its own view
            access = verbs.AccessFlags.NONE if view.readonly else verbs.AccessFlags.LOCAL_WRITE
            windows = verbs.AccessFlags.MW_BIND if self.pool.has_windows else verbs.AccessFlags.NONE
            try:
                mr = self.pd.reg_mr(view, access | windows)
            except VerbsError as error:
                # The kernel does not allow windows on read-only memory. See ib_umem_get in Linux.
                if error.errno != errno.EFAULT:
                    raise
                mr = self.pd.reg_mr(view, access)
        region = Region(mr)
        self._keep_driver(region.pinned)
        return region

    def register_dmabuf(self, fd: int, length: int, offset: int, writable: bool) -> DmabufRegion:
        """Register a dma-buf until its region is closed, which keeps the driver open."""
        region = DmabufRegion(self.pd, fd, length, offset, writable)
        self._keep_driver(region.pinned)
        return region

    def _keep_driver(self, registration: Registration) -> None:
        self._driver.hold()
        registration.on_retired = self._driver.release_threadsafe

    def block_source(
        self, on_memory: Callable[[], None], *, internal: bool, exempt: bool = False
    ) -> OrderedBlockSource:
        """Create a source of pool blocks that serves sends, fetches or receives in order.

        The arguments are those of `OrderedBlockSource`.
        """
        source = OrderedBlockSource(self.pool, on_memory, internal=internal, exempt=exempt)
        self._sources.append(source)
        return source

    def lead_changed(self, lead: SendQueue) -> None:
        """Switch to the memory pool and registrations of the new lead's driver.

        This takes a reference to the driver, which `close` releases. Blocks from its pool may still
        be in use after another rail becomes the lead.
        """
        driver = cast("Driver", lead.driver)
        driver.hold()
        self._held_drivers.append(driver)
        self._use(driver)
        for source in self._sources:
            source.move(self.pool)
        for waiter in list(self._waiters):
            settle(waiter, None, PoolChanged())

    def end(self, error: BaseException) -> None:
        """Fail all waiters for memory with `error`, because the connection has ended."""
        self._end_error = error
        for source in self._sources:
            source.close()
        for waiter in list(self._waiters):
            settle(waiter, None, self._waiter_error(error))

    def close(self) -> None:
        """Release the held drivers. Blocks of their pools must no longer be in use."""
        with ExitStack() as steps:  # runs all steps, even if one fails
            while self._held_drivers:
                steps.callback(self._held_drivers.pop().release)


class UserMemory:
    """User memory that is registered, or copied through the pool, for one operation.

    `target` says whether the operation writes to the memory, as a read of the peer's memory does.

    If the pool is exhausted, `async with` waits and `with` raises QuotaError.
    """

    def __init__(self, memory: Memory, data: AnyMemory, *, target: bool) -> None:
        self._memory = memory
        self._data = data
        self._target = target
        self._view = bytes_of(data, target)
        if target and self._view.readonly:
            self._view.release()
            raise ValueError(f"cannot read into {type(data).__name__}: it is read-only")
        self._keeper = keeper_of(self._view)  # keeps the memory in place for the device
        self._uses_staging = len(self._view) <= STAGING_LIMIT
        self._local: OwnMemory | None = None

    def __enter__(self) -> LocalMemory:
        try:
            return self._begin(
                self._memory.pool.alloc(len(self._view)) if self._uses_staging else None
            )
        except BaseException:
            self._view.release()
            raise

    async def __aenter__(self) -> LocalMemory:
        try:
            size = len(self._view)
            return self._begin(
                await self._memory.lease(size, internal=True) if self._uses_staging else None
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

    def copy_back(self) -> None:
        """Copy the result of a read to the user's memory, if the read used a pool buffer."""
        if isinstance(self._local, Buffer):
            self._view[:] = self._local.view

    def __exit__(self, *_: object) -> None:
        assert self._local is not None
        self._local._release_memory()
        self._view.release()
        self._keeper = None

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()
