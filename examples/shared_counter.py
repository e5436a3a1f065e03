"""A counter in one process's memory that four others increment, without its program's help.

    python examples/shared_counter.py [HOST]

HOST is an address of the RDMA device, 127.0.0.1 if it is left out. Each client adds 1 a hundred
times; the one that comes last sets the counter back to 0, unless another process has added more.
"""

import asyncio
import sys
from array import array

import aiordma

counter = array("Q", [0])


async def serve(conn: aiordma.Connection) -> None:
    with conn.register(counter) as region:
        await conn.send_region(region, access=aiordma.Rights.ATOMIC)
        await conn.wait_closed()


async def client(host: str, port: int) -> None:
    async with await aiordma.connect(host, port) as conn:
        remote = await conn.recv_region()
        for _ in range(100):
            before = await conn.fetch_and_add(remote[0:8], 1)
        if before == 399:
            found = await conn.compare_and_swap(remote[0:8], expected=400, desired=0)
            print("the last client found", found, flush=True)


async def main(host: str = "127.0.0.1") -> None:
    async with await aiordma.start_server(serve, host) as server:
        command = sys.executable, __file__, host, str(server.port)
        clients = [await asyncio.create_subprocess_exec(*command) for _ in range(4)]
        for process in clients:
            await process.wait()
    print("the counter is", counter[0])


if len(sys.argv) == 3:  # one of the clients that main starts
    asyncio.run(client(sys.argv[1], int(sys.argv[2])))
else:
    asyncio.run(main(*sys.argv[1:]))
