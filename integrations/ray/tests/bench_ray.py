"""Compare Ray's transports for CPU tensors between two actors: `python bench_ray.py`.

Each round measures every transport once. The time starts with the call to the actor that has the
tensor, and ends with the response from the actor that has received it and touched all its pages.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import ray
import ray_aiordma
import torch
from ray.experimental.collective import create_collective_group

ray_aiordma.register()

OBJECT_STORE = "object store"


class Ends:
    """An actor that can send or receive a tensor."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.arange(size // 4, dtype=torch.int32)

    def give(self) -> torch.Tensor:
        return self.tensor

    def take(self, tensor: torch.Tensor) -> int:
        return int(tensor[::1024].sum())


remote: Any = ray.remote  # its type hints do not cover tensor transports
Actor: Any = remote(enable_tensor_transport=True)(Ends)


def pair(transport: str, size: int) -> tuple[Any, Any]:
    ends = Actor.remote(size), Actor.remote(4)
    if transport == "gloo":
        create_collective_group(list(ends), backend="torch_gloo")
    return ends


def once(transport: str, source: Any, sink: Any) -> float:
    options = {} if transport == OBJECT_STORE else {"tensor_transport": transport}
    start = time.perf_counter()
    total = ray.get(sink.take.remote(source.give.options(**options).remote()))
    taken = time.perf_counter() - start
    assert total > 0
    return taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=float, default=128)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--transports", default=f"{OBJECT_STORE},gloo,nixl,aiordma")
    arguments = parser.parse_args()
    os.environ.setdefault("AIORDMA_DEVICE", "embedded0")
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's name
    size = int(arguments.mib * (1 << 20))
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=2 << 30, log_to_driver=False)
    pairs = {name: pair(name, size) for name in arguments.transports.split(",")}
    seconds: dict[str, list[float]] = {name: [] for name in pairs}
    for _ in range(2 + arguments.rounds):
        for name, ends in pairs.items():
            seconds[name].append(once(name, *ends))
    ours = seconds["aiordma"][2:]
    print(f"{arguments.mib:g} MiB, {arguments.rounds} rounds: milliseconds")
    for name, all_found in seconds.items():
        found = all_found[2:]  # the first two rounds connect and allocate memory
        ratio = statistics.median(theirs / mine for theirs, mine in zip(found, ours, strict=True))
        print(
            f"{name:14} least {min(found) * 1e3:8.1f}, "
            f"median {statistics.median(found) * 1e3:8.1f}, aiordma is {ratio:.2f} times as fast"
        )
    ray.shutdown()


if __name__ == "__main__":
    main()
