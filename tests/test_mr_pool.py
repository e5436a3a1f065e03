"""Tests of the pool of registered memory: leases, views, pins and returned blocks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from aiordma import Buffer, BufferStateError, MemoryPool, Region, verbs
from aiordma.errors import LocalRangeError, QuotaError
from aiordma.mr_pool import MAX_LARGE_CACHED_BYTES, MIN_BLOCK_SIZE, SLAB_SIZE, SPARE_SLABS
from aiordma.verbs._memory import memory_region, pages

LIMIT = 64 << 20


MakePool = Callable[[int], MemoryPool]


@pytest.fixture
def make_pool(pd: verbs.ProtectionDomain) -> Iterator[MakePool]:
    """Provide a factory of pools. They live until the protection domain is closed."""
    pools: list[MemoryPool] = []

    def make(limit: int) -> MemoryPool:
        pools.append(MemoryPool(pd, limit=limit))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
    pd.close()


@pytest.fixture
def pool(make_pool: MakePool) -> MemoryPool:
    return make_pool(LIMIT)


def leases(pool: MemoryPool) -> tuple[int, int]:
    statistics = pool.statistics()
    return statistics.leases, statistics.leased_bytes


# ---- leases --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 7, 255, 256, 257, 4096, 5000, SLAB_SIZE, SLAB_SIZE + 1])
def test_alloc_returns_memory_of_the_requested_size(pool: MemoryPool, size: int) -> None:
    with pool.alloc(size) as buffer:
        assert len(buffer) == size
        view = buffer.view
        assert (len(view), view.format, view.readonly) == (size, "B", False)
        view[:] = bytes([7]) * size
        assert bytes(buffer.view) == bytes([7]) * size
        assert buffer.lkey
        assert f"{size} bytes" in repr(buffer)
        taken = max(MIN_BLOCK_SIZE, 1 << max(0, size - 1).bit_length())
        assert leases(pool) == (1, taken)
        assert buffer.address % min(taken, 4096) == 0
        del view
    assert leases(pool) == (0, 0)


def test_released_block_cannot_be_exported_again(pool: MemoryPool) -> None:
    """The end of a second export would return the block to the pool a second time."""
    buffer = pool.alloc(64)
    view = buffer.view
    block = view.obj
    view.release()
    buffer.release()
    with pytest.raises(BufferError, match="returned to its pool"):
        memoryview(block)
    assert leases(pool) == (0, 0)


def test_buffers_share_registrations(pool: MemoryPool) -> None:
    assert pool.statistics() == (0, 0, 0, 0, LIMIT, 0, 0)
    buffers = [pool.alloc(4096) for _ in range(SLAB_SIZE // 4096)]
    assert pool.statistics().regions == 1
    assert pool.statistics().registered_bytes == SLAB_SIZE
    buffers.append(pool.alloc(1))
    assert pool.statistics().regions == 2
    for buffer in buffers:
        buffer.release()


def test_unused_slabs_are_deregistered(pool: MemoryPool) -> None:
    kept = pool.alloc(1 << 20)
    kept.view[:4] = b"kept"
    rush = [pool.alloc(8192) for _ in range(10 * SLAB_SIZE // 8192)]
    assert pool.statistics().regions == 11
    for buffer in rush[::2] + rush[1::2]:  # in an order that keeps every slab in use
        buffer.release()
    assert pool.statistics().regions <= SPARE_SLABS + 2  # the slab of `kept` and the spare ones
    assert pool.statistics().registered_bytes == pool.statistics().regions * SLAB_SIZE
    assert bytes(kept.view[:4]) == b"kept"
    again = [pool.alloc(8192) for _ in range(10 * SLAB_SIZE // 8192)]
    assert len({buffer.address for buffer in again}) == len(again)
    for buffer in [kept, *again]:
        buffer.release()


def test_using_a_released_buffer_raises_buffer_state_error(pool: MemoryPool) -> None:
    buffer = pool.alloc(300)
    part = buffer[10:20]
    buffer.release()
    uses: list[Callable[[], object]] = [
        lambda: buffer.view,
        lambda: buffer[0:10],
        buffer._pin,
        lambda: part.view,
        part._pin,
    ]
    for use in uses:
        with pytest.raises(BufferStateError, match="released"):
            use()
    assert "released" in repr(buffer)


@pytest.mark.parametrize("under_way", [False, True])
def test_garbage_collected_buffer_warns_that_it_was_not_released(
    pool: MemoryPool, under_way: bool
) -> None:
    buffer = pool.alloc(300)
    part = buffer[:]
    if under_way:
        buffer._pin()
    with pytest.warns(ResourceWarning, match="was not released"):
        del buffer, part
    assert leases(pool) == ((1, 512) if under_way else (0, 0))


# ---- views ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "derive",
    [
        lambda view: view[10:20],
        lambda view: view.toreadonly(),
        lambda view: view[:296].cast("d"),
        memoryview,
        lambda view: np.frombuffer(view, dtype=np.uint8),
        lambda view: np.frombuffer(view, dtype=np.uint8)[5:].reshape(5, -1)[:, ::2],
    ],
    ids=["slice", "read-only", "cast", "memoryview", "array", "part of an array"],
)
def test_derived_views_keep_the_block_leased(pool: MemoryPool, derive: object) -> None:
    buffer = pool.alloc(300)
    derived = derive(buffer.view)  # type: ignore[operator]
    buffer.release()
    assert leases(pool) == (1, 512)
    if isinstance(derived, memoryview):
        derived.release()
    del derived
    assert leases(pool) == (0, 0)


@pytest.mark.parametrize("block_is_older", [False, True])
@pytest.mark.parametrize("size", [300, SLAB_SIZE + 1])
def test_block_is_released_when_view_in_reference_cycle_is_collected(
    pool: MemoryPool, block_is_older: bool, size: int
) -> None:
    """The ages of the two objects determine which one the garbage collector releases first."""
    if block_is_older:
        pool.alloc(size).release()
        gc.collect()
    cycle: list[object] = []
    cycle.append(cycle)
    buffer = pool.alloc(size)
    cycle.append(buffer.view)
    buffer.release()
    assert leases(pool) != (0, 0)
    del buffer, cycle
    gc.collect()
    assert leases(pool) == (0, 0)
    block = pool._block(size)
    block.view[:3] = b"all"
    with block.export(0, 3) as view:
        assert bytes(view) == b"all"
    block.release()
    assert pool.statistics().regions == 1


def test_pool_in_reference_cycle_with_view_is_collected(pd: verbs.ProtectionDomain) -> None:
    pool = MemoryPool(pd, limit=LIMIT)
    buffer = pool.alloc(300)
    cycle: list[object] = [pool, buffer.view]
    cycle.append(cycle)
    buffer.release()
    gone = weakref.ref(pool)
    pool.close()
    pd.close()
    del pool, buffer, cycle
    gc.collect()
    gc.collect()  # collects the objects that a view resurrected
    assert gone() is None


# ---- limit ---------------------------------------------------------------------------------------


def test_alloc_raises_quota_error_beyond_the_limit(make_pool: MakePool) -> None:
    pool = make_pool(2 * SLAB_SIZE)
    buffers = [pool.alloc(SLAB_SIZE // 2) for _ in range(4)]
    with pytest.raises(QuotaError, match="limited") as caught:
        pool.alloc(1)
    assert caught.value.limit == 2 * SLAB_SIZE
    assert caught.value.amount == 3 * SLAB_SIZE
    buffers.pop().release()
    buffers.append(pool.alloc(1))
    for buffer in buffers:
        buffer.release()
    assert leases(pool) == (0, 0)


def test_large_blocks_count_towards_the_limit(make_pool: MakePool) -> None:
    pool = make_pool(8 * SLAB_SIZE)
    large = pool.alloc(4 * SLAB_SIZE)
    with pytest.raises(QuotaError):
        pool.alloc(5 * SLAB_SIZE)
    large.release()
    # The pool frees the memory of the released block to make room for this one.
    with pool.alloc(8 * SLAB_SIZE):
        assert pool.statistics().registered_bytes == 8 * SLAB_SIZE
        with pytest.raises(QuotaError):
            pool.alloc(1)


def test_large_blocks_are_reused(pool: MemoryPool) -> None:
    size = SLAB_SIZE + 1
    with pool.alloc(size) as buffer:
        address = buffer.address
        assert pool.statistics().registered_bytes == 2 * SLAB_SIZE
        buffer.view[-1] = 1
    with pool.alloc(size) as again:
        assert again.address == address
        with pool.alloc(size) as another:
            assert another.address != address
    assert leases(pool) == (0, 0)
    assert pool.statistics().regions == 2


def test_cached_large_blocks_are_limited_in_size(make_pool: MakePool) -> None:
    pool = make_pool(2 * MAX_LARGE_CACHED_BYTES)
    size = MAX_LARGE_CACHED_BYTES // 2
    for replaced in (False, True, False):  # with False, the kept blocks are reused
        buffers = [pool.alloc(size) for _ in range(4)]
        for buffer in buffers:
            buffer.release()
        assert pool.statistics().registered_bytes == MAX_LARGE_CACHED_BYTES
        if replaced:
            pool.alloc(4 * size).release()  # too large to keep
            assert pool.statistics().registered_bytes == 0


# ---- the end -------------------------------------------------------------------------------------


def test_closed_pool_rejects_allocation_and_keeps_views_valid(context: verbs.Context) -> None:
    """Buffers that are still leased can be released."""
    pd = context.alloc_pd()
    pool = MemoryPool(pd, limit=LIMIT)
    buffer, kept = pool.alloc(300), pool.alloc(300)
    view = kept.view
    view[:] = bytes([3]) * 300
    pool.close()
    pd.close()
    with pytest.raises(BufferStateError, match="closed"):
        pool.alloc(300)
    assert kept.view == bytes([3]) * 300
    for each in (buffer, kept):
        each.release()
    assert view == bytes([3]) * 300
    assert leases(pool)[0] == 1
    del view
    assert leases(pool) == (0, 0)


# ---- slices --------------------------------------------------------------------------------------


def test_buffer_slices_share_address_and_key(pool: MemoryPool) -> None:
    with pool.alloc(100) as buffer:
        buffer.view[:] = bytes(range(100))
        part = buffer[10:50]
        assert (len(part), part.address, part.lkey) == (40, buffer.address + 10, buffer.lkey)
        assert bytes(part.view) == bytes(range(10, 50))
        inner = part[5:-5]
        assert (len(inner), inner.address) == (30, buffer.address + 15)
        assert bytes(inner.view) == bytes(range(15, 45))
        assert repr(part)
        with pytest.raises(LocalRangeError):
            part[0:41]


# ---- regions -------------------------------------------------------------------------------------


def test_region_prevents_resizing_of_user_memory(pd: verbs.ProtectionDomain) -> None:
    memory = bytearray(b"0123456789")
    with Region(pd.reg_mr(memory)) as region:
        assert len(region) == 10
        assert bytes(region[2:4].view) == b"23"
        region.view[0] = ord("x")
        with pytest.raises(BufferError):
            memory.extend(b"more")
    assert memory == b"x123456789"
    memory.extend(b"more")
    uses: list[Callable[[], object]] = [lambda: region.view, lambda: region[0:1], region._pin]
    for use in uses:
        with pytest.raises(BufferStateError, match="closed"):
            use()
    region.close()
    assert "closed" in repr(region)


def test_region_closed_during_operation_keeps_memory_pinned(pd: verbs.ProtectionDomain) -> None:
    memory = bytearray(10)
    region = Region(pd.reg_mr(memory))
    region._pin()
    region[2:5]._pin()
    region.close()
    region._unpin()
    with pytest.raises(BufferError):
        memory.extend(b"x")
    region._unpin()
    memory.extend(b"x")


# ---- against a model -----------------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Leases, views and pins memory at random. A lease's bytes must not change while in use."""

    pd: verbs.ProtectionDomain
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pool = MemoryPool(self.pd, limit=6 * SLAB_SIZE)
        self.tenants: dict[int, Tenant] = {}
        self.number = 0

    @rule(target=leases, size=st.sampled_from([1, 255, 256, 300, 5000, 1 << 20, 3 << 20, 5 << 20]))
    def lease(self, size: int) -> int | None:
        self.number += 1
        try:
            buffer = self.pool.alloc(size)
        except QuotaError:
            assert self.pool.statistics().registered_bytes + max(size, SLAB_SIZE) > 2 * SLAB_SIZE
            return None
        self.tenants[self.number] = Tenant(buffer, self.number)
        return self.number

    def tenant(self, number: int | None) -> Tenant | None:
        return self.tenants.get(number) if number is not None else None

    @rule(number=leases)
    def look(self, number: int | None) -> None:
        tenant = self.tenant(number)
        if tenant is not None and not tenant.released:
            part = tenant.buffer[:] if len(tenant.views) % 2 else tenant.buffer
            tenant.views.append(part.view)

    @rule(number=leases)
    def stop_looking(self, number: int | None) -> None:
        tenant = self.tenant(number)
        if tenant is not None and tenant.views:
            tenant.views.pop()

    @rule(number=leases)
    def pin(self, number: int | None) -> None:
        tenant = self.tenant(number)
        if tenant is not None and not tenant.released:
            (tenant.buffer[:1] if tenant.pins % 2 else tenant.buffer)._pin()
            tenant.pins += 1

    @rule(number=leases)
    def unpin(self, number: int | None) -> None:
        tenant = self.tenant(number)
        if tenant is not None and tenant.pins:
            tenant.pins -= 1
            tenant.buffer._unpin()

    @rule(number=leases)
    def release(self, number: int | None) -> None:
        tenant = self.tenant(number)
        if tenant is not None:
            tenant.buffer.release()
            tenant.released = True

    @rule(number=consumes(leases))
    def end(self, number: int | None) -> None:
        self.release(number)
        tenant = self.tenant(number)
        if tenant is not None:
            tenant.views.clear()
            while tenant.pins:
                self.unpin(number)

    @precondition(lambda self: len(self.tenants) > 20)
    @rule()
    def end_all(self) -> None:
        for number in list(self.tenants):
            self.end(number)

    @invariant()
    def every_lease_has_its_own_bytes(self) -> None:
        self.tenants = {
            number: tenant
            for number, tenant in self.tenants.items()
            if not tenant.released or tenant.views or tenant.pins
        }
        for tenant in self.tenants.values():
            tenant.check()
        statistics = self.pool.statistics()
        assert statistics.leases == len(self.tenants)
        assert statistics.leased_bytes == sum(tenant.taken for tenant in self.tenants.values())
        assert statistics.leased_bytes <= statistics.registered_bytes <= statistics.limit

    def teardown(self) -> None:
        for number in list(self.tenants):
            self.end(number)
        self.tenants.clear()
        assert self.pool.statistics().leases == 0
        for region, _ in list(self.pool._slab_regions.values()):
            region.close()
        self.pool._large.deregister_all()
        self.pool.close()


