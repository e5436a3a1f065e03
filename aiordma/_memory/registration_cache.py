"""A cache of registrations of the user's memory, for the next operation on the same memory.

A registration covers the physical pages that the memory has when it is registered. Later, the
memory may be freed, moved or given other pages. Its addresses can then look the same, but the
device would read or write pages that the program does not see. A registration is therefore kept
only if the memory cannot change in this way, and if the user's object reports when the guarantee
ends:

- *A memoryview that the user keeps* is an export. While it exists, Python refuses to resize or free
  the bytearray or array behind it. numpy does the same for an array that owns its memory, unless
  the caller asserts with `resize(refcheck=False)` that no view is in use. A weak reference reports
  the end of the view, and does not keep the view or the memory alive. Releasing the view is not
  reported. A released view is never found again, and its entry is removed with the next new
  registration.
- *Other objects* do not qualify. bytearray and bytes do not support weak references. An array.array
  does, but it can be resized, and resized back to the same address with other pages. A weak
  reference to a numpy array makes the user's `resize` fail, and `ctypes.resize` moves memory under
  every view. The pages of an mmap can be changed by `madvise` or by a hole in its file.

Cached registrations allow only local access. If a key with a remote right outlived its message, the
peer could read the next contents of the memory.

A cache belongs to one event loop, but a memoryview may end in any thread.
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
from ..verbs._memory.memory_region import is_fully_mapped

# Types that do not move or remap their memory while a view of it exists. Subclasses are excluded,
# because they may export other memory.
STABLE_TYPES = (bytearray, bytes, array.array)

MOST_BYTES = 256 << 20


def has_stable_memory(owner: object) -> bool:
    return type(owner) in STABLE_TYPES or (
        type(owner).__module__ == "numpy" and is_fully_mapped(owner)
    )


def is_released(view: memoryview | None) -> bool:
    try:
        # Accessing `nbytes` of a released view raises ValueError.
        return view is None or view.nbytes < 0
    except ValueError:
        return True


class CacheStatistics(NamedTuple):
    """The number and total size of cached registrations, and the number of hits and misses.

    Memory that cannot be cached does not count as a miss.
    """

    registrations: int
    bytes: int
    hits: int
    misses: int

    @property
    def found(self) -> int:
        """The previous name of `hits`."""
        return self.hits

    @property
    def made(self) -> int:
        """The previous name of `misses`."""
        return self.misses


@dataclass(slots=True, eq=False)
class CachedRegistration:
    """A cached registration. `users` is the number of operations that use it."""

    key: int
    view: weakref.ref[memoryview[int]]
    mr: verbs.MemoryRegion
    users: int = 0
    dropped: bool = False


class RegistrationCache:
    """The cached registrations of one protection domain, with limits on their number and size."""

    def __init__(
        self, pd: verbs.ProtectionDomain, max_count: int, max_bytes: int = MOST_BYTES
    ) -> None:
        self._pd = pd
        self._max_count, self._max_bytes = max_count, max_bytes
        self._loop = asyncio.get_running_loop()
        # The least recently used registration is the first.
        self._registrations: OrderedDict[int, CachedRegistration] = OrderedDict()
        # The keys of entries whose memoryview no longer exists, to be dropped in the loop.
        self._collected_keys: deque[int] = deque()
        self._bytes = self._hits = self._misses = 0

    def find(self, memory: object) -> CachedMemory | None:
        """Return `memory` registered for local access, or None if it cannot be cached.

        If `memory` is writable, the registration is writable too. The caller must close the result
        as soon as possible.
        """
        if type(memory) is not memoryview or not has_stable_memory(memory.obj):
            return None
        size = memory.nbytes
        if not memory.c_contiguous or not 0 < size <= self._max_bytes or not self._max_count:
            return None
        self._drop_collected()
        registration = self._registrations.get(id(memory))
        if registration is not None and registration.view() is memory:
            self._registrations.move_to_end(registration.key)
            self._hits += 1
        else:
            registration = self._register(memory, size)
        return CachedMemory(self, registration, memory)

    def _register(self, memory: memoryview, size: int) -> CachedRegistration:
        self._drop_released()
        access = verbs.AccessFlags.NONE if memory.readonly else verbs.AccessFlags.LOCAL_WRITE
        mr = self._pd.reg_pointer(verbs.address_of(memory), size, access)
        key = id(memory)
        collected, loop, drop_collected = self._collected_keys, self._loop, self._drop_collected

        @finalizer
        def on_view_collected(_: object) -> None:
            # A weak reference callback can run in any thread at any point.
            collected.append(key)
            if not loop.is_closed():
                loop.call_soon_threadsafe(drop_collected)

        registration = CachedRegistration(key, weakref.ref(memory, on_view_collected), mr)
        self._misses += 1
        self._bytes += size
        self._registrations[key] = registration
        while len(self._registrations) > self._max_count or self._bytes > self._max_bytes:
            self._drop(next(iter(self._registrations.values())))
        return registration

    def _drop_collected(self) -> None:
        while self._collected_keys:
            registration = self._registrations.get(self._collected_keys.popleft())
            if registration is not None and registration.view() is None:
                self._drop(registration)

    def _drop_released(self) -> None:
        for registration in list(self._registrations.values()):
            if is_released(registration.view()):
                self._drop(registration)

    def _drop(self, registration: CachedRegistration) -> None:
        del self._registrations[registration.key]
        self._bytes -= registration.mr.length
        registration.dropped = True
        if not registration.users:
            registration.mr.close()

    def release(self, registration: CachedRegistration) -> None:
        registration.users -= 1
        if registration.dropped and not registration.users:
            registration.mr.close()

    def statistics(self) -> CacheStatistics:
        self._drop_collected()
        self._drop_released()
        return self.counts()

    def counts(self) -> CacheStatistics:
        """Return the statistics, including entries of dead views. Any thread may call this."""
        return CacheStatistics(len(self._registrations), self._bytes, self._hits, self._misses)

    def clear(self) -> None:
        """Empty the cache. Registrations in use are closed after their operations."""
        for registration in list(self._registrations.values()):
            self._drop(registration)


class _RegistrationUse(Pinned):
    """An operation's reference to a registration, which also pins the memory."""

    __slots__ = ("_cache", "_keeper", "_registration", "view")

    def __init__(
        self, cache: RegistrationCache, registration: CachedRegistration, memory: memoryview
    ) -> None:
        self._cache = cache
        self._registration = registration
        self.view = memoryview(memory).cast("B")  # a separate export
        self._keeper: object = keeper_of(self.view)
        registration.users += 1
        self.lease()

    @property
    def region(self) -> verbs.MemoryRegion:
        return self._registration.mr

    @finalizer  # called by finalizers too
    def _retire(self) -> None:
        self._keeper = None
        self.view.release()
        self._cache.release(self._registration)


class CachedMemory(OwnMemory):
    """User memory for one operation. It cannot be resized or freed until `close`."""

    __slots__ = ("_use",)
    _closed_word = "returned to the caller"

    def __init__(
        self, cache: RegistrationCache, registration: CachedRegistration, memory: memoryview
    ) -> None:
        self._use: _RegistrationUse = _RegistrationUse(cache, registration, memory)
        self.pinned: Pinned = self._use
        self.address: int = registration.mr.addr
        self.length: int = registration.mr.length
        self.lkey: int = registration.mr.lkey
        self.writable: bool = not memory.readonly

    def __repr__(self) -> str:
        return f"<memory of the caller, {self.length} bytes at {self.address:#x}>"

    @property
    def view(self) -> memoryview:
        self._check()
        return self._use.view

    def close(self) -> None:
        """Return the memory to the caller as soon as no operation uses it."""
        self._release_memory()
