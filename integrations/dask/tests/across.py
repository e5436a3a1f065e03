"""A Dask worker, and a client that gives it work: across.py SCHEDULER HOST.

The array is long enough to be transferred by RDMA reads of its memory. It goes to the worker
directly, and comes back through the scheduler.
"""

import asyncio
import sys

import numpy
from distributed import Client, Worker


def reversed_bytes(array: numpy.ndarray) -> numpy.ndarray:
    return array[::-1].copy()


async def main(scheduler: str, host: str) -> None:
    async with (
        Worker(scheduler, host=host, nthreads=1, dashboard=False),
        Client(scheduler, asynchronous=True, direct_to_workers=False) as client,
    ):
        sent = numpy.random.default_rng(5).integers(0, 256, 4 << 20, dtype=numpy.uint8)
        (there,) = await client.scatter([sent], direct=True)
        back = await client.gather(client.submit(reversed_bytes, there), direct=False)
        assert numpy.array_equal(back, sent[::-1])
        assert await client.gather(client.map(abs, range(-9, 0))) == list(range(9, 0, -1))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