class Tenant:
    """The model of a lease. It marks the first and last byte of the buffer."""

    def __init__(self, buffer: Buffer, number: int) -> None:
        self.buffer = buffer
        self.mark = bytes([number % 251 + 1])
        self.views: list[memoryview] = []
        self.pins = 0
        self.released = False
        self.taken = max(MIN_BLOCK_SIZE, 1 << (len(buffer) - 1).bit_length())
        buffer.view[:1] = self.mark
        buffer.view[-1:] = self.mark

    def check(self) -> None:
        views = self.views if self.released else [*self.views, self.buffer.view]
        assert all(view[:1] == self.mark and view[-1:] == self.mark for view in views)


def test_pool_matches_a_model_for_random_operations(pd: verbs.ProtectionDomain) -> None:
    class Machine(PoolMachine):
        pass

    Machine.pd = pd
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_pool_uses_huge_pages_when_configured(
    pd: verbs.ProtectionDomain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes slabs and large blocks. tests/verbs/test_pages.py tests the memory."""
    asked: list[bool] = []

    def allocate(length: int, huge_pages: bool) -> pages.Pages:
        asked.append(huge_pages)
        return pages.allocate(length, False)._replace(page_size=2 << 20 if huge_pages else 4096)

    monkeypatch.setattr(memory_region, "allocate", allocate)
    pools = [MemoryPool(pd, limit=LIMIT, huge_pages=huge) for huge in (False, True)]
    for huge, pool in zip((False, True), pools, strict=True):
        for size in (100, 2 * SLAB_SIZE):
            with pool.alloc(size):
                pass
        statistics = pool.statistics()
        assert statistics.registered_bytes == 3 * SLAB_SIZE
        assert statistics.huge_page_bytes == (3 * SLAB_SIZE if huge else 0)
        pool.close()
    assert asked == [False, False, True, True]
    pd.close()


@pytest.mark.parametrize("size", [64, SLAB_SIZE, MAX_LARGE_CACHED_BYTES // 4])
def test_released_buffers_do_not_keep_memory_after_pool_closes(
    make_pool: MakePool, size: int
) -> None:
    """The pool is closed, the buffers are still referenced, and garbage collection is off."""
    pool = make_pool(4 * MAX_LARGE_CACHED_BYTES)
    buffers = [pool.alloc(size) for _ in range(2)]
    memory = [weakref.ref(buffer._block.view.obj) for buffer in buffers]
    late = buffers.pop()
    for buffer in buffers:
        buffer.release()
    gc.disable()
    try:
        pool.close()
        pool.pd.close()
        view = late.view
        late.release()
        assert bytes(view[:1])
        del view
        assert [ref() for ref in memory] == [None, None]
    finally:
        gc.enable()
