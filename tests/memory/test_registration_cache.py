"""Tests of the cache of registrations of the user's memory.

A registration must not outlive the memory that it was made for.
"""

from __future__ import annotations

import array
import asyncio
import ctypes
import gc
import mmap
import threading
from collections.abc import Callable

import numpy as np
import pytest

from aiordma import BufferStateError, verbs
from aiordma._memory.registration_cache import CachedMemory, CacheStatistics, RegistrationCache
from tests.combinations import LOOPS

SIZE = 100_000


def small(
    pd: verbs.ProtectionDomain, most: int = 4, most_bytes: int = 1 << 20
) -> RegistrationCache:
    return RegistrationCache(pd, most, most_bytes)


def find(cache: RegistrationCache, memory: object) -> CachedMemory:
    found = cache.find(memory)
    assert found is not None
    return found


def registered(pd: verbs.ProtectionDomain) -> int:
    """Return the number of open memory regions in the protection domain."""
    return len(pd.node.children)


def test_statistics_keep_their_previous_names() -> None:
    statistics = CacheStatistics(1, SIZE, hits=3, misses=2)
    assert (statistics.found, statistics.made) == (3, 2)


async def test_registration_is_reused_for_the_same_memory(pd: verbs.ProtectionDomain) -> None:
    cache = small(pd)
    memory = memoryview(bytearray(SIZE))
    with find(cache, memory) as first:
        assert (first.address, len(first)) == (verbs.address_of(memory), SIZE)
        assert first.writable
        assert first[10:20].address == first.address + 10
        lkey = first.lkey
    for _ in range(3):
        with find(cache, memory) as again:
            assert again.lkey == lkey
    assert cache.statistics() == CacheStatistics(1, SIZE, hits=3, misses=1)
    assert registered(pd) == 1
    cache.clear()
    assert registered(pd) == 0
    with find(cache, memory):
        assert registered(pd) == 1
    cache.clear()
    assert registered(pd) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: memoryview(bytes(SIZE)),
        lambda: memoryview(array.array("d", bytes(SIZE))),
        lambda: memoryview(memoryview(bytearray(SIZE))[100:]),
        lambda: memoryview(bytearray(SIZE)).cast("d"),
        lambda: np.zeros(SIZE, np.uint8).data,
        lambda: np.zeros(SIZE, np.uint8)[100:].data,
    ],
    ids=["bytes", "array", "part", "cast", "numpy", "part of numpy"],
)
async def test_registrations_of_memoryviews_are_cached(
    pd: verbs.ProtectionDomain, make: Callable[[], memoryview]
) -> None:
    cache, memory = small(pd), make()
    for _ in range(2):
        with find(cache, memory) as found:
            assert found.writable is not memory.readonly
            assert found.view == memory.cast("B")
    assert cache.statistics().made == 1
    cache.clear()


