"""Slab arithmetic: blocks never overlap, all space is found again, limits hold."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from aiordma._core.slabs import SlabAllocator
from aiordma.errors import BufferStateError, QuotaError


def allocated(allocator: SlabAllocator, size: int) -> tuple[int, int]:
    block = allocator.allocate(size)
    assert block is not None
    return block


@pytest.mark.parametrize("size", [0, -1, 4097])
def test_sizes_that_no_block_has(size: int) -> None:
    allocator = SlabAllocator(4096, smallest=64)
    allocator.add_slab()
    with pytest.raises(ValueError, match="a block has 1 to 4096 bytes"):
        allocator.allocate(size)


def test_the_last_freed_block_is_used_first() -> None:
    allocator = SlabAllocator(4096, smallest=64)
    allocator.add_slab()
    blocks = [allocated(allocator, 200) for _ in range(4)]
    allocator.free(*blocks[2])
    assert allocated(allocator, 256) == blocks[2]


def test_buddies_are_joined_when_a_request_needs_it() -> None:
    allocator = SlabAllocator(4096, smallest=64)
    allocator.add_slab()
    small = [allocated(allocator, 64) for _ in range(64)]
    for block in small:
        allocator.free(*block)
    assert allocator.statistics().joins == 0
    assert allocated(allocator, 4096) == (0, 0)
    assert allocator.statistics().joins == 1


def test_joining_is_not_tried_in_vain() -> None:
    allocator = SlabAllocator(4096, smallest=64)
    allocator.add_slab()
    blocks = [allocated(allocator, 64) for _ in range(64)]
    assert allocator.allocate(64) is None  # nothing was freed since
    allocator.free(*blocks[0])
    assert allocator.allocate(128) is None  # too little is free
    assert allocator.statistics().joins == 0
    allocator.free(*blocks[5])
    assert allocator.allocate(128) is None  # enough is free, but these are no buddies
    assert allocator.allocate(128) is None
    assert allocator.statistics().joins == 1


def test_freeing_what_is_not_allocated() -> None:
    """No offset reaches into the next slab."""
    allocator = SlabAllocator(4096, smallest=64)
    allocator.add_slab()
    block = allocated(allocator, 128)
    allocator.add_slab()
    assert allocated(allocator, 4096) == (1, 0)
    for slab, offset in [(0, 64), (2, 0), (0, 4096), (1, -4096 + 128), (0, -64)]:
        with pytest.raises(BufferStateError):
            allocator.free(slab, offset)
    allocator.free(*block)
    with pytest.raises(BufferStateError, match="offset 0 of slab 0"):
        allocator.free(*block)
    allocator.check()


def test_limit() -> None:
    allocator = SlabAllocator(4096, limit=3 * 4096 - 1)
    assert [allocator.add_slab(), allocator.add_slab()] == [0, 1]
    assert not allocator.can_add_slab
    with pytest.raises(QuotaError, match="limited to 12287 bytes") as caught:
        allocator.add_slab()
    assert (caught.value.amount, caught.value.limit) == (12288, 12287)


def test_trim_gives_up_whole_slabs_and_their_indexes_return() -> None:
    allocator = SlabAllocator(4096, smallest=64, limit=3 * 4096)
    for _ in range(3):
        allocator.add_slab()
    blocks = [allocated(allocator, 64) for _ in range(3 * 64)]
    kept = next(block for block in blocks if block[0] == 1)
    for block in blocks:
        if block != kept:
            allocator.free(*block)
    assert sorted(allocator.trim()) == [0, 2]
    assert allocator.trim() == []
    assert allocator.statistics().slabs == 1
    allocator.check()
    assert [allocator.add_slab(), allocator.add_slab()] == [0, 2]
    allocator.free(*kept)
    assert sorted(allocator.trim(keep=1)) == [1, 2]
    assert allocated(allocator, 4096) == (0, 0)
    assert allocator.trim(keep=1) == []


@pytest.mark.parametrize(
    ("slab_size", "smallest", "limit"),
    [(0, 64, None), (4095, 64, None), (4096, 48, None), (64, 128, None), (4096, 64, 4095)],
)
def test_sizes_out_of_bounds(slab_size: int, smallest: int, limit: int | None) -> None:
    with pytest.raises(ValueError, match=r"slab_size|smallest|limit"):
        SlabAllocator(slab_size, smallest=smallest, limit=limit)


class SlabMachine(RuleBasedStateMachine):
    """Random requests against a plain list of what is allocated where."""

    blocks = Bundle("blocks")
    SLAB, SMALLEST, SLABS = 1024, 64, 3

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlabAllocator(
            self.SLAB, smallest=self.SMALLEST, limit=self.SLAB * self.SLABS
        )
        self.model: dict[tuple[int, int], int] = {}
        self.slabs: set[int] = set()
        self.peak = 0

    @rule()
    def add_slab(self) -> None:
        if len(self.slabs) < self.SLABS:
            slab = self.allocator.add_slab()
            assert slab not in self.slabs
            assert slab < self.SLABS
            self.slabs.add(slab)
        else:
            assert not self.allocator.can_add_slab

    @rule(target=blocks, size=st.integers(1, SLAB))
    def allocate(self, size: int) -> object:
        block = self.allocator.allocate(size)
        taken = self.allocator.block_size(size)
        assert size <= taken < max(2 * size, self.SMALLEST + 1)
        if block is None:
            # A refusal is only right if no aligned place is wholly free.
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
        self.peak = max(self.peak, sum(self.model.values()))
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

    @invariant()
    def nothing_overlaps_and_nothing_is_lost(self) -> None:
        self.allocator.check()
        now = self.allocator.statistics()
        assert now.used_bytes == sum(self.model.values())
        assert now.free_bytes == len(self.slabs) * self.SLAB - now.used_bytes
        assert now.peak_bytes == self.peak
        assert sum(size * count for size, count in now.used_blocks.items()) == now.used_bytes


SlabMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50)
TestSlabMachine = SlabMachine.TestCase
