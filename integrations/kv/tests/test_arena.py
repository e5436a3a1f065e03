"""The arena: unit tests, and a state machine that compares it with a model that is easy to read."""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import ModuleType

import pytest
from aiordma_kv import arena as arena_module
from aiordma_kv.arena import (
    LOCK_SECONDS,
    MAX_EVICTED,
    MAX_LOCKS,
    MAX_RESERVATIONS,
    TRAILER_SIZE,
    Arena,
    Holder,
    Place,
    memory_length,
)
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

PAGE = 4096


def make_trailer(key: bytes, size: int, generation: int) -> bytes:
    return struct.pack("<16sQQ", blake2b(key, digest_size=16).digest(), generation, size)


def trailers_of(memory: bytearray | memoryview | mmap.mmap, pages: int) -> list[bytes]:
    """Return the trailers in a memory with this number of pages."""
    table = bytes(memory[pages * PAGE :])
    return [table[start : start + TRAILER_SIZE] for start in range(0, pages * 32, 32)]


def reserve(arena: Arena, holder: Holder, key: bytes, pages: int = 1, now: float = 0.0) -> Place:
    place = arena.reserve(holder, key, pages * PAGE, now)
    assert place is not None
    return place


def put(arena: Arena, holder: Holder, key: bytes, pages: int = 1) -> Place:
    place = reserve(arena, holder, key, pages)
    assert arena.commit(holder, place.generation)
    return place


def locate(arena: Arena, holder: Holder, key: bytes, now: float = 0.0) -> Place:
    place = arena.locate(holder, key, now)
    assert place is not None
    return place


