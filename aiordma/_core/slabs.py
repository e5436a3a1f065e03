"""The buddy allocator of the memory pool, which assigns each block a slab and an offset.

This module does not access the memory. A slab is a piece of memory of ``slab_size`` bytes that is
registered as a whole. It is divided into blocks whose sizes are powers of two, from ``smallest`` up
to the slab itself. A block of size s begins at a multiple of s within its slab, so it is aligned to
its size if the slab is.

Blocks are split into halves (buddies) as needed. A freed block is added to a list for its size, and
is reused from there in LIFO order, while it is still in the caches. Nearly every call takes this
path, and its cost does not depend on the number of blocks. Buddies are only joined again if a
request could not be served otherwise, or if a slab is to be released. If they were joined whenever
a block is freed, the same blocks would be split and joined all the time.
"""

from __future__ import annotations

from aiordma.errors import BufferStateError


class SlabAllocator:
    """An allocator of blocks within the slabs of a pool.

    The pool registers the memory of each slab. ``slab_size`` and ``smallest``, the minimum size of
    a block, are powers of two, in bytes.
    """

    __slots__ = (
        "_classes", "_free", "_freed_since_join", "_slab_shift", "_slabs", "_smallest_bits",
        "_used", "_used_bytes", "slab_size", "smallest",
    )  # fmt: skip

    def __init__(self, slab_size: int, smallest: int) -> None:
        self.slab_size = slab_size
        self.smallest = smallest
        self._slab_shift = slab_size.bit_length() - 1
        self._smallest_bits = smallest.bit_length() - 1
        self._classes = self._slab_shift - self._smallest_bits + 1
        # A block is identified by its place, the integer slab << shift | offset. `_free` has a list
        # of free places for each size class. Class 0 has the smallest blocks. `_used` maps each
        # allocated place to its size class.
        self._free: list[list[int]] = [[] for _ in range(self._classes)]
        self._used: dict[int, int] = {}
        self._slabs: set[int] = set()
        self._used_bytes = 0
        self._freed_since_join = False  # whether blocks were freed since buddies were last joined

    def add_slab(self) -> int:
        """Add a free slab under the lowest unused index, and return the index."""
        slab = next(index for index in range(len(self._slabs) + 1) if index not in self._slabs)
        self._slabs.add(slab)
        self._free[-1].append(slab << self._slab_shift)
        return slab

    def allocate(self, size: int) -> tuple[int, int] | None:
        """Allocate a block of at least ``size`` bytes, and return its slab index and offset.

        ``size`` must be from 1 to ``slab_size``. Returns None if no slab has room. The caller can
        then add a slab, or wait until a block is freed.
        """
        wanted_class = max(0, (size - 1).bit_length() - self._smallest_bits)
        free = self._free[wanted_class]
        place = free.pop() if free else self._split(wanted_class)
        if place is None:
            return None
        self._used[place] = wanted_class
        self._used_bytes += self.smallest << wanted_class
        return place >> self._slab_shift, place & (self.slab_size - 1)

    def _split(self, wanted_class: int) -> int | None:
        """Split a larger free block, and return the place of a part that has the wanted class.

        Free buddies are joined first if no larger block is free. Returns None if no slab has room.
        """
        found = self._find_larger_class(wanted_class)
        unused = len(self._slabs) * self.slab_size - self._used_bytes
        if found is None and self._freed_since_join and unused >= self.smallest << wanted_class:
            self._join_buddies()
            found = (
                wanted_class if self._free[wanted_class] else self._find_larger_class(wanted_class)
            )
        if found is None:
            return None
        place = self._free[found].pop()
        for smaller in range(found - 1, wanted_class - 1, -1):
            self._free[smaller].append(place + (self.smallest << smaller))
        return place

    def _find_larger_class(self, wanted_class: int) -> int | None:
        for larger in range(wanted_class + 1, self._classes):
            if self._free[larger]:
                return larger
        return None

    def free(self, slab: int, offset: int) -> None:
        """Free a block. Raises BufferStateError if it is not allocated (double free)."""
        place = slab << self._slab_shift | offset
        size_class = self._used.pop(place, None) if 0 <= offset < self.slab_size else None
        if size_class is None:
            raise BufferStateError(f"no block is allocated at offset {offset} in slab {slab}")
        self._free[size_class].append(place)
        self._used_bytes -= self.smallest << size_class
        self._freed_since_join = True

    def _join_buddies(self) -> None:
        """Merge all pairs of free buddies, beginning with the smallest size class."""
        self._freed_since_join = False
        for size_class in range(self._classes - 1):
            bit = self.smallest << size_class
            places = set(self._free[size_class])
            pairs = [place for place in places if not place & bit and place | bit in places]
            if not pairs:
                continue
            self._free[size_class + 1] += pairs
            places.difference_update(pairs, [place | bit for place in pairs])
            # `allocate` takes the last place in the list. Sort the lowest place last, so that low
            # slabs fill up first and high slabs tend to become empty and can be trimmed.
            self._free[size_class] = sorted(places, reverse=True)

    def trim(self, keep: int = 0) -> list[int]:
        """Remove completely free slabs, except for ``keep`` of them, and return their indexes.

        The caller may then deregister the removed slabs. Their indexes will be reused.
        """
        self._join_buddies()
        free_slabs = self._free[-1]
        free_slabs.sort(reverse=True)
        spare = max(0, len(free_slabs) - keep)
        removed = [place >> self._slab_shift for place in free_slabs[:spare]]
        del free_slabs[:spare]
        self._slabs.difference_update(removed)
        return removed
