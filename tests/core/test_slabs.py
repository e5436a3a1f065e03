"""Tests of slab arithmetic: blocks never overlap, and all free space is reused."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, multiple, rule

from aiordma._core.slabs import SlabAllocator
from aiordma.errors import BufferStateError


def allocated(allocator: SlabAllocator, size: int) -> tuple[int, int]:
    block = allocator.allocate(size)
    assert block is not None
    return block


def test_most_recently_freed_block_is_reused_first() -> None:
    allocator = SlabAllocator(4096, 64)
    allocator.add_slab()
    blocks = [allocated(allocator, 200) for _ in range(4)]
    allocator.free(*blocks[2])
    assert allocated(allocator, 256) == blocks[2]


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[SlabAllocator]:
    """A list with an entry for each time an allocator joined buddies."""
    join, found = SlabAllocator._join_buddies, list[SlabAllocator]()

    def counted(self: SlabAllocator) -> None:
        found.append(self)
        join(self)

    monkeypatch.setattr(SlabAllocator, "_join_buddies", counted)
    return found


def test_buddies_are_merged_only_when_a_request_needs_space(joins: list[SlabAllocator]) -> None:
    allocator = SlabAllocator(4096, 64)
    allocator.add_slab()
    small = [allocated(allocator, 64) for _ in range(64)]
    for block in small:
        allocator.free(*block)
    assert len(joins) == 0
    assert allocated(allocator, 4096) == (0, 0)
    assert len(joins) == 1


def test_failed_merge_is_not_repeated_until_more_blocks_are_freed(
    joins: list[SlabAllocator],
) -> None:
    allocator = SlabAllocator(4096, 64)
    allocator.add_slab()
    blocks = [allocated(allocator, 64) for _ in range(64)]
    assert allocator.allocate(64) is None  # nothing has been freed
    allocator.free(*blocks[0])
    assert allocator.allocate(128) is None  # not enough free space
    assert len(joins) == 0
    allocator.free(*blocks[5])
    assert allocator.allocate(128) is None  # enough free space, but not in buddies
    assert allocator.allocate(128) is None
    assert len(joins) == 1


def test_free_rejects_unallocated_blocks() -> None:
    """This includes offsets that reach into a neighbouring slab."""
    allocator = SlabAllocator(4096, 64)
    allocator.add_slab()
    block = allocated(allocator, 128)
    allocator.add_slab()
    assert allocated(allocator, 4096) == (1, 0)
    for slab, offset in [(0, 64), (2, 0), (0, 4096), (1, -4096 + 128), (0, -64)]:
        with pytest.raises(BufferStateError):
            allocator.free(slab, offset)
    allocator.free(*block)
    with pytest.raises(BufferStateError, match="offset 0 in slab 0"):
        allocator.free(*block)


def test_trim_releases_whole_slabs_and_reuses_their_indexes() -> None:
    allocator = SlabAllocator(4096, 64)
    for _ in range(3):
        allocator.add_slab()
    blocks = [allocated(allocator, 64) for _ in range(3 * 64)]
    kept = next(block for block in blocks if block[0] == 1)
    for block in blocks:
        if block != kept:
            allocator.free(*block)
    assert sorted(allocator.trim()) == [0, 2]
    assert allocator.trim() == []
    assert [allocator.add_slab(), allocator.add_slab()] == [0, 2]
    allocator.free(*kept)
    assert sorted(allocator.trim(keep=1)) == [1, 2]
    assert allocated(allocator, 4096) == (0, 0)
    assert allocator.trim(keep=1) == []


class SlabMachine(RuleBasedStateMachine):
    """Compares an allocator with a model under random requests."""

    blocks = Bundle("blocks")
    SLAB, SMALLEST, SLABS = 1024, 64, 3

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlabAllocator(self.SLAB, self.SMALLEST)
        self.model: dict[tuple[int, int], int] = {}
        self.slabs: set[int] = set()

    @rule()
    def add_slab(self) -> None:
        if len(self.slabs) < self.SLABS:
            slab = self.allocator.add_slab()
            assert slab not in self.slabs
            assert slab < self.SLABS
            self.slabs.add(slab)

    @rule(target=blocks, size=st.integers(1, SLAB))
    def allocate(self, size: int) -> object:
        block = self.allocator.allocate(size)
        taken = max(self.SMALLEST, 1 << (size - 1).bit_length())
        if block is None:
            # A request may fail only if no aligned block is entirely free.
            assert not any(
                self.is_free(slab, offset, taken)
                for slab in self.slabs
                for offset in range(0, self.SLAB, taken)
            )
            return multiple()
        slab, offset = block
        assert slab in self.slabs
        assert offset % taken == 0
        assert self.is_free(slab, offset, taken)
        self.model[block] = taken
        return block

    def is_free(self, slab: int, offset: int, size: int) -> bool:
        return not any(
            slab == other and offset < other_offset + other_size and other_offset < offset + size
            for (other, other_offset), other_size in self.model.items()
        )

    @rule(block=consumes(blocks))
    def free(self, block: tuple[int, int]) -> None:
        self.allocator.free(*block)
        del self.model[block]
        with pytest.raises(BufferStateError):
            self.allocator.free(*block)

    @rule(keep=st.integers(0, 2))
    def trim(self, keep: int) -> None:
        whole = self.slabs - {slab for slab, _ in self.model}
        gone = self.allocator.trim(keep)
        assert len(gone) == max(0, len(whole) - keep)
        assert set(gone) <= whole
        self.slabs -= set(gone)


SlabMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50)
TestSlabMachine = SlabMachine.TestCase