class Elsewhere(bytearray):
    """A bytearray subclass. It could define __buffer__() (PEP 688) to export other memory."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(SIZE),  # the cache holds no bare object in place between operations
        lambda: bytes(SIZE),
        lambda: array.array("b", bytes(SIZE)),
        lambda: np.zeros(SIZE),
        lambda: np.frombuffer(mmap.mmap(-1, SIZE), np.uint8).data,  # like an mmap itself
        lambda: memoryview((ctypes.c_char * SIZE)()),  # ctypes.resize() moves memory under a view
        lambda: memoryview(mmap.mmap(-1, SIZE)),  # madvise() can replace the pages under a view
        lambda: memoryview(Elsewhere(SIZE)),
        lambda: memoryview(bytearray(SIZE))[::2],
        lambda: memoryview(bytearray(0)),
        lambda: memoryview(bytearray((1 << 20) + 1)),  # more than the cache may hold
    ],
)
async def test_unsafe_buffers_are_not_cached(
    pd: verbs.ProtectionDomain, make: Callable[[], object]
) -> None:
    cache = small(pd)
    assert cache.find(make()) is None
    assert cache.statistics() == CacheStatistics(0, 0, hits=0, misses=0)
    assert small(pd, most=0).find(memoryview(bytearray(SIZE))) is None


async def test_cached_memory_can_be_released_and_resized_when_unused(
    pd: verbs.ProtectionDomain,
) -> None:
    cache, memory = small(pd), bytearray(SIZE)
    view = memoryview(memory)
    found = find(cache, view)
    view.release()
    with pytest.raises(BufferError):
        memory.append(1)  # the operation still uses the memory
    found.close()
    memory.append(1)
    with pytest.raises(ValueError, match="released"):
        cache.find(view)
    assert registered(pd) == 1
    with find(cache, memoryview(bytearray(SIZE))):  # still caches the released view
        assert registered(pd) == 1
    await asyncio.sleep(0)
    assert cache.statistics().registrations == 0
    assert registered(pd) == 0
    another = memoryview(memory)
    find(cache, another).close()
    another.release()  # noticed by statistics()
    assert cache.statistics().registrations == 0
    assert registered(pd) == 0
    del view


async def test_view_at_a_reused_address_is_registered_again(pd: verbs.ProtectionDomain) -> None:
    """The new view may even have the id of the old one."""
    cache, count = small(pd), 0
    numbers: set[int] = set()
    places: set[tuple[int, int]] = set()
    # Repeat until addresses have been reused ten times. A sanitizer delays the reuse.
    while len(places) > count - 10 and count < 20_000:
        memory = bytearray(SIZE)
        view = memoryview(memory)
        with find(cache, view) as found:
            assert found.address == verbs.address_of(memory)
            places.add((id(view), found.address))
            numbers.add(found.lkey)
        count += 1
        assert cache.statistics().made == count
        del view, memory  # their finalizers are pending when the next memory is created
    assert len(places) <= count - 10
    assert len(numbers) == count
    cache.clear()


async def test_pinned_registration_outlives_its_view(pd: verbs.ProtectionDomain) -> None:
    cache, memory = small(pd), bytearray(SIZE)
    view = memoryview(memory)
    found = find(cache, view)
    found._pin()
    found.close()
    del view
    await asyncio.sleep(0)
    assert registered(pd) == 1
    with pytest.raises(BufferError):
        memory.append(1)
    with pytest.raises(BufferStateError):
        found._pin()
    found._unpin()
    assert registered(pd) == 0
    memory.append(1)


async def test_registration_is_removed_when_another_thread_drops_its_view(
    pd: verbs.ProtectionDomain,
) -> None:
    cache = small(pd)
    views = [memoryview(bytearray(SIZE))]
    find(cache, views[0]).close()
    thread = threading.Thread(target=views.clear)
    thread.start()
    await asyncio.to_thread(thread.join)
    await asyncio.sleep(0)
    assert registered(pd) == 0


async def test_registration_is_removed_when_a_reference_cycle_is_collected(
    pd: verbs.ProtectionDomain,
) -> None:
    cache = small(pd)
    cycle: list[object] = [memoryview(bytearray(SIZE))]
    cycle.append(cycle)
    find(cache, cycle[0]).close()
    del cycle
    gc.collect()
    await asyncio.sleep(0)
    assert registered(pd) == 0
    assert cache.statistics() == CacheStatistics(0, 0, hits=0, misses=1)


@pytest.mark.parametrize("loop", LOOPS)
def test_view_deleted_after_the_loop_closes_leaves_no_registration(
    pd: verbs.ProtectionDomain, loop: str
) -> None:
    async def main() -> memoryview:
        view = memoryview(bytearray(SIZE))
        cache = small(pd)
        find(cache, view).close()
        cache.clear()
        return view

    with asyncio.Runner(debug=True, loop_factory=LOOPS[loop]) as runner:
        view = runner.run(main())
    del view
    assert registered(pd) == 0


@pytest.mark.parametrize(("most", "most_bytes"), [(2, 1 << 20), (100, 2 * SIZE + 1)])
async def test_least_recently_used_registration_is_evicted(
    pd: verbs.ProtectionDomain, most: int, most_bytes: int
) -> None:
    cache = small(pd, most, most_bytes)
    first, second, third = (memoryview(bytearray(SIZE)) for _ in range(3))
    kept = find(cache, first)
    for view in (second, first, third):
        find(cache, view).close()
    assert cache.statistics() == CacheStatistics(2, 2 * SIZE, hits=1, misses=3)
    find(cache, first).close()
    assert cache.statistics().found == 2
    find(cache, second).close()
    assert cache.statistics().made == 4
    find(cache, third).close()  # evicts the first, which is still in use
    assert cache.statistics().registrations == 2
    assert registered(pd) == 3
    kept.close()
    assert registered(pd) == 2
    cache.clear()
    assert registered(pd) == 0
