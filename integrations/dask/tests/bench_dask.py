"""rdma:// beside tcp://, in turn, on clusters of two processes: `python -m bench_dask [ROUNDS]`."""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, LocalCluster, wait

MIB = 1 << 20
SIZE = 128 * MIB


def fetch(array: np.ndarray) -> int:
    return array.nbytes


def transfer(client: Client) -> float:
    """Seconds for an array of 128 MiB from worker to worker, by what the receiver says."""
    first, second = sorted(client.scheduler_info(-1)["workers"])
    source = client.submit(np.ones, SIZE // 8, workers=[first], pure=False)
    wait(source)
    client.submit(fetch, source, workers=[second], pure=False).result()

    def last(dask_worker: Any) -> float:
        entry = dask_worker.transfer_incoming_log[-1]
        return float(entry["stop"] - entry["start"])

    return client.run(last, workers=[second])[second]


def round_trip(client: Client) -> float:
    """Seconds for a task that does nothing."""
    started = time.perf_counter()
    for i in range(50):
        client.submit(int, i, pure=False).result()
    return (time.perf_counter() - started) / 50


def shuffle(client: Client) -> float:
    """Seconds for a shuffle of 100 MB among 16 partitions."""

    def part(i: int) -> pd.DataFrame:
        key = np.random.default_rng(i).integers(0, 1 << 20, 400_000)
        return pd.DataFrame({"key": key, "value": key * 0.5})

    frame = dd.from_map(part, range(16)).persist()
    wait(frame)
    started = time.perf_counter()
    shuffled = frame.shuffle("key").persist()
    wait(shuffled)
    return time.perf_counter() - started


MEASURED = (transfer, round_trip, shuffle)


def main() -> None:
    rounds = int(sys.argv[1]) if sys.argv[1:] else 3
    os.environ["AIORDMA_DEVICE"] = "embedded0"
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for protocol in ("tcp://", "rdma://"):
            with (
                LocalCluster(
                    protocol=protocol,
                    n_workers=2,
                    threads_per_worker=1,
                    memory_limit="4GiB",
                    dashboard_address=":0",
                ) as cluster,
                Client(cluster) as client,
            ):
                for measure in MEASURED:
                    measure(client)  # connections, and pages of memory
                    taken = measure(client)
                    seconds.setdefault((measure.__name__, protocol), []).append(taken)
                    print(f"{protocol:8} {measure.__name__:10} {taken * 1e3:8.1f} ms", flush=True)
    for measure in MEASURED:
        tcp, rdma = (
            statistics.median(seconds[measure.__name__, scheme]) for scheme in ("tcp://", "rdma://")
        )
        print(
            f"{measure.__name__}: rdma {rdma * 1e3:.1f} ms, tcp {tcp * 1e3:.1f} ms, "
            f"{tcp / rdma:.2f} times as fast"
        )


if __name__ == "__main__":
    main()
