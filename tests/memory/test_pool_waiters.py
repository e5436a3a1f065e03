"""Tests of tasks that wait for memory of a pool: their order, and failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiordma import Buffer, BufferStateError, MemoryPool, verbs
from aiordma._memory.block_source import OrderedBlockSource
from aiordma.errors import QuotaError
from aiordma.mr_pool import INTERNAL_SHARE, SLAB_SIZE, Block

pytestmark = pytest.mark.any_device

LIMIT = 2 * SLAB_SIZE


@pytest.fixture
def pool(pd: verbs.ProtectionDomain) -> Iterator[MemoryPool]:
    pool = MemoryPool(pd, limit=LIMIT)
    yield pool
    assert pool.statistics().waiting == 0
    pool.close()
    pd.close()


async def yield_loop() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Waiting:
    """Starts leases and records the sizes of those granted, in order."""

    def __init__(self, pool: MemoryPool) -> None:
        self.pool = pool
        self.order: list[int] = []
        self.tasks: list[asyncio.Task[Buffer]] = []

    async def start(self, *sizes: int) -> None:
        before = self.pool.statistics().waiting
        for size in sizes:
            self.tasks.append(asyncio.create_task(self._one(size)))
        await yield_loop()
        assert self.pool.statistics().waiting == before + len(sizes)

    async def _one(self, size: int) -> Buffer:
        buffer = await self.pool.lease(size)
        self.order.append(size)
        return buffer

    async def release_all(self) -> None:
        for task in self.tasks:
            (await task).release()


async def test_lease_raises_quota_error_when_larger_than_the_limit(pool: MemoryPool) -> None:
    with pool.alloc(1), pytest.raises(QuotaError, match="pool_limit") as caught:
        await pool.lease(LIMIT + 1)
    assert (caught.value.amount, caught.value.limit) == (2 * LIMIT, LIMIT)


BRIEF = 64 << 10


@asynccontextmanager
async def internal_requests(pool: MemoryPool, count: int) -> AsyncIterator[list[int]]:
    """Run `count` tasks that repeat internal requests. Yield the list of their grant counts."""
    served = [0] * count
    over = asyncio.Event()

    async def go_on(number: int) -> None:
        while not over.is_set():
            block = pool._block_if_first(BRIEF) or await pool._waiters.join(BRIEF, internal=True)
            served[number] += 1
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            block.release()

    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            tasks.create_task(go_on(number))
        yield served
        over.set()


async def test_lease_is_not_starved_by_internal_requests(pool: MemoryPool) -> None:
    """The internal requests are still served while the lease waits."""
    async with internal_requests(pool, LIMIT // BRIEF * 3 // 4) as served:
        await yield_loop()
        assert min(served)
        wanted = asyncio.create_task(pool.lease(SLAB_SIZE))
        before = list(served)
        for _ in range(200):
            await asyncio.sleep(0)
            if wanted.done():
                break
        else:
            pytest.fail("it waits for ever")
        (await wanted).release()
        for _ in range(200):
            await asyncio.sleep(0)
        assert all(now > then for now, then in zip(served, before, strict=True))
    assert pool.statistics().leases == 0


async def test_unused_slabs_are_freed_for_a_waiting_large_request(pool: MemoryPool) -> None:
    """Slabs kept for the next small request must not block a large one forever.

    The same is true of a released buffer after its last view is gone.
    """
    small = [pool.alloc(SLAB_SIZE // 2) for _ in range(4)]
    view = small[0].view
    waiting = Waiting(pool)
    await waiting.start(LIMIT)
    for buffer in small:
        buffer.release()
    await yield_loop()
    assert not waiting.order
    del view
    await waiting.release_all()


async def test_closing_the_pool_raises_buffer_state_error_in_waiters(
    context: verbs.Context,
) -> None:
    pd = context.alloc_pd()
    pool = MemoryPool(pd, limit=LIMIT)
    held = pool.alloc(LIMIT)
    waiting = Waiting(pool)
    await waiting.start(1, 2)
    pool.close()
    for task in waiting.tasks:
        with pytest.raises(BufferStateError, match="closed"):
            await task
    held.release()
    pd.close()


async def test_registration_failure_is_raised_only_in_the_first_waiter(
    pool: MemoryPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next waiter gets its own attempt."""
    held = pool.alloc(LIMIT)
    waiting = Waiting(pool)
    await waiting.start(1, 300)
    take = pool._block

    def refuse_once(size: int) -> Block:
        pool._waiters._take = take
        raise OSError("no memory")

    pool._waiters._take = refuse_once
    held.release()
    with pytest.raises(OSError, match="no memory"):
        await waiting.tasks.pop(0)
    await waiting.release_all()


