"""Registrations of the user's memory that are kept for the next operation on it.

What a registration covers are physical pages, pinned when it was made.  If the memory is freed,
moved or given other pages afterwards, the addresses may look the same and the device would read or
write pages that the program does not see.  So a registration is kept only where memory cannot do
that, and where the user's own object tells when it could:

- A *memoryview that the user keeps* is an export: Python refuses to resize or free a bytearray or
  an array while it exists, and so does numpy with an array that owns its memory, unless
  `resize(refcheck=False)` says that no view of it is in use.  A weak reference tells its end, and
  nothing here keeps it, or the memory, alive.  When it is released instead, which nothing tells, it
  is never found again, and goes with the next registration that is made.
- Nothing else will do.  A bytearray and bytes cannot be referred to weakly; an array.array can, but
  may be resized, and resized back to the same place with other pages.  A weak reference to a numpy
  array makes its `resize` fail for the user, and `ctypes.resize` moves memory under every view.
  The pages of an mmap can be changed by `madvise`, or a hole in its file.
- All of it is for local access: a key with a remote right that outlived its message would let the
  peer read what the memory holds next.

For one event loop; the end of a memoryview may come in any thread.
"""

from __future__ import annotations

import array
import asyncio
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

from .. import verbs
from .._core.finalizers import finalizer
from .._datapath.memory import Pinned
from ..mr_pool import OwnMemory
from ..verbs._memory.buffers import keeper_of
from ..verbs._memory.memory_region import is_there

# Types whose memory stays where it is, with its pages, as long as a view of it exists.  Subclasses
# may export other memory than their own.
STEADY = (bytearray, bytes, array.array)

MOST_BYTES = 256 << 20


def is_steady(owner: object) -> bool:
    return type(owner) in STEADY or (type(owner).__module__ == "numpy" and is_there(owner))


def is_released(view: memoryview | None) -> bool:
    try:
        return view is None or view.nbytes < 0
    except ValueError:
        return True


class CacheStatistics(NamedTuple):
    """Registrations kept now and their bytes; how often one was found, and how often not.

    Only memory that could be kept counts as not found.
    """

    registrations: int
    bytes: int
    found: int
    made: int


@dataclass(slots=True, eq=False)
class Kept:
    """A registration of the cache; `users` are the operations it serves."""

    key: int
    view: weakref.ref[memoryview[int]]
    mr: verbs.MemoryRegion
    users: int = 0
    gone: bool = False


class RegistrationCache:
    """The kept registrations of one protection domain, at most `most` of them and `most_bytes`."""

    def __init__(self, pd: verbs.ProtectionDomain) -> None:
        self._pd = pd
        self._loop = asyncio.get_running_loop()
        self._kept: OrderedDict[int, Kept] = OrderedDict()  # the longest unused first
        self._ended: deque[int] = deque()
        self._most = self._most_bytes = 0
        self._set_up = False
        self._bytes = self._found = self._made = 0

    def set_up(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        """The limits; the first call counts."""
        if not self._set_up:
            self._set_up = True
            self._most, self._most_bytes = most, most_bytes

    def find(self, memory: object) -> KeptMemory | None:
        """`memory` registered for local access, writable if it is; None when it cannot be kept.

        The caller closes what it gets, as soon as it needs it no more.
        """
        if type(memory) is not memoryview or not is_steady(memory.obj):
            return None
        size = memory.nbytes
        if not memory.c_contiguous or not 0 < size <= self._most_bytes or not self._most:
            return None
        self._forget_ended()
        kept = self._kept.get(id(memory))
        if kept is not None and kept.view() is memory:
            self._kept.move_to_end(kept.key)
            self._found += 1
        else:
            kept = self._make(memory, size)
        return KeptMemory(self, kept, memory)

    def _make(self, memory: memoryview, size: int) -> Kept:
        self._forget_released()
        access = verbs.AccessFlags.NONE if memory.readonly else verbs.AccessFlags.LOCAL_WRITE
        mr = self._pd.reg_pointer(verbs.address_of(memory), size, access)
        key = id(memory)
        ended, loop, forget = self._ended, self._loop, self._forget_ended

        @finalizer
        def end(_: object) -> None:
            # In any thread, in the middle of anything.
            ended.append(key)
            if not loop.is_closed():
                loop.call_soon_threadsafe(forget)

        kept = Kept(key, weakref.ref(memory, end), mr)
        self._made += 1
        self._bytes += size
        self._kept[key] = kept
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._drop(next(iter(self._kept.values())))
        return kept

    def _forget_ended(self) -> None:
        while self._ended:
            kept = self._kept.get(self._ended.popleft())
            if kept is not None and kept.view() is None:
                self._drop(kept)

    def _forget_released(self) -> None:
        for kept in list(self._kept.values()):
            if is_released(kept.view()):
                self._drop(kept)

    def _drop(self, kept: Kept) -> None:
        del self._kept[kept.key]
        self._bytes -= kept.mr.length
        kept.gone = True
        if not kept.users:
            kept.mr.close()

    def give_back(self, kept: Kept) -> None:
        kept.users -= 1
        if kept.gone and not kept.users:
            kept.mr.close()

    def statistics(self) -> CacheStatistics:
        self._forget_ended()
        self._forget_released()
        return self.counts()

    def counts(self) -> CacheStatistics:
        """As `statistics`, with those that have ended and are not forgotten yet.  Any thread may
        ask."""
        return CacheStatistics(len(self._kept), self._bytes, self._found, self._made)

    def close(self) -> None:
        """Keeps nothing until it is set up anew; what is in use is dropped after its operation."""
        self._set_up = False
        self._most = 0
        for kept in list(self._kept.values()):
            self._drop(kept)


class _Use(Pinned):
    """One operation's hold on a registration and on the memory, which cannot move meanwhile."""

    __slots__ = ("_cache", "_keeper", "_kept", "view")

    def __init__(self, cache: RegistrationCache, kept: Kept, memory: memoryview) -> None:
        self._cache = cache
        self._kept = kept
        self.view = memoryview(memory).cast("B")  # an export of its own
        self._keeper: object = keeper_of(self.view)
        kept.users += 1
        self.lease()

    @property
    def region(self) -> verbs.MemoryRegion:
        return self._kept.mr

    @finalizer  # called by finalizers too
    def _retire(self) -> None:
        self._keeper = None
        self.view.release()
        self._cache.give_back(self._kept)


class KeptMemory(OwnMemory):
    """The user's memory for one operation: it cannot be resized or freed until `close`."""

    __slots__ = ("_use",)
    _over = "given back to the caller"

    def __init__(self, cache: RegistrationCache, kept: Kept, memory: memoryview) -> None:
        self._use: _Use = _Use(cache, kept, memory)
        self.pinned: Pinned = self._use
        self.address: int = kept.mr.addr
        self.length: int = kept.mr.length
        self.lkey: int = kept.mr.lkey
        self.writable: bool = not memory.readonly

    def __repr__(self) -> str:
        return f"<memory of the caller's, {self.length} bytes at {self.address:#x}>"

    @property
    def view(self) -> memoryview:
        self._check()
        return self._use.view

    def close(self) -> None:
        """The memory is the caller's again when no operation is under way on it."""
        self._give_back()
