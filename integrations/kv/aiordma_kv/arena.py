"""The allocator behind the server: blocks by key in one memory, with locks and reservations.

Nothing here performs I/O, waits or reads a clock. The server revokes the clients' access to the
memory and tells the arena afterwards. A ``now`` is in seconds and must never decrease.

A block occupies one extent of the memory: its data, and padding up to the next multiple of
`ALIGNMENT`. Its generation is unique for the life of the arena.

The memory ends with a table of trailers, one for each `ALIGNMENT` bytes of extents. The trailer of
a block identifies its contents. Because trailers are outside the extents, blocks can be adjacent in
the memory, and the trailers of adjacent blocks can be read together.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

ALIGNMENT = 4096
TRAILER_SIZE = 32
LOCK_SECONDS = 60.0  # until a lock or a reservation expires
MAX_RESERVATIONS = 1024  # of one holder; each may need a separate memory key
MAX_LOCKS = 1 << 16  # blocks that one holder can lock
MAX_EVICTED = 4  # bytes evicted for a new block, as a multiple of its length
MAX_EVICTIONS = 1 << 14  # blocks evicted by one call, because no other client is served meanwhile


def memory_length(size: int) -> int:
    """Return the length of a memory with extents of `size` bytes and their trailers."""
    return -(-size // ALIGNMENT) * (ALIGNMENT + TRAILER_SIZE)


def trailer_offset(length: int, offset: int) -> int:
    """Return the position of the trailer for an extent at `offset` in a memory of this length."""
    pages = length // (ALIGNMENT + TRAILER_SIZE)
    return pages * ALIGNMENT + offset // ALIGNMENT * TRAILER_SIZE


def pack_trailer(key: bytes, size: int, generation: int) -> bytes:
    """Return the trailer of a committed block.

    It consists of a BLAKE2b digest of the key (16 bytes), the generation and the size (8 bytes
    each, little endian). Readers compare it with the trailer they read after the data.
    """
    numbers = generation.to_bytes(8, "little") + size.to_bytes(8, "little")
    return blake2b(key, digest_size=16).digest() + numbers


class Place(NamedTuple):
    """The position of a block in the memory."""

    offset: int  # start of the extent and of the data
    size: int  # bytes of data
    generation: int
    length: int  # bytes of the extent: data and padding

    @property
    def end(self) -> int:
        """The end of the extent."""
        return self.offset + self.length


@dataclass(slots=True, eq=False)
class _Block:
    """A block that is reserved, stored, or deleted but still locked."""

    key: bytes
    place: Place
    holders: int = 0  # holders that lock the block


@dataclass(slots=True)
class _Hold:
    """A holder's reservation of a block, or all its locks on the block."""

    block: _Block
    deadline: float = 0.0
    count: int = 0  # locks


@dataclass(slots=True, eq=False)
class Holder:
    """The reservations and locks of one session."""

    locked_bytes: int = 0  # extents of locked blocks, each counted once
    reserved_bytes: int = 0  # extents
    is_suspended: bool = False
    # By generation, in the order of the deadlines.
    _locks: OrderedDict[int, _Hold] = field(default_factory=OrderedDict)
    _reservations: OrderedDict[int, _Hold] = field(default_factory=OrderedDict)


