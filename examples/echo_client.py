"""An echo client: sends messages of several sizes and compares what comes back.

python examples/echo_client.py HOST PORT          (examples/echo_server.py says which)
"""

import asyncio
import inspect
import os
import sys

import aiordma


async def main(host: str, port: str) -> None:
    async with await aiordma.connect(host, int(port)) as conn:
        print(f"connected over {conn.device} to {host}")
        for size in (0, 1, 1000, 1_000_000, 10_000_000):
            data = os.urandom(size)
            await conn.send(data)
            with await conn.recv() as echo:
                same = bytes(echo) == data
            print(f"{size} bytes: {'the same came back' if same else 'DIFFERENT'}")


try:
    inspect.signature(main).bind(*sys.argv[1:])
except TypeError:  # too few arguments, or too many
    sys.exit(__doc__)
try:
    asyncio.run(main(*sys.argv[1:]))
except (aiordma.RDMAError, OSError, ValueError) as error:  # such as no server there
    sys.exit(f"echo client: {error}")
