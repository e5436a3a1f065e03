"""Compare the LMCache adapter with LMCache's own adapter for Redis: `python bench_kv.py [ROUNDS]`.

Each round stores, looks up, loads and deletes objects with both adapters in turn, in this process.
The CPU time is that of this process, without the servers. The first round is not counted, because
the servers allocate memory in it.
"""

from __future__ import annotations

import json
import os
import select
import socket
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from conftest import HOST, Process

OURS, REDIS = "aiordma-kv", "Redis"
LOADS = [(16, 1 << 20), (64, 64 << 10)]
"""Numbers of objects, and their sizes in bytes."""
LIMIT = 60_000  # for each operation, in milliseconds


@contextmanager
def redis_server() -> Iterator[int]:
    """Run a Redis server that keeps its data in memory only, and yield its port."""
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    options = f"--port {port} --bind {HOST} --appendonly no --daemonize no --save".split()
    with subprocess.Popen(
        ["redis-server", *options, ""], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert any("Ready to accept" in line for line in process.stdout), "it has not started"
            yield port
        finally:
            process.terminate()


def memory_object(memory: torch.Tensor) -> TensorMemoryObj:
    metadata = MemoryObjMetadata(
        shape=memory.shape,
        dtype=memory.dtype,
        address=memory.data_ptr(),
        phy_size=memory.nbytes,
        fmt=MemoryFormat.KV_2LTD,
        ref_count=1,
    )
    return TensorMemoryObj(memory, metadata, parent_allocator=None)


def wait(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(LIMIT), "timed out"
    consume_fd(descriptor)


class Load:
    """Objects to store, and objects of the same sizes to load them into, in one memory."""

    def __init__(self, count: int, size: int) -> None:
        self.memory = torch.randint(0, 256, (2, count, size), dtype=torch.uint8)
        self.sources, self.targets = ([memory_object(it) for it in half] for half in self.memory)

    @property
    def description(self) -> L1MemoryDesc:
        return L1MemoryDesc(self.memory.data_ptr(), self.memory.nbytes, align_bytes=1)

    def once(self, adapter: Any, name: str) -> dict[str, float]:
        """Return the seconds that each operation takes with keys that contain `name`."""
        count = len(self.sources)
        keys = [ObjectKey(f"{name}-{it}".encode(), "model", 0) for it in range(count)]
        self.memory[1].zero_()
        used, times = time.process_time(), [time.perf_counter()]

        task = adapter.submit_store_task(keys, self.sources)
        wait(adapter.get_store_event_fd())
        assert adapter.pop_completed_store_tasks()[task].is_successful()
        times.append(time.perf_counter())

        task = adapter.submit_lookup_and_lock_task(keys, {})
        wait(adapter.get_lookup_and_lock_event_fd())
        assert adapter.query_lookup_and_lock_result(task).popcount() == count
        times.append(time.perf_counter())

        task = adapter.submit_load_task(keys, self.targets)
        wait(adapter.get_load_event_fd())
        assert adapter.query_load_result(task).popcount() == count
        times.append(time.perf_counter())

        used = time.process_time() - used
        assert torch.equal(*self.memory)
        adapter.submit_unlock(keys)
        adapter.delete(keys)
        store, lookup, load = (end - start for start, end in pairwise(times))
        return {"store": store, "lookup": lookup, "load": load, "CPU time": used}


def main() -> None:
    rounds = int(sys.argv[1]) if sys.argv[1:] else 25
    os.environ.setdefault("AIORDMA_DEVICE", "embedded0")
    torch.set_num_threads(1)
    with ExitStack() as stack:
        server = Process("--size", "256M")
        stack.callback(server.end)
        configurations = {
            OURS: {
                "type": "plugin",
                "module_path": "aiordma_kv.lmcache",
                "class_name": "L2Adapter",
                "adapter_params": {"servers": [server.name]},
            },
            REDIS: {"type": "resp", "host": HOST, "port": stack.enter_context(redis_server())},
        }
        given = Namespace(l2_adapter=[json.dumps(it) for it in configurations.values()])
        parsed = dict(
            zip(configurations, parse_args_to_l2_adapters_config(given).adapters, strict=True)
        )
        for count, size in LOADS:
            load = Load(count, size)
            adapters = {
                name: create_l2_adapter(it, l1_memory_desc=load.description)
                for name, it in parsed.items()
            }
            found = defaultdict[tuple[str, str], list[float]](list)
            for turn in range(1 + rounds):
                for name in sorted(adapters, reverse=turn % 2 == 0):
                    for operation, seconds in load.once(adapters[name], f"{size}-{turn}").items():
                        found[name, operation].append(seconds)
            for adapter in adapters.values():
                adapter.close()
            show(f"{count} x {size >> 10} KiB, median of {rounds} rounds", found)


def show(title: str, found: dict[tuple[str, str], list[float]]) -> None:
    print(f"{title:36}{OURS + ', ms':>16}{REDIS + ', ms':>12}{'ratio':>8}")
    for operation in dict.fromkeys(operation for _, operation in found):
        ours, theirs = (found[name, operation][1:] for name in (OURS, REDIS))
        ratio = statistics.median(their / our for our, their in zip(ours, theirs, strict=True))
        medians = [statistics.median(it) * 1e3 for it in (ours, theirs)]
        print(f"{operation:36}{medians[0]:16.2f}{medians[1]:12.2f}{ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()
