"""Types of memory.pyx: registered memory."""

from collections.abc import Sized
from typing import Any

class Pinned:
    """A subclass has `_retire`, which is called when it is neither leased nor pinned any more."""

    @property
    def pins(self) -> int: ...
    @property
    def leases(self) -> int: ...
    def pin(self) -> None: ...
    def unpin(self) -> None: ...
    def lease(self) -> None: ...
    def release(self) -> None: ...

class PoolBlock(Pinned):
    pool: BlockCache
    address: int
    size: int
    lkey: int
    mr: int
    posted: int
    def export(self, start: int, stop: int) -> memoryview: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class BlockCache:
    """A subclass has `_returned`, which is called with a block that is not kept here."""

    internal_waiters: Sized
    user_waiters: Sized
    trim_below: int
    slab_size: int
    ready_bytes: int
    smallest: int
    local_dma_lkey: int
    local_dma_mr: int
    closed: bool
    has_windows: bool
    @property
    def leases(self) -> int: ...
    @property
    def leased_bytes(self) -> int: ...
    @property
    def in_slabs(self) -> int: ...
    # Blocks of the class that the pool makes.
    def take(self, size: int) -> Any: ...
    def lease_block(self, block: PoolBlock) -> None: ...
    def keep(self, block: PoolBlock) -> bool: ...
    def clear_ready(self) -> list[Any]: ...

class Local:
    """A subclass has `_check`, which raises once the memory is `gone`."""

    address: int
    length: int
    lkey: int
    writable: bool
    gone: bool
    pinned: Pinned
    root: Local
    def pin(self) -> None: ...
    def unpin(self) -> None: ...
    def __len__(self) -> int: ...

class Remote:
    """A subclass has `_require`, which raises for an operation that is not allowed."""

    address: int
    length: int
    rkey: int
    _allowed: int
    _usable: bool
    _deadline: float
    _user: object
    _root: Remote
    def _unusable(self) -> Exception: ...
    def __len__(self) -> int: ...
