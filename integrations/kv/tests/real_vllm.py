"""Runs with vLLM's own factory and manager of tiers. They need vLLM 0.32.0."""

from __future__ import annotations

import mmap
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm_engine import (
    DEADLINE,
    HIT,
    MISS,
    ROWS,
    Engine,
    base,
    blocked_engine,
    keys,
    offloading_spec,
)

from conftest import Process

with warnings.catch_warnings():
    # Some of the packages that vLLM imports use deprecated names.
    warnings.simplefilter("ignore")
    from vllm.v1.kv_offload.tiering import manager
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

StartProcess = Callable[..., Process]
SIZE = 1 << 20
MAX_STEPS = 10
ROUNDS = 9


def create_tier(
    offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **options: Any
) -> Any:
    """Let vLLM's factory create the tier from its configuration."""
    return SecondaryTierFactory.create_secondary_tier(
        {"type": tier_type, "module_path": "aiordma_kv.vllm", **options},
        primary_kv_view,
        offloading_spec,
    )


class ManagedEngine:
    """An engine with vLLM's manager, whose primary tier is in memory without a GPU."""

    def __init__(self, *servers: str) -> None:
        self.memory = mmap.mmap(-1, ROWS * SIZE)
        self.rows = np.frombuffer(self.memory, np.int8).reshape(ROWS, SIZE)
        region: Any = SimpleNamespace(
            create_kv_memoryview=lambda: self.rows.data, cleanup=lambda: None
        )
        primary = manager.CPUPrimaryTierOffloadingManager(ROWS, region)
        self.tier = create_tier(
            offloading_spec(), primary.get_kv_memoryview(), "Tier", servers=list(servers)
        )
        self.manager = manager.TieringOffloadingManager(primary, [self.tier])

    def start(self, request: str) -> base.ReqContext:
        context = base.ReqContext(request)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        """End a step, and wait until the tier has no work in flight."""
        self.manager.on_schedule_end(base.ScheduleEndContext((), ()))
        wait([*self.tier._lookups, *self.tier._jobs], DEADLINE)

    def finish(self, context: base.ReqContext) -> None:
        """Finish a request, and make steps while the manager has work."""
        self.manager.on_request_finished(context)
        for _ in range(MAX_STEPS):
            if not self.manager.has_pending_work():
                return
            self.step()
        raise AssertionError("the manager has pending work")

    def store(self, wanted: list[base.OffloadKey], values: list[int]) -> None:
        """Store blocks as a worker would, and wait until the tier has them too."""
        context = self.start("store")
        prepared = self.manager.prepare_store(wanted, context)
        assert prepared is not None
        assert prepared.keys_to_store == wanted
        for row, value in zip(prepared.store_spec.chunk_ids, values, strict=True):
            self.rows[row] = value
        self.manager.complete_store(wanted, context)
        self.finish(context)

    def lookup(
        self, wanted: list[base.OffloadKey], context: base.ReqContext
    ) -> list[base.LookupResult]:
        """Look up blocks in each step until they are in the primary tier or missing."""
        for _ in range(MAX_STEPS):
            results = [self.manager.lookup(key, context) for key in wanted]
            if all(result in (HIT, MISS) for result in results):
                return results
            self.step()
        raise AssertionError("the blocks are still pending")

    def load(self, wanted: list[base.OffloadKey], context: base.ReqContext) -> list[int]:
        """Return the values of blocks that are in the primary tier."""
        rows = self.manager.prepare_load(wanted, context).chunk_ids
        values = [set(self.rows[row].tolist()) for row in rows]
        self.manager.complete_load(wanted, context)
        return [value for [value] in values]

    def close(self) -> None:
        self.manager.shutdown()
        del self.rows
        self.memory.close()


@pytest.fixture
def server(start_process: StartProcess) -> Process:
    return start_process("--size", "64M")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start_managed_engine(stack: ExitStack, server: Process) -> ManagedEngine:
    engine = ManagedEngine(server.name)
    stack.callback(engine.close)
    return engine


def test_factory_creates_a_tier_that_loads_what_it_stored(
    stack: ExitStack, server: Process
) -> None:
    engine = Engine(server.name, tier=create_tier)
    stack.callback(engine.close)
    engine.fill(0, 7)
    assert engine.store(keys(1), [0])
    assert engine.load(keys(1, 2), [1, 2]) == (False, set(keys(1)))
    assert engine.row(1) == engine.row(0)


def test_manager_cascades_stores_and_promotes_blocks_of_another_engine(
    stack: ExitStack, server: Process
) -> None:
    one, two = (start_managed_engine(stack, server) for _ in range(2))
    one.store(keys(1, 2, 3), [11, 12, 13])
    context = two.start("load")
    assert two.lookup(keys(1, 2, 3, 4), context) == [HIT, HIT, HIT, MISS]
    assert two.load(keys(3, 1, 2), context) == [13, 11, 12]
    two.finish(context)


def test_manager_promotes_blocks_that_its_primary_tier_has_evicted(
    stack: ExitStack, server: Process
) -> None:
    engine = start_managed_engine(stack, server)
    engine.store(keys(1, 2), [11, 12])
    engine.store(keys(*range(3, 3 + ROWS)), list(range(ROWS)))
    for request in ("first", "second"):
        context = engine.start(request)
        assert engine.lookup(keys(1, 2), context) == [HIT, HIT]
        assert engine.load(keys(1, 2), context) == [11, 12]
        engine.finish(context)


def test_manager_recomputes_blocks_of_a_lost_server(stack: ExitStack, server: Process) -> None:
    engine = start_managed_engine(stack, server)
    engine.store(keys(1), [11])
    engine.store(keys(*range(3, 3 + ROWS)), list(range(ROWS)))
    server.end()
    context = engine.start("load")
    assert engine.lookup(keys(1), context) == [MISS]
    engine.finish(context)


def test_manager_resets_the_cache_while_jobs_are_in_flight(
    stack: ExitStack, server: Process
) -> None:
    engine = start_managed_engine(stack, server)
    engine.store(keys(1), [11])
    context = engine.start("load")
    engine.manager.reset_cache()
    assert engine.lookup(keys(1), context) == [HIT]
    engine.manager.reset_cache()
    assert engine.lookup(keys(1), context) == [HIT]
    assert engine.load(keys(1), context) == [11]
    engine.finish(context)


def test_blocks_of_an_engine_that_is_blocked_in_a_step_can_be_loaded(
    stack: ExitStack, server: Process
) -> None:
    engine = Engine(server.name, tier=create_tier, namespace="shared", size=SIZE)
    stack.callback(engine.close)
    wanted = keys(*range(ROWS))
    times = []
    with blocked_engine(server.name, "shared", SIZE):
        for request in map(str, range(ROUNDS)):
            start = time.perf_counter()
            assert engine.lookup(wanted, request) == [HIT] * ROWS
            assert engine.load(wanted, range(ROWS), request) == (True, set(wanted))
            times.append(time.perf_counter() - start)
    for number in range(ROWS):
        assert engine.row(number) == bytes([number + 1]) * SIZE
    print(
        f"lookup and load of {ROWS} blocks of {SIZE >> 10} KiB of an engine that is blocked: "
        f"median {1000 * statistics.median(times):.1f} ms, best {1000 * min(times):.1f} ms"
    )
