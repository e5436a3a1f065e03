"""An echo client that sends messages of several sizes and compares the echoes.

python examples/echo_client.py HOST PORT          (as printed by examples/echo_server.py)
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
            print(f"{size} bytes: {'echo matches' if same else 'ECHO DIFFERS'}")


try:
    inspect.signature(main).bind(*sys.argv[1:])
except TypeError:  # the wrong number of arguments
    sys.exit(__doc__)
try:
    asyncio.run(main(*sys.argv[1:]))
except (aiordma.RDMAError, OSError, ValueError) as error:  # such as a missing server
    sys.exit(f"echo client: {error}")
