"""One-sided operations: the client reads and writes the server's memory; the server only waits.

    python examples/one_sided.py [HOST]

HOST is an address of the RDMA device, 127.0.0.1 if it is left out. The memory is a numpy array,
or a bytearray where there is no numpy.
"""

import asyncio
import sys

import aiordma

try:
    from numpy import arange
except ModuleNotFoundError:
    MEMORY = bytearray(range(8))
else:
    MEMORY = arange(8, dtype="u1")  # type: ignore[assignment]


async def server(listener: aiordma.Listener) -> None:
    async with await listener.accept() as conn:
        with conn.register(MEMORY) as region:
            await conn.send_region(region, access=aiordma.Rights.READ | aiordma.Rights.WRITE)
            await (
                conn.recv()
            )  # the owner does not notice a remote write: the client says when it is done
            print("server: my memory is now", bytes(MEMORY).hex(" "))


async def client(host: str, port: int) -> None:
    async with await aiordma.connect(host, port) as conn:
        remote = await conn.recv_region()
        local = bytearray(len(remote))
        await conn.read(remote, local)
        print("client: I have read", local.hex(" "))
        await conn.write(local[4:8], remote[0:4])
        await conn.send(b"done")


async def main(host: str = "127.0.0.1") -> None:
    async with await aiordma.listen(host) as listener:
        await asyncio.gather(server(listener), client(host, listener.port))


asyncio.run(main(*sys.argv[1:]))
