"""Whole clusters of processes on the embedded device."""

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
from dask_aiordma import Security, backend
from distributed import Client, LocalCluster, Scheduler, wait

MIB = 1 << 20


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        # Until then a worker that died is started again, however busy the machine is.
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
    return sorted(client.scheduler_info(-1)["workers"])


def test_all_of_it_speaks_rdma(client: Client) -> None:
    address = client.scheduler_info(0)["address"]
    assert address.startswith("rdma://127.0.0.1:")
    assert len(workers(client)) == 2
    assert all(address.startswith("rdma://127.0.0.1:") for address in workers(client))
    pids = client.run(os.getpid)
    assert len({*pids.values(), os.getpid()}) == 3


def test_an_array_is_transposed(client: Client) -> None:
    source = np.arange(1_000_000.0).reshape(1000, 1000)
    array = da.from_array(source, chunks=(125, 250))
    assert np.array_equal((array + array.T).compute(), source + source.T)


def test_a_data_frame_is_shuffled(client: Client) -> None:
    rows = pd.DataFrame({"key": np.arange(200_000) * 7919 % 1000, "value": np.arange(200_000)})
    rows["name"] = rows.key.astype(str)
    shuffled = dd.from_pandas(rows, npartitions=8).shuffle("key", npartitions=8)
    parts = client.compute(shuffled.to_delayed(), sync=True)
    keys = [set(part.key) for part in parts]
    assert sum(map(len, keys)) == 1000  # each key is in one partition
    together = pd.concat(parts).sort_values("value")
    assert together.value.tolist() == rows.value.tolist()
    assert together.name.tolist() == rows.name.tolist()


def memory() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.timeout(600)  # a busy machine may take minutes to touch so much memory
def test_a_gibibyte_is_scattered_and_gathered(client: Client) -> None:
    target = workers(client)[0]
    before = client.run(memory)
    source = np.ones((1 << 30) // 8)
    future = client.scatter(source, workers=[target], direct=True)
    wait(future)
    grown = client.run(memory)[target] - before[target]
    assert grown < 1024 * MIB + 128 * MIB  # one copy and little else
    other = client.submit(lambda x: float(x.sum()), future, workers=[workers(client)[1]])
    assert other.result() == len(source)
    before_here = memory()
    received = client.gather(future, direct=True)
    assert memory() - before_here < 1024 * MIB + 128 * MIB
    assert received.nbytes == 1 << 30
    assert (received == 1).all()
    del future, other, received


def kill_in_the_middle(pid: int, dask_worker: Any) -> None:
    """Kills a process when memory for the fifth of eight long frames is asked for."""
    inside: Any = backend
    allocate = inside.host_array
    asked = 0

    def counted(length: int) -> memoryview:
        nonlocal asked
        if length == 8 * MIB:
            asked += 1
            if asked == 5:
                inside.host_array = allocate  # what waits for a message already has this one
                dask_worker.killed = True
                os.kill(pid, signal.SIGKILL)
        return allocate(length)

    inside.host_array = counted


async def without(victim: str, dask_scheduler: Scheduler) -> None:
    """Waits until a worker is gone, and there are two."""
    while victim in dask_scheduler.workers or len(dask_scheduler.workers) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.timeout(300)  # a busy machine may take a minute to start a process
def test_a_killed_worker_is_replaced(client: Client) -> None:
    """It dies in the middle of a message; what it had is made again."""
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


def test_a_cluster_with_a_key(tmp_path: Path) -> None:
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