def keys(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def make_arena(pages: int) -> tuple[Arena, Holder]:
    arena = Arena(bytearray(pages * (PAGE + TRAILER_SIZE)))
    return arena, arena.attach()


@pytest.mark.parametrize("view", [bytearray, memoryview, mmap.mmap])
def test_commit_writes_trailer_into_the_table(view: type) -> None:
    data = bytearray(4 * (PAGE + TRAILER_SIZE))
    memory = mmap.mmap(-1, len(data)) if view is mmap.mmap else view(data)
    arena = Arena(memory)
    arena._next_generation = 1 << 63
    holder = arena.attach()
    place = arena.reserve(holder, b"a", 2 * PAGE - 1, 0.0)
    assert place == Place(0, 2 * PAGE - 1, 1 << 63, 2 * PAGE)
    assert bytes(memory) == bytes(len(data))
    assert arena.commit(holder, 1 << 63)
    expected = [make_trailer(b"a", 2 * PAGE - 1, 1 << 63), *[bytes(TRAILER_SIZE)] * 3]
    assert trailers_of(memory, 4) == expected
    assert bytes(memory[: 4 * PAGE]) == bytes(4 * PAGE)


def test_last_page_has_its_own_trailer() -> None:
    memory = bytearray(3 * (PAGE + TRAILER_SIZE))
    arena = Arena(memory)
    places = {key: put(arena, arena.attach(), key) for key in keys(3)}
    assert [place.offset for place in places.values()] == [0, PAGE, 2 * PAGE]
    expected = [make_trailer(key, PAGE, place.generation) for key, place in places.items()]
    assert trailers_of(memory, 3) == expected


def test_memory_can_be_longer_than_its_pages_and_trailers() -> None:
    memory = bytearray(3 * (PAGE + TRAILER_SIZE) - 1)
    arena = Arena(memory)
    holder = arena.attach()
    assert arena.size == 2 * PAGE
    places = {key: put(arena, holder, key) for key in keys(2)}
    expected = [make_trailer(key, PAGE, place.generation) for key, place in places.items()]
    assert trailers_of(memory, 2) == expected
    assert memory[2 * (PAGE + TRAILER_SIZE) :] == bytes(PAGE + TRAILER_SIZE - 1)


@pytest.mark.parametrize(("size", "pages"), [(1, 1), (2 * PAGE, 2), (2 * PAGE + 1, 3)])
def test_memory_length_includes_the_trailers(size: int, pages: int) -> None:
    assert memory_length(size) == pages * (PAGE + 32)


def test_arena_rejects_memory_smaller_than_two_pages() -> None:
    with pytest.raises(ValueError, match="memory of 8255 bytes is too small: need 8256"):
        Arena(bytearray(2 * (PAGE + TRAILER_SIZE) - 1))


@pytest.mark.parametrize("size", [0, -1])
def test_reserve_rejects_sizes_below_one(size: int) -> None:
    arena, holder = make_arena(4)
    with pytest.raises(ValueError, match=f"invalid block size {size}"):
        arena.reserve(holder, b"key", size, 0.0)


@pytest.mark.parametrize("pages", [2, 3, 8, 9])
def test_block_can_have_half_of_the_pages(pages: int) -> None:
    arena, holder = make_arena(pages)
    limit = pages // 2 * PAGE
    assert arena.reserve(holder, b"key", limit + 1, 0.0) is None
    assert arena.reserve(holder, b"key", limit, 0.0) is not None


def test_full_page_needs_no_second_one() -> None:
    arena, holder = make_arena(8)
    places = [arena.reserve(holder, key, PAGE + int(key), 0.0) for key in keys(2)]
    assert [place and place.length for place in places] == [PAGE, 2 * PAGE]


def test_reservations_of_one_batch_are_adjacent_after_eviction_too() -> None:
    arena, holder = make_arena(8)
    for key in keys(32):
        put(arena, holder, key)
    offsets = [reserve(arena, holder, key).offset for key in (b"a", b"b", b"c", b"d")]
    assert offsets == [offsets[0] + number * PAGE for number in range(4)]


def test_reserved_block_is_invisible_until_commit() -> None:
    arena, holder = make_arena(4)
    place = reserve(arena, holder, b"key")
    assert not arena.contains(b"key")
    assert arena.locate(holder, b"key", 0.0) is None
    assert not arena.delete(b"key")
    assert arena.commit(holder, place.generation)
    assert arena.contains(b"key")
    assert arena.locate(holder, b"key", 0.0) == place


def test_reserve_refuses_a_key_that_exists() -> None:
    arena, holder = make_arena(8)
    place = reserve(arena, holder, b"key")
    other = arena.attach()
    assert arena.reserve(other, b"key", 1, 0.0) is None
    assert arena.commit(holder, place.generation)
    assert arena.reserve(other, b"key", 1, 0.0) is None


def test_commit_refuses_foreign_wrong_and_ended_reservations() -> None:
    arena, holder = make_arena(8)
    place = reserve(arena, holder, b"key")
    assert arena.commit(arena.attach(), place.generation) is None
    assert arena.commit(holder, place.generation + 1) is None
    assert arena.commit(holder, place.generation) == place
    assert arena.commit(holder, place.generation) is None
    assert arena.contains(b"key")


def test_released_reservation_frees_the_key_without_a_trailer() -> None:
    memory = bytearray(4 * (PAGE + TRAILER_SIZE))
    arena = Arena(memory)
    holder = arena.attach()
    place = reserve(arena, holder, b"key")
    arena.release(holder)
    assert memory == bytes(len(memory))
    assert reserve(arena, arena.attach(), b"key").generation > place.generation


def test_trailer_is_cleared_before_its_page_is_used_again() -> None:
    memory = bytearray(4 * (PAGE + TRAILER_SIZE))
    arena = Arena(memory)
    holder = arena.attach()
    for key in keys(4):
        put(arena, holder, key)
    assert reserve(arena, holder, b"large", 2).offset == 0
    assert [any(trailer) for trailer in trailers_of(memory, 4)] == [False, False, True, True]
    assert arena.delete(b"3")
    assert [any(trailer) for trailer in trailers_of(memory, 4)] == [False, False, True, False]


def test_eviction_takes_the_least_recently_used_block() -> None:
    arena, holder = make_arena(4)
    places = {key: put(arena, holder, key) for key in (b"a", b"b", b"c", b"d")}
    locate(arena, holder, b"a")
    assert arena.unlock(holder, places[b"a"].generation)
    assert put(arena, holder, b"e").offset == places[b"b"].offset
    assert [key for key in (b"a", b"b", b"c", b"d", b"e") if arena.contains(key)] == [
        b"a",
        b"c",
        b"d",
        b"e",
    ]
    assert arena.stats()["evictions"] == 1


def test_contains_does_not_count_as_use() -> None:
    arena, holder = make_arena(2)
    put(arena, holder, b"a")
    put(arena, holder, b"b")
    assert arena.contains(b"a")
    put(arena, holder, b"c")
    assert not arena.contains(b"a")


def test_large_block_evicts_neighbours_of_the_oldest_block() -> None:
    arena, holder = make_arena(8)
    for key in keys(8):
        put(arena, holder, key)
    for key in (b"1", b"2"):  # recently used
        assert arena.unlock(holder, locate(arena, holder, key).generation)
    place = reserve(arena, holder, b"large", 4)
    assert place.offset == 0
    assert [arena.contains(key) for key in keys(8)] == [False] * 4 + [True] * 4


def test_large_block_evicts_beyond_a_free_extent() -> None:
    arena, holder = make_arena(8)
    for key in keys(8):
        put(arena, holder, key)
    arena.delete(b"1")
    assert arena.unlock(holder, locate(arena, holder, b"2").generation)  # recently used
    assert reserve(arena, holder, b"large", 3).offset == 0
    assert [arena.contains(key) for key in keys(8)] == [False] * 3 + [True] * 5


def test_eviction_continues_with_the_next_oldest_block_at_a_locked_one() -> None:
    arena, holder = make_arena(8)
    for key in keys(8):
        put(arena, holder, key)
    locate(arena, holder, b"1")
    assert reserve(arena, holder, b"large", 3).offset == 2 * PAGE
    assert [arena.contains(key) for key in keys(8)] == [False, True, False, False, False] + [
        True
    ] * 3


def test_eviction_for_a_block_that_does_not_fit_is_limited() -> None:
    arena, holder = make_arena(64)
    for key in keys(64):
        put(arena, holder, key)
    for key in keys(64)[1::2]:
        locate(arena, holder, key)
    assert arena.reserve(holder, b"large", 2 * PAGE, 0.0) is None
    assert arena.stats()["evictions"] == 2 * MAX_EVICTED
    reserve(arena, holder, b"small")
    assert arena.stats()["evictions"] == 2 * MAX_EVICTED


def test_number_of_evictions_for_a_block_is_limited_but_repetition_succeeds() -> None:
    arena, holder = make_arena(64)
    for key in keys(64):
        put(arena, holder, key)
    evictions = []
    while arena.reserve(holder, b"large", 32 * PAGE, 0.0, max_evictions=10) is None:
        evictions.append(arena.stats()["evictions"])
    assert evictions == [10, 20, 30]
    assert arena.stats()["evictions"] == 32


def test_locked_place_is_known_to_its_holder_until_the_unlock() -> None:
    arena, holder = make_arena(4)
    place = put(arena, holder, b"key")
    assert arena.locked_place(holder, place.generation) is None
    locate(arena, holder, b"key")
    assert arena.delete(b"key")
    assert arena.locked_place(holder, place.generation) == place
    assert arena.locked_place(holder, place.generation + 1) is None
    assert arena.locked_place(arena.attach(), place.generation) is None
    assert arena.unlock(holder, place.generation)
    assert arena.locked_place(holder, place.generation) is None


def test_holder_has_a_limited_number_of_reservations_and_locks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert MAX_RESERVATIONS >= 1024  # four times the blocks that a client reserves in one call
    assert MAX_LOCKS >= 4096
    monkeypatch.setattr(arena_module, "MAX_RESERVATIONS", 2)
    monkeypatch.setattr(arena_module, "MAX_LOCKS", 2)
    arena, holder = make_arena(16)
    for key in keys(3):
        put(arena, holder, key)
    assert [arena.locate(holder, key, 0.0) is None for key in keys(3)] == [False, False, True]
    locate(arena, holder, b"0")  # locked already
    for key in (b"a", b"b"):
        reserve(arena, holder, key)
    assert arena.reserve(holder, b"c", 1, 0.0) is None
    assert arena.reserve(arena.attach(), b"c", 1, 0.0) is not None


def test_reserve_succeeds_again_after_a_lock_ends() -> None:
    arena, holder = make_arena(4)
    for key in keys(4):
        put(arena, holder, key)
    first = locate(arena, holder, b"1")
    locate(arena, arena.attach(), b"2")
    assert arena.reserve(holder, b"large", PAGE + 1, 0.0) is None
    assert arena.unlock(holder, first.generation)
    assert arena.reserve(holder, b"large", PAGE + 1, 0.0) is not None


def test_full_arena_of_locked_blocks_refuses_reservations() -> None:
    arena, holder = make_arena(4)
    for key in keys(4):
        put(arena, holder, key)
    second = arena.attach()
    for owner, key in zip((holder, holder, second, second), keys(4), strict=True):
        locate(arena, owner, key)
    assert arena.reserve(arena.attach(), b"key", 1, 0.0) is None
    assert all(map(arena.contains, keys(4)))


def test_holder_reserves_at_most_half_of_the_arena() -> None:
    arena, holder = make_arena(8)
    places = [reserve(arena, holder, key) for key in keys(4)]
    assert arena.reserve(holder, b"more", 1, 0.0) is None
    assert arena.reserve(arena.attach(), b"more", 1, 0.0) is not None
    assert arena.commit(holder, places[0].generation)
    assert arena.reserve(holder, b"after commit", 1, 0.0) is not None


def test_holder_locks_at_most_half_of_the_arena() -> None:
    arena, holder = make_arena(8)
    for key in keys(8):
        put(arena, holder, key)
    places = [locate(arena, holder, key) for key in keys(4)]
    assert arena.locate(holder, b"4", 0.0) is None
    assert arena.locate(arena.attach(), b"4", 0.0) is not None
    locate(arena, holder, b"0")  # locked already
    assert arena.unlock(holder, places[1].generation)
    locate(arena, holder, b"4")


def test_locks_are_counted() -> None:
    arena, holder = make_arena(2)
    place = put(arena, holder, b"key")
    locate(arena, holder, b"key")
    locate(arena, holder, b"key")
    assert arena.delete(b"key")
    assert arena.unlock(holder, place.generation)
    assert arena.stats()["locked_bytes"] == PAGE
    assert arena.unlock(holder, place.generation)
    assert not arena.unlock(holder, place.generation)
    assert arena.stats()["free_bytes"] == 2 * PAGE


def test_unlock_refuses_locks_of_another_holder() -> None:
    arena, holder = make_arena(4)
    place = put(arena, holder, b"key")
    locate(arena, holder, b"key")
    assert not arena.unlock(arena.attach(), place.generation)
    assert not arena.unlock(holder, place.generation + 1)
    assert arena.stats()["locked_bytes"] == PAGE


def test_deleted_block_keeps_its_extent_until_the_last_unlock() -> None:
    memory = bytearray(4 * (PAGE + TRAILER_SIZE))
    arena = Arena(memory)
    holder, other = arena.attach(), arena.attach()
    old = put(arena, holder, b"key")
    locate(arena, holder, b"key")
    locate(arena, other, b"key")
    assert arena.delete(b"key")
    assert not arena.delete(b"key")
    assert arena.locate(holder, b"key", 0.0) is None
    new = put(arena, holder, b"key")
    assert new.offset != old.offset
    assert arena.unlock(holder, old.generation)
    number = old.offset // PAGE
    assert trailers_of(memory, 4)[number] == make_trailer(b"key", old.size, old.generation)
    assert arena.unlock(other, old.generation)
    assert trailers_of(memory, 4)[number] == bytes(TRAILER_SIZE)
    assert arena.contains(b"key")


def test_holders_with_old_locks_and_reservations_are_suspended() -> None:
    arena, locker = make_arena(8)
    writer, idle = arena.attach(), arena.attach()
    put(arena, idle, b"key")
    locate(arena, locker, b"key", 10.0)
    reserve(arena, writer, b"new", now=11.0)
    for seconds, expected in (
        (10.0 - 0.1, [False, False, False]),
        (10.0, [True, False, False]),
        (11.0, [True, True, False]),
    ):
        arena.suspend_expired(seconds + LOCK_SECONDS)
        assert [it.is_suspended for it in (locker, writer, idle)] == expected


@pytest.mark.parametrize("is_unlocked", [False, True])
def test_oldest_lock_expires_when_another_was_renewed(is_unlocked: bool) -> None:
    arena, holder = make_arena(8)
    for key in keys(2):
        put(arena, holder, key)
        locate(arena, holder, key)
    locate(arena, holder, b"0", 30.0)
    if is_unlocked:
        assert arena.unlock(holder, 2)
    arena.suspend_expired(LOCK_SECONDS)
    assert holder.is_suspended is not is_unlocked


def test_expired_lock_protects_its_block_until_the_holder_is_released() -> None:
    arena, holder = make_arena(2)
    place = put(arena, holder, b"key")
    locate(arena, holder, b"key")
    other = arena.attach()
    put(arena, other, b"a")
    arena.suspend_expired(1000.0)
    put(arena, other, b"b")
    assert arena.contains(b"key")
    arena.release(holder)
    assert put(arena, other, b"d").offset != place.offset  # the released block is used last
    assert put(arena, other, b"e").offset == place.offset


def test_suspended_holder_can_only_unlock() -> None:
    arena, holder = make_arena(8)
    stored = put(arena, holder, b"stored")
    locate(arena, holder, b"stored")
    reserved = reserve(arena, holder, b"reserved")
    arena.suspend_expired(LOCK_SECONDS)
    assert arena.reserve(holder, b"new", 1, 0.0) is None
    assert arena.locate(holder, b"stored", 0.0) is None
    assert not arena.commit(holder, reserved.generation)
    assert arena.unlock(holder, stored.generation)
    assert arena.stats()["reserved_bytes"] == PAGE


def test_release_frees_reservations_and_locks_once() -> None:
    arena, holder = make_arena(8)
    put(arena, holder, b"stored")
    put(arena, holder, b"deleted")
    locate(arena, holder, b"stored")
    locate(arena, holder, b"deleted")
    arena.delete(b"deleted")
    place = reserve(arena, holder, b"reserved")
    arena.release(holder)
    arena.release(holder)
    stats = arena.stats()
    assert (stats["reserved_bytes"], stats["locked_bytes"], stats["holders"]) == (0, 0, 0)
    assert stats["free_bytes"] == 7 * PAGE
    assert (holder.reserved_bytes, holder.locked_bytes) == (0, 0)
    assert not arena.commit(holder, place.generation)
    assert arena.reserve(holder, b"new", 1, 0.0) is None
    assert arena.reserve(arena.attach(), b"reserved", 1, 0.0) is not None


def test_statistics_describe_the_arena() -> None:
    arena, holder = make_arena(8)
    put(arena, holder, b"key")
    locate(arena, holder, b"key")
    reserve(arena, arena.attach(), b"new", 2)
    assert (holder.locked_bytes, holder.reserved_bytes) == (PAGE, 0)
    assert arena.stats() == {
        "size": 8 * PAGE,
        "free_bytes": 5 * PAGE,
        "reserved_bytes": 2 * PAGE,
        "locked_bytes": PAGE,
        "stored_bytes": PAGE,
        "blocks": 1,
        "evictions": 0,
        "holders": 2,
    }


# The state machine


@dataclass
class Block:
    """A block of the model, kept after its end to try its generation again."""

    key: bytes
    place: Place
    owner: int
    deadline: float
    state: str = "reserved"  # then "stored", perhaps "deleted", "free"
    locks: dict[int, list[float]] = field(
        default_factory=dict
    )  # [count, deadline, order] by holder

    @property
    def is_pinned(self) -> bool:
        return self.state in ("reserved", "deleted") or bool(self.locks)

    @property
    def end(self) -> int:
        return self.place.offset + self.place.length

    @property
    def data(self) -> bytes:
        return bytes([self.place.generation % 255 + 1]) * self.place.size

    @property
    def trailer(self) -> bytes:
        return make_trailer(self.key, self.place.size, self.place.generation)


class ArenaMachine(RuleBasedStateMachine):
    """Random operations of three sessions. The model decides which results are correct."""

    module: ModuleType = arena_module
    SIZE = 8 * PAGE
    HOLDERS = range(2)
    KEYS = keys(12)

    def __init__(self) -> None:
        super().__init__()
        self.memory = bytearray(memory_length(self.SIZE))
        self.arena: Arena = self.module.Arena(self.memory)
        self.holders = [self.arena.attach() for _ in self.HOLDERS]
        self.suspended = [False for _ in self.HOLDERS]
        self.blocks: list[Block] = []  # the latest ones
        self.used: list[Block] = []  # evictable blocks, the least recently used first
        self.now = 0.0
        self.last_generation = 0
        self.locates = self.evictions = 0

    def live(self) -> Iterator[Block]:
        return (block for block in self.blocks if block.state != "free")

    def stored(self, key: bytes) -> Block | None:
        return next((b for b in self.live() if b.key == key and b.state == "stored"), None)

    def locked_bytes(self, holder: int) -> int:
        return sum(block.place.length for block in self.live() if holder in block.locks)

    def reserved_bytes(self, holder: int) -> int:
        reserved = (b for b in self.live() if b.state == "reserved" and b.owner == holder)
        return sum(block.place.length for block in reserved)

    def longest_gap(self, obstacles: list[Block]) -> int:
        """Return the length of the longest range between these blocks."""
        starts = [0, *sorted(block.end for block in obstacles)]
        ends = [*sorted(block.place.offset for block in obstacles), self.SIZE]
        return max(end - start for start, end in zip(starts, ends, strict=True))

    def free(self, block: Block) -> None:
        """Mark a block as free. Its trailer has to be zero before anything can be reserved."""
        block.state = "free"
        block.locks.clear()
        assert self.read_trailer(block) == bytes(TRAILER_SIZE), "the trailer was not cleared"

    def read_trailer(self, block: Block) -> bytes:
        return trailers_of(self.memory, self.SIZE // PAGE)[block.place.offset // PAGE]

    def end_lock(self, block: Block, holder: int) -> None:
        del block.locks[holder]
        if not block.locks:
            if block.state == "deleted":
                self.free(block)
            else:
                self.used.append(block)

    @rule(
        holder=st.sampled_from(HOLDERS),
        key=st.sampled_from(KEYS),
        size=st.sampled_from([PAGE, 1, PAGE + 1, 3 * PAGE + 1, 4 * PAGE + 1]),
    )
    def reserve(self, holder: int, key: bytes, size: int) -> None:
        self.do_reserve(holder, key, size)

    @rule(
        holder=st.sampled_from(HOLDERS),
        first=st.integers(0, 3),
        count=st.sampled_from([1, 2, 8]),
        size=st.sampled_from([PAGE, PAGE, 2 * PAGE + 1, 3 * PAGE + 1]),
    )
    def put(self, holder: int, first: int, count: int, size: int) -> None:
        for key in self.KEYS[first : first + count]:
            block = self.do_reserve(holder, key, size)
            if block is not None:
                self.do_commit(block, holder)

    def do_reserve(self, holder: int, key: bytes, size: int) -> Block | None:
        length = -(-size // PAGE) * PAGE
        is_known = any(b.key == key and b.state != "deleted" for b in self.live())
        fits_limit = self.reserved_bytes(holder) + length <= self.SIZE // 2
        has_room = self.longest_gap(list(self.live())) >= length
        can_have_room = self.longest_gap([b for b in self.live() if b.is_pinned]) >= length
        oldest = self.used[0] if self.used else None
        place = self.arena.reserve(self.holders[holder], key, size, self.now)
        if self.suspended[holder] or is_known or not fits_limit:
            assert place is None
            return None  # the invariants notice an eviction
        evicted = [b for b in self.live() if b.state == "stored" and not self.arena.contains(b.key)]
        assert not any(block.is_pinned for block in evicted), "a locked block was evicted"
        if has_room:
            assert not evicted, "evicted although there was room"
        elif oldest is not None:
            assert oldest in evicted, "the least recently used block was not evicted"
        self.evictions += len(evicted)
        for block in evicted:
            self.used.remove(block)
            self.free(block)
        if not can_have_room:
            assert place is None
        if place is None:
            lengths = [block.place.length for block in evicted]
            assert sum(lengths) - max(lengths, default=0) < MAX_EVICTED * length
            assert not self.used or sum(lengths) >= MAX_EVICTED * length, "there was room"
            return None
        assert (place.size, place.length, place.offset % PAGE) == (size, length, 0)
        assert place.generation > self.last_generation
        self.last_generation = place.generation
        block = Block(key, place, holder, self.now + LOCK_SECONDS)
        assert 0 <= place.offset < block.end <= self.SIZE
        for other in self.live():
            assert block.end <= other.place.offset or other.end <= place.offset, "extents overlap"
        freed = [b for b in self.blocks if b.state == "free"]
        self.blocks = [*freed[-8:], *self.live(), block]
        self.memory[place.offset : place.offset + size] = block.data
        return block

    @precondition(lambda self: self.blocks)
    @rule(pick=st.integers(0, 7), holder=st.none() | st.sampled_from(HOLDERS))
    def commit(self, pick: int, holder: int | None) -> None:
        candidates = [b for b in self.live() if b.state == "reserved"] or self.blocks
        block = candidates[pick % len(candidates)]
        self.do_commit(block, block.owner if holder is None else holder)

    def do_commit(self, block: Block, holder: int) -> None:
        is_own = block.state == "reserved" and block.owner == holder
        place = self.arena.commit(self.holders[holder], block.place.generation)
        if is_own and not self.suspended[holder]:
            assert place == block.place
            block.state = "stored"
            self.used.append(block)
        else:
            assert place is None

    @rule(
        holder=st.sampled_from(HOLDERS),
        pick=st.integers(0, 7),
        count=st.sampled_from([1, 2, 4]),
        key=st.none() | st.sampled_from(KEYS),
        seconds=st.sampled_from([0.0, LOCK_SECONDS / 2]),
    )
    def locate(self, holder: int, pick: int, count: int, key: bytes | None, seconds: float) -> None:
        self.now += seconds
        stored = [block.key for block in self.live() if block.state == "stored"]
        for number in range(count):
            found = stored[(pick + number) % len(stored)] if stored else self.KEYS[0]
            self.do_locate(holder, found if key is None else key)

    def do_locate(self, holder: int, key: bytes) -> None:
        place = self.arena.locate(self.holders[holder], key, self.now)
        block = None if self.suspended[holder] else self.stored(key)
        limit = self.SIZE // 2 - self.locked_bytes(holder)
        if block is not None and holder not in block.locks and block.place.length > limit:
            block = None
        self.locates += 1
        if block is None:
            assert place is None
            return
        assert place == block.place
        if not block.locks:
            self.used.remove(block)
        count, *_ = block.locks.get(holder, (0,))
        block.locks[holder] = [count + 1, self.now + LOCK_SECONDS, self.locates]

    @precondition(lambda self: self.blocks)
    @rule(pick=st.integers(0, 7), holder=st.none() | st.sampled_from(HOLDERS))
    def unlock(self, pick: int, holder: int | None) -> None:
        candidates = [b for b in self.live() if b.locks] or self.blocks
        block = candidates[pick % len(candidates)]
        holder = next(iter(block.locks), 0) if holder is None else holder
        expected = holder in block.locks
        assert self.arena.unlock(self.holders[holder], block.place.generation) is expected
        if expected:
            block.locks[holder][0] -= 1
            if not block.locks[holder][0]:
                self.end_lock(block, holder)

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: bytes) -> None:
        block = self.stored(key)
        assert self.arena.delete(key) is (block is not None)
        if block is not None and block.locks:
            block.state = "deleted"
        elif block is not None:
            self.used.remove(block)
            self.free(block)

    @rule(seconds=st.sampled_from([1.0, LOCK_SECONDS / 2, LOCK_SECONDS]))
    def suspend_expired(self, seconds: float) -> None:
        self.now += seconds
        for number in self.HOLDERS:
            locks = [b.locks[number][1] for b in self.live() if number in b.locks]
            reserved = [b for b in self.live() if b.state == "reserved" and b.owner == number]
            deadlines = locks + [block.deadline for block in reserved]
            if any(deadline <= self.now for deadline in deadlines):
                self.suspended[number] = True
        self.arena.suspend_expired(self.now)
        assert [holder.is_suspended for holder in self.holders] == self.suspended

    @rule(holder=st.sampled_from(HOLDERS), is_closed=st.sampled_from([False, False, True]))
    def release(self, holder: int, is_closed: bool) -> None:
        if not (is_closed or self.suspended[holder]):
            return
        self.arena.release(self.holders[holder])
        for block in list(self.live()):
            if block.state == "reserved" and block.owner == holder:
                self.free(block)
        locked = [block for block in self.live() if holder in block.locks]
        for block in sorted(locked, key=lambda block: block.locks[holder][2]):
            self.end_lock(block, holder)
        assert self.holders[holder].is_suspended
        self.holders[holder] = self.arena.attach()
        self.suspended[holder] = False

    @invariant()
    def blocks_are_intact(self) -> None:
        for block in self.live():
            data = self.memory[block.place.offset :][: block.place.size]
            assert data == block.data, "data of a live block has changed"
            if block.state != "reserved":
                assert self.read_trailer(block) == block.trailer, "a trailer has changed"

    @invariant()
    def visible_keys_match(self) -> None:
        for key in self.KEYS:
            assert self.arena.contains(key) is (self.stored(key) is not None)

    @invariant()
    def statistics_match(self) -> None:
        live = list(self.live())
        visible = [block.place.size for block in live if block.state == "stored"]
        assert self.arena.stats() == {
            "size": self.SIZE,
            "evictions": self.evictions,
            "free_bytes": self.SIZE - sum(block.place.length for block in live),
            "reserved_bytes": sum(map(self.reserved_bytes, self.HOLDERS)),
            "locked_bytes": sum(block.place.length for block in live if block.locks),
            "stored_bytes": sum(visible),
            "blocks": len(visible),
            "holders": len(self.HOLDERS),
        }
        for number, holder in enumerate(self.holders):
            assert holder.locked_bytes == self.locked_bytes(number)
            assert holder.reserved_bytes == self.reserved_bytes(number)


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


# Changes of the source: the old and the new text, perhaps several times.
BUGS: dict[str, tuple[str, ...]] = {
    "a locked block is evicted and its extent reused": (
        "                del self._unlocked[place.offset]\n",
        "",
        "        if not block.holders:\n            del",
        "        if True:\n            del",
    ),
    "delete frees a locked block": (
        "        if not block.holders:\n            del self._unlocked[block.place.offset]\n",
        "        if True:\n            self._unlocked.pop(block.place.offset, None)\n",
    ),
    "suspend releases the locks before the shares have ended": (
        "        for holder in self._holders:\n",
        "        for holder in list(self._holders):\n",
        "                    holder.is_suspended = True\n",
        "                    self.release(holder)\n",
    ),
    "expired locks are dropped without a release": (
        "                    holder.is_suspended = True\n",
        "                    holder.is_suspended = True\n"
        "                    for number in list(holder._locks):\n"
        "                        self._end_lock(holder, number)\n",
    ),
    "holders with an expired lock are not suspended": (
        "(holder._locks, holder._reservations)",
        "(holder._reservations,)",
    ),
    "release keeps the locks": ("for generation in list(holder._locks)", "for generation in ()"),
    "release keeps the reservations": (
        "for generation in list(holder._reservations)",
        "for generation in ()",
    ),
    "the first unlock releases all locks": ("        if not lock.count:\n", "        if True:\n"),
    "a suspended holder can commit": (
        "generation not in holder._reservations or holder.is_suspended",
        "generation not in holder._reservations",
    ),
    "a suspended holder can lock": (
        "if block is None or holder.is_suspended:",
        "if block is None:",
    ),
    "a suspended holder can reserve": ("if holder.is_suspended or key in", "if key in"),
    "a reserved key can be reserved again": (" or key in self._reserved", ""),
    "generations repeat": ("self._next_generation += 1", "self._next_generation += 0"),
    "trailers are not cleared": (
        "        self._write_trailer(place.offset, bytes(TRAILER_SIZE))\n",
        "",
    ),
    "trailers are not written": (
        "self._write_trailer(place.offset, pack_trailer(block.key, place.size, generation))",
        "pass",
    ),
    "trailers of the last pages are shared": (
        "trailer_offset(len(self._memory), offset)",
        "trailer_offset(len(self._memory), min(offset, 6 * ALIGNMENT))",
    ),
    "a block can exceed its extent": ("length = -(-size //", "length = max(1, size //"),
    "a session can lock everything": ("holder.locked_bytes + place.length > self.size // 2", "0"),
    "a session can reserve everything": ("holder.reserved_bytes + length > self.size // 2", "0"),
    "a renewed lock keeps its place in the queue": (
        "        holder._locks.move_to_end(place.generation)\n",
        "",
    ),
    "free neighbours are not merged": ("        if end in self._free_ends:\n", "        if 0:\n"),
    "merging loses the second neighbour": (
        "            end = self._remove_free(end)\n",
        "            self._remove_free(end)\n",
    ),
    "the rest of a free extent is lost": ("if found > length", "if False"),
    "the most recently used block is evicted": (
        "next(iter(self._unlocked.values()))",
        "next(reversed(self._unlocked.values()))",
    ),
    "eviction begins with the first block of the memory": (
        "evicted, end = 0, -1",
        "evicted = end = 0",
    ),
    "eviction stops too early": ("evicted >= MAX_EVICTED * length", "evicted >= length"),
    "evictions are limited too much": ("max_evictions <= 0", "max_evictions < MAX_EVICTIONS - 2"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_state_machine_finds_planted_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(str(arena_module.__file__)).read_text()
    changes = BUGS[bug]
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert source.count(old) == 1, "the planted bug does not match the source"
        source = source.replace(old, new)
    broken = ModuleType("broken_arena")
    monkeypatch.setitem(sys.modules, broken.__name__, broken)
    exec(compile(source, bug, "exec"), broken.__dict__)

    class BrokenMachine(ArenaMachine):
        module = broken

    search = settings(
        max_examples=1000,
        stateful_step_count=50,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, IndexError)):
        run_state_machine_as_test(BrokenMachine, settings=search)
