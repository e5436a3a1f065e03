"""A client that borrows 8 bytes of memory from a server, fills half of them, and hands them over.

    python examples/lent_memory.py [HOST]

Both run in this process. HOST is an address of the RDMA device (default: 127.0.0.1).
"""

import asyncio
import inspect
import sys

import aiordma


async def client(host: str, port: int) -> None:
    async with await aiordma.connect(host, port) as conn:
        lent = await conn.request_region(8)  # the server's memory, zeroed
        with conn.alloc(8) as ones:
            ones.view[:] = b"\1" * 8
            await conn.write(ones[4:8], lent[4:8])
        await conn.hand_over(lent)  # now only the server can use it


async def server(listener: aiordma.Listener) -> None:
    async with await listener.accept() as conn:
        with await conn.recv_buffer() as memory:
            print("the client left", memory.view.hex(" "))


async def main(host: str = "127.0.0.1") -> None:
    async with await aiordma.listen(host) as listener:
        await asyncio.gather(server(listener), client(host, listener.port))


try:
    inspect.signature(main).bind(*sys.argv[1:])
except TypeError:  # too many arguments
    sys.exit(__doc__)
try:
    asyncio.run(main(*sys.argv[1:]))
except (aiordma.RDMAError, OSError) as error:
    sys.exit(f"lent memory: {error}")
