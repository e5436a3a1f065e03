"""Compare rdma:// with tcp:// on clusters of two processes: `python -m bench_dask [ROUNDS]`.

One cluster of each kind runs the whole time. After an uncounted warm-up round, each round measures
every cluster once. The result is the median of the ratios within a round, because absolute times
mean little on a machine that is doing other work. The CPU time of the processes is printed, too.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, LocalCluster, wait
from distributed.comm.addressing import parse_address
from distributed.comm.core import connect, listen
from distributed.protocol.serialize import to_serialize

import aiordma

MIB = 1 << 20
SIZE = 128 * MIB


def fetch(array: np.ndarray) -> int:
    return array.nbytes


def transfer(client: Client) -> float:
    """Send an array to another worker, and return the seconds logged by the receiver."""
    first, second = sorted(client.scheduler_info(-1)["workers"])
    source = client.submit(np.ones, SIZE // 8, workers=[first], pure=False)
    wait(source)
    client.submit(fetch, source, workers=[second], pure=False).result()

    def last(dask_worker: Any) -> float:
        entry = dask_worker.transfer_incoming_log[-1]
        return float(entry["stop"] - entry["start"])

    return client.run(last, workers=[second])[second]


def array(client: Client) -> float:
    """Send an array directly over a comm, without Dask tasks, and return the time in seconds."""
    first, second = sorted(client.scheduler_info(-1)["workers"])
    scheme, _ = parse_address(first)

    async def offers(dask_worker: Any) -> str:
        async def handler(comm: Any) -> None:
            source = np.ones(SIZE // 8)
            await comm.write("made")  # do not time the allocation of the array
            await comm.read()
            await comm.write({"x": to_serialize(source)})
            with suppress(OSError):
                await comm.read()  # wait until the peer closes

        dask_worker.offers = await listen(f"{scheme}://127.0.0.1:0", handler)
        return dask_worker.offers.contact_address

    async def take(address: str) -> float:
        comm = await connect(address)
        await comm.read()
        started = time.perf_counter()
        await comm.write("the array")
        await comm.read()
        taken = time.perf_counter() - started
        await comm.close()
        return taken

    address = client.run(offers, workers=[first])[first]
    taken = client.run(take, address, workers=[second])[second]
    client.run(lambda dask_worker: dask_worker.offers.stop(), workers=[first])
    return taken


def message(client: Client) -> float:
    """Return the median round-trip time of 300 short messages to a worker, in seconds."""
    first, second = sorted(client.scheduler_info(-1)["workers"])

    async def echoes(dask_worker: Any) -> float:
        taken = []
        for _ in range(300):
            started = time.perf_counter()
            await dask_worker.rpc(second).echo(data=b"x" * 100)
            taken.append(time.perf_counter() - started)
        return statistics.median(taken)

    return client.run(echoes, workers=[first])[first]


def shuffle(client: Client) -> float:
    """Return the time in seconds to shuffle a data frame of 100 MB in 16 partitions."""

    def part(i: int) -> pd.DataFrame:
        key = np.random.default_rng(i).integers(0, 1 << 20, 400_000)
        return pd.DataFrame({"key": key, "value": key * 0.5})

    frame = client.persist(dd.from_map(part, range(16)))
    wait(frame)
    started = time.perf_counter()
    wait(client.persist(frame.shuffle("key")))
    return time.perf_counter() - started


MEASURED = (transfer, array, message, shuffle)
# The protocol and the `distributed.comm.rdma.options` of each kind of cluster.
KINDS: dict[str, tuple[str, dict[str, float]]] = {
    "tcp": ("tcp://", {}),
    "rdma": ("rdma://", {}),
    "rdma, polling": ("rdma://", {"polling": aiordma.LoopConfig().polling}),
}


def start(stack: ExitStack, kind: str) -> Client:
    """Start a cluster of the given kind, and return a client connected to it."""
    protocol, options = KINDS[kind]
    with dask.config.set({"distributed.comm.rdma.options": options}):
        cluster = LocalCluster(
            protocol=protocol,
            n_workers=2,
            threads_per_worker=1,
            memory_limit="4GiB",
            dashboard_address=":0",
        )
        stack.enter_context(cluster)
        return stack.enter_context(Client(cluster, set_as_default=False))


def computed(client: Client) -> float:
    """Return the CPU time used so far by this process and the workers, in seconds."""
    return time.process_time() + sum(client.run(time.process_time).values())


def in_turn(
    clients: dict[str, Client], measure: Callable[[Client], float], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Return the time and CPU time of each round for each cluster, in seconds."""
    seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in clients}
    for number in range(rounds + 1):
        # Reverse the order every round, because recently freed pages are faster to allocate.
        for kind, client in list(clients.items())[:: 1 if number % 2 else -1]:
            before = computed(client)
            with client.as_current():
                taken = measure(client)
            if number:  # round 0 opens connections and allocates memory
                seconds[kind].append((taken, computed(client) - before))
    return seconds


def main() -> None:
    rounds = int(sys.argv[1]) if sys.argv[1:] else 9
    os.environ["AIORDMA_DEVICE"] = "embedded0"
    print(f"{'medians of ' + str(rounds):26}  time, ms  computing, ms  as fast as tcp  computing")
    with ExitStack() as stack:
        clients = {kind: start(stack, kind) for kind in KINDS}
        for measure in MEASURED:
            seconds = in_turn(clients, measure, rounds)
            for kind, taken in seconds.items():
                time_, used = (statistics.median(it) * 1e3 for it in zip(*taken, strict=True))
                pairs = list(zip(seconds["tcp"], taken, strict=True))
                faster = statistics.median(tcp[0] / ours[0] for tcp, ours in pairs)
                cheaper = statistics.median(ours[1] / tcp[1] for tcp, ours in pairs)
                print(
                    f"{measure.__name__:11} {kind:14}  {time_:8.1f}  {used:13.1f}  "
                    f"{faster:14.2f}  {cheaper:9.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
