"""Registered memory: a pool that leases blocks, and regions of the user's own memory.

An RDMA device can only access registered memory. On a card, registration is slow, and each
registered region takes up an entry in the card's tables. The pool therefore registers slabs of
several MiB and leases blocks of these slabs. Slabs are registered for local access only and never
have a remote key. A peer gets access to a block through a memory window or a separate registration
with the exact bounds. A token therefore never gives access to adjacent bytes.

A block's memory is reused once all of the following are true:

- The lease has ended, through `Buffer.release`, the end of its `with` block, or garbage collection.
- No work request is using the block (`_pin` and `_unpin` count the uses).
- No view of the block exists. A memoryview that outlives its lease, or a numpy array made from it,
  keeps its contents and never shows data from the next lease.

All objects belong to one event loop and are not thread-safe.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sized
from mmap import PAGESIZE
from typing import NamedTuple, Self

from . import verbs
from ._core.arguments import integer
from ._core.finalizers import finalizer
from ._core.region import slice_range
from ._core.slabs import SlabAllocator
from ._datapath.memory import MACHINE, BlockCache, Clock, Local, Pinned, PoolBlock
from ._memory.pool_waiters import PoolWaiters
from ._memory.stalled_reads import StalledReads
from .errors import BufferStateError, LocalRangeError, QuotaError
from .verbs._memory.memory_region import address_of_mr, reg_local_dma
from .verbs._memory.memory_window import enforces_window_bounds, offers_windows
from .verbs._memory.pages import Mapped

SLAB_SIZE = 4 << 20
MIN_BLOCK_SIZE = 256

# The maximum number of bytes to cache for each block size, enough for a burst of requests.
MAX_CACHED_BYTES = 4 << 20
# The maximum number of unused slabs that stay registered.
SPARE_SLABS = 4
# While user requests wait for memory, the library's internal requests may overtake them. The memory
# that internal requests obtain this way is limited to 1/INTERNAL_SHARE of the pool.
INTERNAL_SHARE = 8
# The maximum total size of the cached blocks that are larger than a slab, in bytes.
MAX_LARGE_CACHED_BYTES = 256 << 20

REMOTE_RIGHTS = (
    verbs.AccessFlags.REMOTE_WRITE | verbs.AccessFlags.REMOTE_READ | verbs.AccessFlags.REMOTE_ATOMIC
)


EMPTY_VIEW = memoryview(b"")


class Block(PoolBlock, Mapped):
    """A block of registered memory that is created once and leased many times.

    All views given to users are buffer exports of this object. Internal to the library.
    """

    __slots__ = ("offset", "region", "slab", "view")

    def __init__(
        self,
        pool: MemoryPool,
        region: verbs.MemoryRegion,
        memory: memoryview,
        slab: int,
        offset: int,
        size: int,
    ) -> None:
        self.pool: MemoryPool = pool
        self.region: verbs.MemoryRegion = region
        self.slab: int = slab
        self.offset: int = offset
        self.size = size
        self.address: int = region.addr + offset
        self.lkey: int = region.lkey
        self.mr: int = address_of_mr(region)
        self.view: memoryview[int] = memory[offset : offset + size]
        """The memory, for short accesses by the library. It is never returned to a user."""

    def drop_memory(self) -> None:
        """Drop the block's reference to its memory.

        A released Buffer still refers to its block. Without this call, the Buffer would keep the
        memory alive.
        """
        self.view = EMPTY_VIEW


class PoolStatistics(NamedTuple):
    """Memory pool usage. All sizes are in bytes.

    `registered_bytes` is the amount of registered memory, which never exceeds `limit`. `leases` is
    the number of blocks in use, and `leased_bytes` is their total size. A block is in use while it
    is leased, has a view, or is being used by an operation. `regions` is the number of memory
    regions, and `waiting` is the number of tasks waiting for memory. `huge_page_bytes` is the
    amount of registered memory backed by huge pages (see `LoopConfig.huge_pages`).
    """

    registered_bytes: int
    leased_bytes: int
    leases: int
    regions: int
    limit: int
    waiting: int
    huge_page_bytes: int = 0


def block_size(size: int) -> int:
    """Return `size` rounded up to a power of two, but at least MIN_BLOCK_SIZE."""
    return max(MIN_BLOCK_SIZE, 1 << (size - 1).bit_length()) if size else MIN_BLOCK_SIZE


class RegisteredMemory:
    """A pool's memory regions, registered for local access only.

    Their total size is at most `limit` bytes. Internal to the library.
    """

    def __init__(
        self, pd: verbs.ProtectionDomain, limit: int, access: verbs.AccessFlags, *, huge_pages: bool
    ) -> None:
        self.limit = limit
        self.bytes: int = 0
        self.regions: set[verbs.MemoryRegion] = set()
        """The memory regions of all blocks. A region must outlive its blocks."""
        self._pd = pd
        self._access = access
        self._huge_pages = huge_pages

    def has_room(self, size: int) -> bool:
        return self.bytes + size <= self.limit

    def register(self, size: int) -> verbs.MemoryRegion:
        region = self._pd.reg_mr(size, self._access, huge_pages=self._huge_pages)
        self.bytes += region.length
        self.regions.add(region)
        return region

    def deregister(self, region: verbs.MemoryRegion) -> None:
        self.bytes -= region.length
        self.regions.discard(region)
        region.close()


class LargeBlocks:
    """A cache of unused blocks larger than a slab, each with its own memory region.

    Internal to the library.
    """

    def __init__(self, registered: RegisteredMemory) -> None:
        self._registered = registered
        self._cached: dict[int, list[Block]] = {}
        self._cached_bytes = 0

    def take(self, size: int) -> Block | None:
        blocks = self._cached.get(size)
        if not blocks:
            return None
        self._cached_bytes -= size
        return blocks.pop()

    def put(self, block: Block) -> None:
        if self._cached_bytes + block.size <= MAX_LARGE_CACHED_BYTES:
            self._cached.setdefault(block.size, []).append(block)
            self._cached_bytes += block.size
        else:
            self._close(block)

    def deregister_all(self) -> None:
        """Deregister all cached blocks."""
        for blocks in self._cached.values():
            while blocks:
                self._close(blocks.pop())
        self._cached_bytes = 0

    def _close(self, block: Block) -> None:
        self._registered.deregister(block.region)
        block.drop_memory()


class MemoryPool(BlockCache):
    """A pool that leases registered memory.

    The memory is registered in a single protection domain, for local access only. `limit` is the
    maximum number of registered bytes. Once the limit is reached, `alloc` raises QuotaError, and
    `lease` waits until enough memory has been released. Waiting tasks are served in the order in
    which they called `lease`.
    """

    def __init__(
        self,
        pd: verbs.ProtectionDomain,
        *,
        limit: int,
        huge_pages: bool = False,
        clock: Clock = MACHINE,
    ) -> None:
        self.pd = pd
        self.limit = limit
        self._slabs = SlabAllocator(SLAB_SIZE, MIN_BLOCK_SIZE)
        self._slab_regions: dict[int, tuple[verbs.MemoryRegion, memoryview]] = {}
        """The memory region of each slab and its memory, by slab number."""
        self.slab_size = SLAB_SIZE
        self.smallest = MIN_BLOCK_SIZE
        self.has_windows: bool = offers_windows(pd.context, verbs.MWType.TYPE_2)
        self.enforces_window_bounds: bool = enforces_window_bounds(pd.context)
        access = verbs.AccessFlags.LOCAL_WRITE
        if self.has_windows:
            access |= verbs.AccessFlags.MW_BIND
        self._registered = RegisteredMemory(pd, limit, access, huge_pages=huge_pages)
        self._large = LargeBlocks(self._registered)
        self._local_dma = reg_local_dma(pd)
        if self._local_dma is not None:
            self.local_dma_lkey = self._local_dma.lkey
            self.local_dma_mr: int = address_of_mr(self._local_dma)
        self.max_cached_bytes = MAX_CACHED_BYTES
        self._waiters: PoolWaiters[Block] = PoolWaiters(self._block, limit // INTERNAL_SHARE, clock)
        """The tasks that are waiting for memory."""
        self.internal_waiters: Sized
        self.user_waiters: Sized
        self.internal_waiters, self.user_waiters = self._waiters.queues
        self._stalled_reads: StalledReads = StalledReads(self._waiters, clock)
        """The long messages that are being read."""
        self._waiters.on_wait = self._stalled_reads.check_soon

    def _block(self, size: int) -> Block:
        """Lease a block of at least `size` bytes immediately, even if tasks are waiting.

        The contents of the block are undefined.

        Raises:
            QuotaError: If no block is available now.
            BufferStateError: If the pool is closed.
        """
        block: Block | None = self.take(size)
        if block is not None:
            return block
        if self.closed:
            raise BufferStateError("the memory pool is closed")
        size = block_size(size)
        block = self._make_large(size) if size > SLAB_SIZE else self._make_in_slab(size)
        self.lease_block(block)
        return block

    def _block_if_first(self, size: int) -> Block | None:
        """Lease a block. Return None if no block is available or if a task is waiting.

        Raises:
            QuotaError: If the pool can never provide `size` bytes.
        """
        if not len(self._waiters):
            try:
                return self._block(size)
            except QuotaError:
                pass
        self.require_possible(size)
        return None

    def require_possible(self, size: int) -> None:
        """Raise QuotaError if `size` bytes would exceed the limit even with nothing else leased."""
        needed = max(SLAB_SIZE, block_size(size))
        if needed > self.limit:
            raise QuotaError(
                f"allocating {size} bytes requires {needed} bytes of registered memory, but the "
                f"memory pool is limited to {self.limit} bytes; increase LoopConfig.pool_limit",
                amount=needed,
                limit=self.limit,
            )

    def _require_spare(self, size: int) -> None:
        """Raise QuotaError unless the pool can spare `size` bytes for an optional optimization."""
        if not self._has_spare(size):
            raise self._exhausted(size)

    def _has_spare(self, size: int) -> bool:
        """Return whether the pool can spare `size` bytes for an optional optimization.

        Half of the pool must remain free, and no task may be waiting for memory.
        """
        return 2 * (self.leased_bytes + size) <= self.limit and not len(self._waiters)

    def alloc(self, size: int) -> Buffer:
        """Lease `size` bytes without waiting. The memory's contents are undefined.

        Raises:
            QuotaError: If the memory is not available now, or if other tasks are already waiting
                for memory.
        """
        size = integer("size", size)
        block = self._block_if_first(size)
        if block is None:
            raise self._exhausted(size)
        return Buffer(block, size)

    async def lease(self, size: int) -> Buffer:
        """Lease `size` bytes, waiting until they are available.

        The memory's contents are undefined. Waiting tasks are served in the order in which they
        called `lease`. Tasks that wait for memory while holding other memory can deadlock. To avoid
        deadlocks, lease all the memory you need at once, or use a timeout.

        Raises:
            QuotaError: If `size` exceeds the pool's limit. Raised immediately, without waiting.
        """
        size = integer("size", size)
        block = self._block_if_first(size)
        if block is None:
            # The set of waiting futures is only of use to callers that cancel them.
            block = await self._waiters.wait(size, set(), internal=False)
        return Buffer(block, size)

    def statistics(self) -> PoolStatistics:
        """Return pool usage statistics. Can be called from any thread."""
        self._waiters.update_statistics()
        regions = list(self._registered.regions)
        return PoolStatistics(
            registered_bytes=self._registered.bytes,
            leased_bytes=self.leased_bytes,
            leases=self.leases,
            regions=len(regions),
            limit=self.limit,
            waiting=len(self._waiters),
            huge_page_bytes=sum(region.length for region in regions if region.page_size > PAGESIZE),
        )

    def _exhausted(self, size: int) -> QuotaError:
        registered = self._registered.bytes
        return QuotaError(
            f"the memory pool is limited to {self.limit} bytes: {registered} bytes are registered, "
            f"and {len(self._waiters)} tasks are waiting; release buffers and messages, wait with "
            f"`lease`, or raise LoopConfig.pool_limit",
            amount=registered + max(SLAB_SIZE, block_size(size)),
            limit=self.limit,
        )

    def _make_in_slab(self, size: int) -> Block:
        """Allocate a block in a slab, adding a slab if none has room."""
        found = self._slabs.allocate(size)
        if found is None:
            self._reclaim()
            found = self._slabs.allocate(size)
        if found is None:
            region = self._register(SLAB_SIZE)
            self._slab_regions[self._slabs.add_slab()] = region, region.buf
            # Trim the slabs once only a quarter of their memory is in use.
            if len(self._slab_regions) > SPARE_SLABS:
                self.trim_below = len(self._slab_regions) * SLAB_SIZE // 4
            found = self._slabs.allocate(size)
            assert found is not None
        slab, offset = found
        region, memory = self._slab_regions[slab]
        return Block(self, region, memory, slab, offset, size)

    def _make_large(self, size: int) -> Block:
        block = self._large.take(size)
        if block is not None:
            return block
        region = self._register(size)
        return Block(self, region, region.buf, slab=-1, offset=0, size=size)  # not in a slab

    def _register(self, size: int) -> verbs.MemoryRegion:
        registered = self._registered
        if not registered.has_room(size):
            self._large.deregister_all()
        if not registered.has_room(size):
            self._drop_slabs(keep=0)
        if not registered.has_room(size):
            raise self._exhausted(size)
        return registered.register(size)

    def _reclaim(self) -> None:
        """Return cached blocks to their slabs, where they can be merged."""
        for block in self.take_cached_blocks():
            self._free(block)

    def _free(self, block: Block) -> None:
        block.drop_memory()
        self._slabs.free(block.slab, block.offset)

    def _trim(self) -> None:
        """Deregister unused slabs, for example after many connections have closed.

        Looking for unused slabs walks all free blocks, so do nothing unless the memory in use is
        less than `trim_below`. Afterwards, set `trim_below` to half of the memory in use, or to 0
        if at most SPARE_SLABS regions remain registered.
        """
        if self.leased_in_slabs >= self.trim_below:
            return
        self._drop_slabs(keep=SPARE_SLABS)
        has_spare_slabs = len(self._slab_regions) > SPARE_SLABS
        self.trim_below: int = self.leased_in_slabs // 2 if has_spare_slabs else 0

    def _drop_slabs(self, *, keep: int) -> None:
        """Deregister unused slabs, except for `keep` of them."""
        self._reclaim()
        for slab in self._slabs.trim(keep=keep):
            region, _ = self._slab_regions.pop(slab)
            self._registered.deregister(region)

    def _recycle(self, block: Block) -> None:
        """Cache or free a released block, and serve the waiting tasks."""
        if self.closed:
            block.drop_memory()  # the region is closed with the protection domain
            return
        if block.size <= SLAB_SIZE:
            if not self.keep(block):
                self._free(block)
            self._trim()
        else:
            self._large.put(block)
        self._waiters.on_block_returned(block)

    def close(self) -> None:
        """Stop leasing memory.

        After closing the pool, its owner closes the protection domain, which deregisters the
        regions. Views that users still hold remain readable.
        """
        self.closed = True
        self.local_dma_lkey: int = 0
        if self._local_dma is not None:
            self._local_dma.close()
        self._large.deregister_all()
        # Released buffers still refer to their blocks.
        for block in self.take_cached_blocks():
            block.drop_memory()
        # The pool must not keep the memory alive. Only the regions and the users' views may.
        for slab, (region, _) in self._slab_regions.items():
            self._slab_regions[slab] = region, EMPTY_VIEW
        self._waiters.fail(BufferStateError("the memory pool is closed"))


class LocalMemory(Local):
    """Registered memory in this process that operations can use.

    The memory is a Buffer, a Region, or a slice of either. `address` and `length` are its location
    and size. `writable` is True if the device may write to the memory.
    """

    __slots__ = ()

    def __getitem__(self, key: slice) -> LocalSlice:
        """Return the slice `[start:stop]`. Raise LocalRangeError if the slice is out of range."""
        offset, length = slice_range(key, len(self), LocalRangeError)
        return LocalSlice(self, offset, length)

    @property
    def view(self) -> memoryview:
        """The memory as a memoryview of bytes."""
        self._check()
        return self._pinned_bytes()

    def _expose(
        self, pd: verbs.ProtectionDomain, access: verbs.AccessFlags, offset: int, length: int
    ) -> verbs.MemoryRegion:
        """Register part of the memory as a new region that the peer may access.

        The caller must have pinned the memory, because its holder may already have released it.
        """
        return pd.reg_mr(self._pinned_bytes()[offset : offset + length], access)

    def _pinned_bytes(self) -> memoryview:
        raise NotImplementedError

    def _check(self) -> None:
        """Raise BufferStateError if the memory has been released."""


class LocalSlice(LocalMemory):
    """A slice of a Buffer or Region, released together with that Buffer or Region."""

    __slots__ = ("_offset", "_owner")

    def __init__(self, owner: LocalMemory, offset: int, length: int) -> None:
        self._owner: LocalMemory = owner
        self._offset: int = offset
        if isinstance(owner, LocalSlice):
            self._owner = owner._owner
            self._offset += owner._offset
        self.root: LocalMemory = owner  # for a slice, the setter stores its root instead
        self.address: int = owner.address + offset
        self.length: int = length
        self.lkey: int = owner.lkey
        self.writable: bool = owner.writable

    def __repr__(self) -> str:
        return f"<{self._owner!r}[{self._offset}:{self._offset + self.length}]>"

    @property
    def view(self) -> memoryview:
        return self._owner.view[self._offset : self._offset + self.length]

    def _expose(
        self, pd: verbs.ProtectionDomain, access: verbs.AccessFlags, offset: int, length: int
    ) -> verbs.MemoryRegion:
        return self._owner._expose(pd, access, self._offset + offset, length)

    def _check(self) -> None:
        self._owner._check()


class OwnMemory(LocalMemory):
    """Registered memory that its holder releases explicitly or at the end of a `with` block."""

    __slots__ = ()
    _closed_word = "closed"
    """The word that error messages use when the memory is no longer available."""

    def _check(self) -> None:
        if self.gone:
            raise BufferStateError(f"{self!r} was {self._closed_word} and cannot be used again")

    def __getitem__(self, key: slice) -> LocalSlice:
        self._check()
        return super().__getitem__(key)

    def _release_memory(self) -> None:
        """Release the memory once no operation is using it. Further calls have no effect."""
        if not self.gone:
            self.gone = True
            self.pinned.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._release_memory()


class Buffer(OwnMemory):
    """Registered memory leased from the pool.

    You can use the memory returned by `Connection.alloc` until you call `release` or the `with`
    block ends. After that, every use of the buffer raises BufferStateError. Views that you created
    earlier remain valid and keep their contents. The pool does not lease the memory again while a
    view or an operation is using it.
    """

    __slots__ = ("__weakref__", "_block")
    _closed_word = "released"

    def __init__(self, block: Block, length: int) -> None:
        self._block: Block = block
        self.pinned: Pinned = block
        self.address: int = block.address
        self.length = length
        self.lkey: int = block.lkey
        self.writable = True

    def __repr__(self) -> str:
        state = " released" if self.gone else ""
        return f"<Buffer of {self.length} bytes at {self.address:#x}{state}>"

    def _pinned_bytes(self) -> memoryview:
        return self._block.export(0, self.length)

    def release(self) -> None:
        """Return the memory to the pool. A second call has no effect."""
        self._release_memory()

    def _transfer_block(self) -> Block:
        """Transfer the leased block to the caller. The buffer is unusable afterwards."""
        self._check()
        self.gone = True
        return self._block

    @finalizer
    def __del__(self) -> None:
        if not self.gone:
            warnings.warn(f"{self!r} was not released", ResourceWarning, source=self, stacklevel=1)
            self.release()


class Registration(Pinned):
    """A memory registration that ends after its last use. Internal to the library."""

    __slots__ = ("mr", "on_retired", "region")

    def __init__(self, mr: verbs.MemoryRegion, *, mapped: bool = True) -> None:
        self.mr: verbs.MemoryRegion = mr
        self.region: verbs.MemoryRegion | None = mr if mapped else None
        """The memory region, or None if no other domain can register the memory by address."""
        self.on_retired: Callable[[], object] = lambda: None
        """A function to call after deregistration, possibly in another thread."""
        self.lease()

    @finalizer  # a finalizer may call this method
    def _retire(self) -> None:
        try:
            self.mr.close()
        finally:
            self.on_retired()


class Region(OwnMemory):
    """The user's own memory, registered for RDMA operations.

    The memory can be any buffer or tensor, even a read-only one. It is pinned until you call
    `close` or the `with` block ends. While it is pinned, you cannot resize a bytearray, close an
    mmap, or resize a torch tensor's storage. If you call `close` while an operation is using the
    memory, the memory is deregistered when the operation ends.

    The region works on every connection of the same event loop and device, including later ones. It
    keeps the device open, and ends with the event loop.

    The memory is registered for local access only. The peer can access it only if you share the
    region.
    """

    __slots__ = ("_mr",)

    def __init__(self, mr: verbs.MemoryRegion) -> None:
        self._mr = mr
        self.pinned: Registration = Registration(mr)
        self.address: int = mr.addr
        self.length: int = mr.length
        self.lkey: int = mr.lkey
        self.writable: bool = bool(mr.access & verbs.AccessFlags.LOCAL_WRITE)

    def __repr__(self) -> str:
        state = " closed" if self.gone else ""
        return f"<Region of {self.length} bytes at {self.address:#x}{state}>"

    def _pinned_bytes(self) -> memoryview:
        return self._mr.buf

    def close(self) -> None:
        """Deregister the memory. A second call has no effect."""
        self._release_memory()

    @finalizer
    def __del__(self) -> None:
        if not self.gone and hasattr(self, "_mr") and not self._mr.closed:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=1)
            self._release_memory()