# ---- one behind another -----------------------------------------------------------------------


async def test_block_source_requests_one_block_at_a_time(pool: MemoryPool) -> None:
    """A block that has become too small, or is no longer needed, goes back to the pool."""
    held = pool.alloc(LIMIT)
    wanted = [300, 5000]
    taken: list[Block] = []

    def take() -> None:
        while wanted:
            block = source.block(wanted[0])
            if block is None:
                return
            taken.append(block)
            wanted.pop(0)

    source = OrderedBlockSource(pool, take, internal=True)
    take()
    assert source.waiting
    assert source.block(1) is None
    assert pool.statistics().waiting == 1
    wanted[0] = 4000  # more than the source has requested
    held.release()
    await yield_loop()
    assert [block.size for block in taken] == [4096, 8192]
    for block in taken:
        block.release()
    assert pool.statistics().leases == 0

    held = pool.alloc(LIMIT)
    wanted.append(300)
    take()
    wanted.clear()
    held.release()
    await yield_loop()
    assert not source.waiting
    assert pool.statistics().leases == 0

    held = pool.alloc(LIMIT)
    wanted.append(300)
    take()
    source.close()
    assert pool.statistics().waiting == 0
    held.release()
    await yield_loop()
    assert wanted
    assert pool.statistics().leases == 0
    with pytest.raises(QuotaError, match="pool_limit"):
        source.block(LIMIT + 1)

    held = pool.alloc(LIMIT)
    assert source.block(300) is None  # requested after close(), so the block is returned
    held.release()
    await yield_loop()
    assert pool.statistics().leases == 0


async def test_block_source_requests_memory_again_after_moving_pools(pool: MemoryPool) -> None:
    other = MemoryPool(pool.pd, limit=LIMIT)
    taken: list[Block | None] = []
    source = OrderedBlockSource(pool, lambda: taken.append(source.block(300)), internal=True)
    held = pool.alloc(LIMIT)
    assert source.block(300) is None
    source.move(other)
    await yield_loop()
    assert pool.statistics().waiting == 0
    (block,) = taken
    assert block is not None
    assert other.statistics().leases == 1
    block.release()
    held.release()
    other.close()


# ---- in any order ------------------------------------------------------------------------------

SIZE = st.sampled_from([200, 5000, SLAB_SIZE // 2, SLAB_SIZE, LIMIT])
STEP = st.one_of(
    st.tuples(st.just("lease"), SIZE),
    st.tuples(st.just("internal"), SIZE),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("release"), st.integers(0, 9)),
    st.tuples(st.just("turn"), st.just(0)),
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEP, max_size=40))
async def test_random_waiters_and_cancellations_leak_no_memory(
    context: verbs.Context, steps: list[tuple[str, int]]
) -> None:
    """Run random sequences of requests, cancellations and releases."""
    pd = context.alloc_pd()
    pool = MemoryPool(pd, limit=LIMIT)
    waiting: list[asyncio.Task[Block]] = []
    held: list[Block] = []

    async def wait(size: int, *, internal: bool) -> Block:
        block = pool._block_if_first(size)
        if block is not None:
            return block
        turn = pool._waiters.join(size, internal=internal)
        try:
            return await turn
        except BaseException:
            pool._waiters.withdraw(turn)
            raise

    def collect() -> None:
        for task in [task for task in waiting if task.done()]:
            waiting.remove(task)
            if not task.cancelled():
                held.append(task.result())

    for step, number in steps:
        if step in ("lease", "internal"):
            waiting.append(asyncio.create_task(wait(number, internal=step == "internal")))
        elif step == "cancel" and waiting:
            waiting[number % len(waiting)].cancel()
        elif step == "release" and held:
            held.pop(number % len(held)).release()
        elif step == "turn":
            await asyncio.sleep(0)
        collect()
    await yield_loop()
    collect()
    assert pool.statistics().waiting == len(waiting)
    assert pool.statistics().leases == len(held)
    pool_waiters = pool._waiters
    share = pool_waiters._overtaking_bytes + next(iter(pool_waiters._internal.values()), (0,))[0]
    beyond = (
        pool_waiters._user and pool_waiters._overtaking_blocks and share > LIMIT // INTERNAL_SHARE
    )
    for needs in (pool_waiters._internal, pool_waiters._user)[bool(beyond) :]:
        if needs:
            with pytest.raises(QuotaError):
                pool._block(next(iter(needs.values()))[0])
            break
    while held or waiting:
        while held:
            held.pop().release()
        await yield_loop()
        collect()
    assert pool.statistics().leases == pool.statistics().waiting == 0
    pool.close()
    pd.close()
