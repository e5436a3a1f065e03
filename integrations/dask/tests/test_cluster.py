"""Tests of whole clusters of processes on the embedded device."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import psutil
import pytest
from dask_aiordma import Security
from dask_aiordma.memory import FrameMemory
from distributed import Client, LocalCluster, Scheduler, wait

MIB = 1 << 20


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        # Do not let the cluster give up on a killed worker. The worker restarts slowly on a busy
        # machine.
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"}),
        LocalCluster(
            protocol="rdma://",
            n_workers=2,
            threads_per_worker=1,
            memory_limit="8GiB",
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def workers(client: Client) -> list[str]:
    return sorted(client.nthreads())


def test_scheduler_and_workers_use_rdma(client: Client) -> None:
    address = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.address)
    assert address.startswith("rdma://127.0.0.1:")
    assert len(workers(client)) == 2
    assert all(address.startswith("rdma://127.0.0.1:") for address in workers(client))
    pids = client.run(os.getpid)
    assert len({*pids.values(), os.getpid()}) == 3


def test_transposed_array_is_computed(client: Client) -> None:
    source = np.arange(1_000_000.0).reshape(1000, 1000)
    array = da.from_array(source, chunks=(125, 250))
    assert np.array_equal((array + array.T).compute(), source + source.T)


def test_data_frame_is_shuffled(client: Client) -> None:
    rows = pd.DataFrame({"key": np.arange(200_000) * 7919 % 1000, "value": np.arange(200_000)})
    rows["name"] = rows.key.astype(str)
    shuffled = dd.from_pandas(rows, npartitions=8).shuffle("key", npartitions=8)
    parts = client.compute(shuffled.to_delayed(), sync=True)
    keys = [set(part.key) for part in parts]
    assert sum(map(len, keys)) == 1000  # each key is in one partition
    together = pd.concat(parts).sort_values("value")
    assert together.value.tolist() == rows.value.tolist()
    assert together.name.tolist() == rows.name.tolist()


def forget_peak() -> int:
    """Reset the process's peak memory usage, and return its current usage in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss


def peak() -> int:
    """Return the process's peak memory usage in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


@pytest.mark.timeout(600)  # touching this much memory can take minutes on a busy machine
def test_scatter_and_gather_never_store_an_array_twice(client: Client) -> None:
    """A process that receives the array never holds two copies of it."""
    size, most = 1024 * MIB, 1024 * MIB + 128 * MIB
    first, second = workers(client)
    source = np.ones(size // 8)
    before = client.run(forget_peak)
    before_here = forget_peak()
    future = client.scatter(source, workers=[first], direct=True)
    wait(future)
    other = client.submit(lambda x: float(x.sum()), future, workers=[second])
    assert other.result() == len(source)
    assert peak() - before_here < 128 * MIB
    before_here = forget_peak()
    received = client.gather(future, direct=True)
    assert peak() - before_here < most
    grown = {worker: reached - before[worker] for worker, reached in client.run(peak).items()}
    assert max(grown.values()) < most
    assert received.nbytes == size
    assert (received == 1).all()


def kill_in_the_middle(pid: int, dask_worker: Any) -> None:
    """Make this worker kill process `pid` while receiving the fifth of eight long frames."""
    inside: Any = FrameMemory
    lend = inside.lend
    asked = 0

    def counted(self: FrameMemory, length: int, size: int | None = None) -> memoryview:
        nonlocal asked
        if length == 8 * MIB:
            asked += 1
            if asked == 5:
                inside.lend = lend
                dask_worker.killed = True
                os.kill(pid, signal.SIGKILL)
        return lend(self, length, size)

    inside.lend = counted


async def without(victim: str, dask_scheduler: Scheduler) -> None:
    """Wait until the scheduler has removed `victim` and has at least two other workers."""
    while victim in dask_scheduler.workers or len(dask_scheduler.workers) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.timeout(300)  # a busy machine may take a minute to start a process
def test_killed_worker_is_replaced(client: Client) -> None:
    """The worker dies while it is sending a message, and its data is recomputed."""
    victim, reader = workers(client)
    pid = client.run(os.getpid)[victim]
    parts = client.submit(
        lambda: [np.full(MIB, i) for i in range(8)],
        workers=[victim],
        allow_other_workers=True,
        pure=False,
    )
    wait(parts)
    client.run(kill_in_the_middle, pid, workers=[reader])
    total = client.submit(lambda all_of: sum(int(x.sum()) for x in all_of), parts, workers=[reader])
    assert total.result() == sum(range(8)) * MIB
    assert client.run(lambda dask_worker: dask_worker.killed, workers=[reader]) == {reader: True}
    client.run_on_scheduler(without, victim)
    pids = client.run(os.getpid)
    assert len(pids) == 2
    assert pid not in pids.values()


def test_cluster_with_a_key_refuses_clients_without_it() -> None:
    security = Security(auth=os.urandom(32), encrypt=True)
    with (
        LocalCluster(
            protocol="rdma://",
            security=security,
            n_workers=2,
            threads_per_worker=1,
            dashboard_address=":0",
        ) as cluster,
        Client(cluster, security=security) as client,
    ):
        source = np.arange(1 << 18)
        first, second = workers(client)
        future = client.submit(lambda: np.arange(1 << 18), workers=[first])
        moved = client.submit(lambda x: x + 0, future, workers=[second])
        assert np.array_equal(moved.result(), source)
        encrypts = client.run(lambda dask_worker: dask_worker.security.encrypt)
        assert list(encrypts.values()) == [True, True]
        with pytest.raises(OSError, match="security settings"):
            Client(cluster.scheduler_address, timeout=5)
