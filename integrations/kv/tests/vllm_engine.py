"""An engine with the tier, for tests. A stand-in replaces vLLM if it is not installed."""

from __future__ import annotations

import dataclasses
import mmap
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STAND_INS = Path(__file__).parent / "stand_ins"
sys.path.append(str(STAND_INS))  # at the end, so that an installed vLLM is preferred

with warnings.catch_warnings():
    # Some of the packages that vLLM imports use deprecated names.
    warnings.simplefilter("ignore")
    from aiordma_kv.vllm import Tier
    from vllm.v1.kv_offload import base, config
    from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
    from vllm.v1.kv_offload.tiering import base as tiering
    from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

# Tests import these modules from here, after the path has been extended.
__all__ = ["base", "config", "tiering"]

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
SIZE = 4064  # of a block, which occupies one page of a server with its trailer
ROWS = 16
DEADLINE = 30.0


def key(number: int) -> OffloadKey:
    return base.make_offload_key(number.to_bytes(32, "big"), 0)


def keys(*numbers: int) -> list[OffloadKey]:
    return [key(number) for number in numbers]


def offloading_spec(**changes: Any) -> Any:
    """Return what the tier reads of vLLM's specification, for an engine of 2 processes."""
    parallel = config.OffloadingParallelConfig(
        rank=0,
        world_size=2,
        tp_size=2,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    )
    options: dict[str, Any] = {
        "groups": (config.OffloadingGroupConfig(16, ("layer 0",), 0),),
        "worker_kv_bytes_per_block": SIZE // 2,
        "enable_kv_cache_events": False,
        "extra_config": {},
        "engine_id": "engine",
        "model": config.OffloadingModelConfig("model", "float16"),
        "cache": config.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        "parallel": parallel,
    }
    parallel = dataclasses.replace(parallel, **changes.pop("parallel", {}))
    options |= {"parallel": parallel, **changes}
    return SimpleNamespace(config=config.OffloadingConfig(**options))


class Engine:
    """An engine with a tier: its scheduler, and its primary tier of ROWS blocks."""

    def __init__(
        self, *servers: str, spec: Any = None, size: int = SIZE, tier: Any = Tier, **options: Any
    ) -> None:
        self.size = size
        self.memory = mmap.mmap(-1, ROWS * size)
        self.view = memoryview(self.memory).cast("b", (ROWS, size))
        self.tier: Tier = tier(
            offloading_spec=spec or offloading_spec(),
            primary_kv_view=self.view,
            tier_type="Tier",
            servers=list(servers),
            **options,
        )
        self.jobs = 0

    def step(self) -> None:
        self.tier.on_schedule_end(base.ScheduleEndContext((), ()))

    def row(self, number: int) -> bytes:
        return self.memory[number * self.size : (number + 1) * self.size]

    def fill(self, number: int, value: int) -> None:
        self.memory[number * self.size : (number + 1) * self.size] = bytes([value]) * self.size

    def ask(self, wanted: Iterable[OffloadKey], request: str = "r") -> list[LookupResult]:
        return [self.tier.lookup(each, ReqContext(request)) for each in wanted]

    def lookup(self, wanted: list[OffloadKey], request: str = "r") -> list[LookupResult]:
        """Look up keys, in two steps if the tier has to ask the servers."""
        results = self.ask(wanted, request)
        if RETRY in results:
            self.step()
            wait(self.tier._lookups, DEADLINE)
            results = self.ask(wanted, request)
        return results

    def job(
        self, wanted: list[OffloadKey], rows: Iterable[int], request: str, *, is_promotion: bool
    ) -> TransferJob:
        self.jobs += 1
        return TransferJob(self.jobs, wanted, list(rows), is_promotion, ReqContext(request))

    def start_store(self, wanted: list[OffloadKey], rows: Iterable[int], request: str = "r") -> int:
        self.tier.submit_store(self.job(wanted, rows, request, is_promotion=False))
        return self.jobs

    def start_load(self, wanted: list[OffloadKey], rows: Iterable[int], request: str = "r") -> int:
        self.tier.submit_load(self.job(wanted, rows, request, is_promotion=True))
        return self.jobs

    def drain(self) -> list[JobResult]:
        self.tier.drain_jobs()
        return list(self.tier.get_finished_jobs())

    def store(self, wanted: list[OffloadKey], rows: Iterable[int]) -> bool:
        self.start_store(wanted, rows)
        [result] = self.drain()
        return result.success

    def load(
        self, wanted: list[OffloadKey], rows: Iterable[int], request: str = "r"
    ) -> tuple[bool, set[OffloadKey]]:
        """Look up and load keys. Returns whether all were loaded, and which."""
        self.lookup(wanted, request)
        self.start_load(wanted, rows, request)
        self.step()
        [result] = self.drain()
        return result.success, set(result.successful_keys or ())

    def finish(self, request: str = "r") -> None:
        self.tier.on_request_finished(ReqContext(request))
        self.step()

    def close(self) -> None:
        self.tier.shutdown()
        self.view.release()
        self.memory.close()


def store_and_block(server: str, namespace: str, size: str) -> None:
    """Store ROWS blocks, and then block within a step until standard input ends."""
    engine = Engine(server, namespace=namespace, size=int(size))
    for number in range(ROWS):
        engine.fill(number, number + 1)
    print(engine.store(keys(*range(ROWS)), range(ROWS)), flush=True)
    engine.ask(keys(ROWS))
    sys.stdin.read()
    engine.step()
    engine.close()
    print("unblocked", flush=True)


@contextmanager
def blocked_engine(server: str, namespace: str, size: int = SIZE) -> Iterator[None]:
    """Run `store_and_block` in another process until the context ends."""
    with subprocess.Popen(
        [sys.executable, __file__, server, namespace, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        yield
        output, _ = process.communicate()
        assert (output, process.returncode) == ("unblocked\n", 0)


if __name__ == "__main__":
    store_and_block(*sys.argv[1:])
