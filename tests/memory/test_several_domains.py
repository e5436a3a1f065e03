"""Tests of memory in a second protection domain.

It is registered there when first needed, and for as long as it exists.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from aiordma import MemoryPool, Region, verbs
from aiordma._datapath.keys import ReadKeys
from aiordma._memory.registration_cache import RegistrationCache
from aiordma.errors import BufferStateError, VerbsError
from aiordma.mr_pool import SLAB_SIZE, LocalMemory, Registration
from aiordma.verbs._memory.memory_region import in_domain

SIZE = 1 << 20


@pytest.fixture
def other(context: verbs.Context) -> Iterator[verbs.ProtectionDomain]:
    with context.alloc_pd() as pd:
        yield pd


@pytest.fixture
def pools(
    pd: verbs.ProtectionDomain, other: verbs.ProtectionDomain, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[MemoryPool, MemoryPool]]:
    """A pool for each of two protection domains, on a device without a local DMA key."""
    monkeypatch.setattr("aiordma.mr_pool.reg_local_dma", lambda _: None)
    first, second = (MemoryPool(domain, limit=64 << 20) for domain in (pd, other))
    yield first, second
    for pool in (first, second):
        pool.close()


def registered(pd: verbs.ProtectionDomain) -> int:
    return len(pd.node.children)


def lkey(pool: MemoryPool, memory: LocalMemory) -> int:
    return ReadKeys(pool).local_key(memory.root.pinned)


def test_slab_is_registered_once_in_a_second_domain(pools: tuple[MemoryPool, MemoryPool]) -> None:
    home, other = pools
    with home.alloc(100) as one, home.alloc(100) as two:
        assert lkey(home, one) == one.lkey
        assert registered(other.pd) == 0
        assert lkey(other, one) == lkey(other, two) != one.lkey
        assert registered(other.pd) == 1
    assert registered(other.pd) == 1  # lives as long as the slab
    assert other.statistics().regions == 0  # belongs to the home pool


def test_second_registration_is_removed_when_the_memory_is_freed(
    pools: tuple[MemoryPool, MemoryPool],
) -> None:
    home, other = pools
    slab, large = home.alloc(100), home.alloc(2 * SLAB_SIZE)
    lkey(other, slab), lkey(other, large)
    assert registered(other.pd) == 2
    slab.release()
    large.release()
    home._drop_slabs(keep=0)
    assert registered(other.pd) == 1
    home._large.deregister_all()
    assert registered(other.pd) == 0


def test_closing_a_second_domain_leaves_the_first_registration(
    pools: tuple[MemoryPool, MemoryPool], context: verbs.Context
) -> None:
    home, _ = pools
    with home.alloc(100) as buffer:
        for _ in range(2):
            with context.alloc_pd() as pd:
                copy = in_domain(buffer._block.region, pd)
                assert in_domain(buffer._block.region, pd) is copy
            assert copy.closed
            assert len(buffer._block.region.elsewhere) == 1  # copies of closed domains are dropped
            assert not buffer._block.region.closed


def test_second_registration_is_removed_when_the_first_domain_closes(
    context: verbs.Context, other: verbs.ProtectionDomain
) -> None:
    with context.alloc_pd() as pd:
        region = pd.reg_mr(bytearray(SIZE))
        in_domain(region, other)
        assert registered(other) == 1
    assert registered(other) == 0
    with pytest.raises(BufferStateError, match="is closed"):
        in_domain(region, other)
    assert registered(other) == 0


async def test_second_registration_has_the_same_access_and_lifetime(
    pools: tuple[MemoryPool, MemoryPool],
) -> None:
    """This is true of a region of its own as well as of a cached registration."""
    home, other = pools
    data, view = bytearray(SIZE), np.zeros(SIZE, np.uint8).data
    with Region(home.pd.reg_mr(data)) as region, Region(home.pd.reg_mr(bytes(data))) as readonly:
        assert lkey(other, region) != lkey(other, readonly)
        rights = [in_domain(of._mr, other.pd).access for of in (region, readonly)]
        assert rights == [verbs.AccessFlags.LOCAL_WRITE, verbs.AccessFlags.NONE]
    assert registered(other.pd) == 0
    data.append(0)
    cache = RegistrationCache(home.pd, 4)
    for _ in range(2):
        found = cache.find(view)
        assert found is not None
        with found:
            assert lkey(other, found) != found.lkey
        assert registered(other.pd) == 1
    cache.clear()
    assert registered(other.pd) == 0


def test_local_key_is_zero_for_unmapped_memory_in_another_domain(
    pools: tuple[MemoryPool, MemoryPool],
) -> None:
    home, other = pools
    memory = Registration(home.pd.reg_mr(bytearray(SIZE)), mapped=False)
    assert ReadKeys(other).local_key(memory) == 0
    memory.release()


def test_failed_second_registration_is_retried(
    pools: tuple[MemoryPool, MemoryPool], device_name: str
) -> None:
    from aiordma import testing  # noqa: PLC0415 - for the embedded device alone

    home, other = pools
    with home.alloc(100) as buffer:
        if device_name.startswith("embedded"):
            with testing.faults(register="@1"), pytest.raises(VerbsError):
                lkey(other, buffer)
        assert lkey(other, buffer)
        assert registered(other.pd) == 1


def test_second_registration_is_closed_only_in_a_forked_child(
    pools: tuple[MemoryPool, MemoryPool],
) -> None:
    home, other = pools
    with home.alloc(100) as buffer:
        copy = in_domain(buffer._block.region, other.pd)
        child = os.fork()
        if not child:
            os._exit(0 if copy.closed and buffer._block.region.closed else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not copy.closed