class Arena:
    """Blocks in one memory, found by key and evicted in least recently used order.

    Args:
        memory: A writable buffer of bytes, long enough for two extents.

    Raises:
        ValueError: `memory` is too small.
    """

    size: int  # bytes that blocks can use, a multiple of ALIGNMENT

    def __init__(self, memory: bytearray | memoryview | mmap.mmap) -> None:
        self.size = trailer_offset(len(memory), 0)
        if self.size < 2 * ALIGNMENT:
            needed = memory_length(2 * ALIGNMENT)
            raise ValueError(f"memory of {len(memory)} bytes is too small: need {needed}")
        self._memory = memory
        self._next_generation = 1
        self._holders: dict[Holder, None] = {}
        self._stored: dict[bytes, _Block] = {}  # visible blocks
        self._reserved: set[bytes] = set()
        # Blocks that can be evicted, by offset, the least recently used first. Finding the first
        # item of a plain dict takes long after many of its first items have been removed.
        self._unlocked: OrderedDict[int, _Block] = OrderedDict()
        # Free extents: the end by start, the start by end, and the starts by length.
        self._free_ends: dict[int, int] = {}
        self._free_starts: dict[int, int] = {}
        self._free: dict[int, OrderedDict[int, None]] = {}
        self._lengths: list[int] = []  # sorted keys of _free
        self._free_bytes = self._stored_bytes = self._locked_bytes = 0
        self.evictions = 0  # since the start
        self._add_free(0, self.size)

    def attach(self) -> Holder:
        """Return a new holder, without reservations or locks."""
        holder = Holder()
        self._holders[holder] = None
        return holder

    def reserve(
        self, holder: Holder, key: bytes, size: int, now: float, max_evictions: int = MAX_EVICTIONS
    ) -> Place | None:
        """Reserve an extent for a new block, evicting unlocked blocks if necessary.

        If the result is None although the key is not stored (see `contains`), the space or the
        key may be held by a session that is too slow. Call `suspend_expired`, release the suspended
        holders, and try again.

        Returns:
            The place to write to. None if the key is already stored or reserved, if there is not
            enough room after `max_evictions` evictions, if the holder would reserve more than
            MAX_RESERVATIONS blocks or half of the arena, or if it is suspended.

        Raises:
            ValueError: `size` is not positive.
        """
        if size <= 0:
            raise ValueError(f"invalid block size {size}: must be positive")
        length = -(-size // ALIGNMENT) * ALIGNMENT
        if holder.is_suspended or key in self._stored or key in self._reserved:
            return None
        if holder.reserved_bytes + length > self.size // 2:
            return None
        if len(holder._reservations) >= MAX_RESERVATIONS:
            return None
        if not self._make_room(length, max_evictions):
            return None
        place = Place(self._allocate(length), size, self._next_generation, length)
        self._next_generation += 1
        self._reserved.add(key)
        holder._reservations[place.generation] = _Hold(_Block(key, place), now + LOCK_SECONDS)
        holder.reserved_bytes += length
        return place

    def commit(self, holder: Holder, generation: int) -> Place | None:
        """Write the trailer of a reserved block and make the block visible.

        Every write share of the extent must have ended before the call.

        Returns:
            The place of the block. None if this holder has no such reservation or is suspended.
        """
        if generation not in holder._reservations or holder.is_suspended:
            return None
        block = self._end_reservation(holder, generation)
        place = block.place
        self._write_trailer(place.offset, pack_trailer(block.key, place.size, generation))
        self._stored[block.key] = self._unlocked[place.offset] = block
        self._stored_bytes += place.size
        return place

    def locate(self, holder: Holder, key: bytes, now: float) -> Place | None:
        """Find a stored block and lock it until `now` plus LOCK_SECONDS.

        Locks are counted: each successful call needs an `unlock`. Locking a block again extends
        the holder's earlier locks on it. An expired lock still protects the block until it is
        unlocked or its holder is released.

        Returns:
            The place of the block. None if the key is not stored, if the holder would lock more
            than MAX_LOCKS blocks or half of the arena, or if it is suspended.
        """
        block = self._stored.get(key)
        if block is None or holder.is_suspended:
            return None
        place = block.place
        lock = holder._locks.get(place.generation)
        if lock is None:
            if holder.locked_bytes + place.length > self.size // 2:
                return None
            if len(holder._locks) >= MAX_LOCKS:
                return None
            lock = holder._locks[place.generation] = _Hold(block)
            holder.locked_bytes += place.length
            if not block.holders:
                del self._unlocked[place.offset]
                self._locked_bytes += place.length
            block.holders += 1
        lock.count += 1
        lock.deadline = now + LOCK_SECONDS
        holder._locks.move_to_end(place.generation)
        return place

    def locked_place(self, holder: Holder, generation: int) -> Place | None:
        """Return the place of a block that this holder has locked, or None if it has not."""
        lock = holder._locks.get(generation)
        return None if lock is None else lock.block.place

    def unlock(self, holder: Holder, generation: int) -> bool:
        """Release one lock. Returns False if this holder has no such lock."""
        lock = holder._locks.get(generation)
        if lock is None:
            return False
        lock.count -= 1
        if not lock.count:
            self._end_lock(holder, generation)
        return True

    def delete(self, key: bytes) -> bool:
        """Remove a stored block. A locked block keeps its extent until its last unlock.

        Returns:
            Whether the key was stored.
        """
        block = self._stored.pop(key, None)
        if block is None:
            return False
        self._stored_bytes -= block.place.size
        if not block.holders:
            del self._unlocked[block.place.offset]
            self._free_extent(block.place)
        return True

    def contains(self, key: bytes) -> bool:
        """Return whether a block is stored under this key, without locking or touching it."""
        return key in self._stored

    def suspend_expired(self, now: float) -> None:
        """Suspend the holders that have an expired lock or reservation.

        A suspended holder can only `unlock`. Its blocks stay protected until `release`. Revoke all
        shares of its session and wait until they have ended before you release it.
        """
        for holder in self._holders:
            for holds in (holder._locks, holder._reservations):
                oldest = next(iter(holds.values()), None)
                if oldest is not None and oldest.deadline <= now:
                    holder.is_suspended = True

    def release(self, holder: Holder) -> None:
        """Free all reservations and locks of a holder, which cannot be used afterwards.

        All shares of its session must have ended, or the connection must be closed. Releasing a
        holder again has no effect.
        """
        holder.is_suspended = True
        for generation in list(holder._reservations):
            self._free_extent(self._end_reservation(holder, generation).place)
        for generation in list(holder._locks):
            self._end_lock(holder, generation)
        self._holders.pop(holder, None)

    def stats(self) -> dict[str, int]:
        """Return counters and sizes. Thread-safe.

        `size`, `free_bytes`, `reserved_bytes` and `locked_bytes` count extents; `stored_bytes`
        counts data of visible blocks. `blocks` is the number of visible blocks; `evictions` counts
        since the start; `holders` is the number not yet released.
        """
        return {
            "size": self.size,
            "free_bytes": self._free_bytes,
            "reserved_bytes": sum(holder.reserved_bytes for holder in list(self._holders)),
            "locked_bytes": self._locked_bytes,
            "stored_bytes": self._stored_bytes,
            "blocks": len(self._stored),
            "evictions": self.evictions,
            "holders": len(self._holders),
        }

    def _end_reservation(self, holder: Holder, generation: int) -> _Block:
        """Remove a reservation. The caller stores the block or frees its extent."""
        block = holder._reservations.pop(generation).block
        holder.reserved_bytes -= block.place.length
        self._reserved.remove(block.key)
        return block

    def _end_lock(self, holder: Holder, generation: int) -> None:
        """Remove all locks that the holder has on a block, and free the block if it is deleted."""
        block = holder._locks.pop(generation).block
        holder.locked_bytes -= block.place.length
        block.holders -= 1
        if block.holders:
            return
        self._locked_bytes -= block.place.length
        if self._stored.get(block.key) is block:
            self._unlocked[block.place.offset] = block
        else:
            self._free_extent(block.place)

    def _make_room(self, length: int, max_evictions: int) -> bool:
        """Evict blocks until a free extent is long enough. Returns False if this has failed.

        Evicts the least recently used block, and then the blocks behind it, because their extents
        merge. Where this run ends, it starts again at the block that is then least recently used.
        """
        evicted, end = 0, -1
        while not self._lengths or self._lengths[-1] < length:
            # A block that does not fit between locked blocks must not empty the whole arena.
            if not self._unlocked or evicted >= MAX_EVICTED * length or max_evictions <= 0:
                return False
            block = self._unlocked.get(end) or next(iter(self._unlocked.values()))
            end = self._free_ends.get(block.place.end, block.place.end)
            self.delete(block.key)
            self.evictions += 1
            max_evictions -= 1
            evicted += block.place.length
        return True

    def _allocate(self, length: int) -> int:
        """Take an extent from the shortest free one that is long enough. Returns its offset."""
        found = self._lengths[bisect_left(self._lengths, length)]
        start = next(iter(self._free[found]))
        end = self._remove_free(start)
        if found > length:
            self._add_free(start + length, end)
        return start

    def _free_extent(self, place: Place) -> None:
        """Clear the trailer of a block, then merge its extent with free neighbours."""
        self._write_trailer(place.offset, bytes(TRAILER_SIZE))
        start, end = place.offset, place.end
        if end in self._free_ends:
            end = self._remove_free(end)
        if start in self._free_starts:
            start = self._free_starts[start]
            self._remove_free(start)
        self._add_free(start, end)

    def _write_trailer(self, offset: int, trailer: bytes) -> None:
        start = trailer_offset(len(self._memory), offset)
        self._memory[start : start + TRAILER_SIZE] = trailer

    def _add_free(self, start: int, end: int) -> None:
        length = end - start
        self._free_ends[start], self._free_starts[end] = end, start
        if length not in self._free:
            self._free[length] = OrderedDict()
            insort(self._lengths, length)
        self._free[length][start] = None
        self._free_bytes += length

    def _remove_free(self, start: int) -> int:
        """Remove a free extent, and return its end."""
        end = self._free_ends.pop(start)
        del self._free_starts[end]
        length = end - start
        del self._free[length][start]
        if not self._free[length]:
            del self._free[length]
            del self._lengths[bisect_left(self._lengths, length)]
        self._free_bytes -= length
        return end
