"""Programs for peers in child processes, which tests keep busy, stop or kill.

Run as `python -m tests.transport.child ROLE DEVICE VIA HOST`. It prints the port it listens on,
then one line for each event; `Child` is the parent's side.

The role `dial` instead connects to the port given as the last argument, and stays connected.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

from aiordma import Connection, connect, listen
from aiordma.transport import Via

from .connection_factory import ALL, SMALL, echo


def say(text: object) -> None:
    print(text, flush=True)


async def share(conn: Connection) -> None:
    """Share 1 MiB, then wait until the connection ends."""
    with conn.alloc(1 << 20) as buffer:
        buffer.view[:] = bytes(1 << 20)
        await conn.send_region(buffer, access=ALL)
        await conn.recv()


async def busy(conn: Connection) -> None:
    """Share 1 MiB, then block the loop by busy-waiting until the peer has written the last byte."""
    with conn.alloc(1 << 20) as buffer:
        buffer.view[:] = bytes(1 << 20)
        await conn.send_region(buffer, access=ALL)
        (await conn.recv()).release()
        say("busy")
        while not buffer.view[-1]:
            pass
        say("idle")
        await conn.send(buffer.view[:8])
        await conn.wait_closed()


async def deaf(conn: Connection) -> None:
    """Never receive anything."""
    await conn.wait_closed()


async def stay(conn: Connection) -> None:
    """Stay alive until killed, whatever happens to the connection."""
    await asyncio.Event().wait()


async def talk(conn: Connection) -> None:
    """Send messages of 1 MiB and 10 bytes in turn forever."""
    while True:
        await conn.send(bytes(1 << 20))
        await conn.send(bytes(10))


ROLES = {role.__name__: role for role in (echo, share, busy, deaf, stay, talk)}


async def main(role: str, device: str, via: str, host: str, port: str = "0") -> None:
    if role == "dial":
        await stay(await connect(host, int(port), device=device, via=cast(Via, via), config=SMALL))
    async with await listen(host, 0, device=device, via=cast(Via, via), config=SMALL) as listener:
        say(listener.port)
        async with await listener.accept() as conn:
            try:
                await ROLES[role](conn)
            except ConnectionError as error:
                say(type(error).__name__)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
