"""An echo server that sends each message back to its client.

    python examples/echo_server.py [HOST [PORT]]      then: python examples/echo_client.py HOST PORT

The server listens on HOST (default: all addresses) and PORT (default: 7471) until Ctrl-C is
pressed.
"""

import asyncio
import inspect
import sys
from contextlib import suppress

import aiordma


async def echo(conn: aiordma.Connection) -> None:
    print("connected:", conn.peer_address, flush=True)
    async for message in conn:
        with message:  # releases its memory at the end
            await conn.send(message)
    print("closed:", conn.peer_address, flush=True)


async def main(host: str = "", port: str = "7471") -> None:
    async with await aiordma.start_server(echo, host, int(port)) as server:
        print(f"echo server on {server.device}, port {server.port}", flush=True)
        await server.serve_forever()


try:
    inspect.signature(main).bind(*sys.argv[1:])
except TypeError:  # too many arguments
    sys.exit(__doc__)
try:
    with suppress(KeyboardInterrupt):
        asyncio.run(main(*sys.argv[1:]))
except (aiordma.RDMAError, OSError, ValueError) as error:  # such as an address in use
    sys.exit(f"echo server: {error}")
