"""Train a model in four workers with atomic operations on a parameter server's memory.

    python examples/parameter_server.py [HOST]              server and four workers
    python examples/parameter_server.py HOST PORT SEED      one more worker

The workers fit a line, y = w x + b, to points with w = 2 and b = 1. In each step, a worker fetches
both parameters with one read, computes the gradient for its own points, and adds the change to the
parameters atomically, so that no other worker's step is lost. The server's program is not involved.
The parameters are fixed-point numbers, because atomic operations add integers. HOST is an address
of the RDMA device (default: 127.0.0.1).
"""

import asyncio
import random
import sys
from array import array

import aiordma

WORKERS = 4
STEPS = 400
RATE = 0.05
ONE = 1 << 32  # the fixed-point number 1

parameters = array("q", [0, 0])  # w and b


async def serve(conn: aiordma.Connection) -> None:
    with conn.register(parameters) as region:
        rights = aiordma.Rights.READ | aiordma.Rights.ATOMIC
        await conn.send_region(region, access=rights, lease=None)
        await conn.wait_closed()


async def work(host: str, port: int, seed: int) -> None:
    points = random.Random(seed)
    async with await aiordma.connect(host, port) as conn:
        remote = await conn.recv_region()
        seen = array("q", [0, 0])
        for _ in range(STEPS):
            await conn.read(remote, seen)
            w, b = (value / ONE for value in seen)
            x = points.uniform(-2, 2)
            error = w * x + b - (2 * x + 1)
            async with conn.batch() as batch:
                for index, gradient in enumerate((error * x, error)):
                    step = round(-RATE * gradient * ONE)
                    batch.fetch_and_add(remote[8 * index : 8 * index + 8], step % (1 << 64))


async def main(host: str = "127.0.0.1") -> None:
    async with await aiordma.start_server(serve, host) as server:
        command = sys.executable, __file__, host, str(server.port)
        workers = [
            await asyncio.create_subprocess_exec(*command, str(seed)) for seed in range(WORKERS)
        ]
        for worker in workers:
            await worker.wait()
    w, b = (value / ONE for value in parameters)
    print(f"after {WORKERS * STEPS} steps of {WORKERS} workers: w = {w:.2f}, b = {b:.2f}")


try:
    if len(sys.argv) == 4:
        asyncio.run(work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    elif len(sys.argv) > 2:
        sys.exit(__doc__)
    else:
        asyncio.run(main(*sys.argv[1:]))
except (aiordma.RDMAError, OSError, ValueError) as error:
    sys.exit(f"parameter_server: {error}")
