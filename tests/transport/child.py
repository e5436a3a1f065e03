"""Other processes, to be busy, to be stopped and to be killed.

Run as `python -m tests.transport.child ROLE DEVICE VIA HOST`.  It prints the port it listens on,
then one line per thing that has happened; see `Child` for the other side.

Role `crowd` connects instead, as often as a last argument says, to a port that it is told on its
input; says so when all have had an echo, and closes them at the next line of its input.  Role
`dial` connects to the port that is its last argument, and stays.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from typing import cast

from aiordma import Connection, connect, listen
from aiordma.transport import Via

from .connection_factory import ALL, SMALL, echo, pattern


def say(text: object) -> None:
    print(text, flush=True)


async def share(conn: Connection) -> None:
    """Shares 1 MiB, then waits for its end."""
    with conn.alloc(1 << 20) as buffer:
        buffer.view[:] = bytes(1 << 20)
        await conn.send_region(buffer, access=ALL)
        await conn.recv()


async def busy(conn: Connection) -> None:
    """Shares 1 MiB, then computes until the last byte of it is written; looks at nothing else."""
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
    """Receives nothing, ever."""
    await conn.wait_closed()


async def stay(conn: Connection) -> None:
    """Is there until it is killed, whatever becomes of the connection."""
    await asyncio.Event().wait()


async def talk(conn: Connection) -> None:
    """Sends 1 MiB and 10 bytes in turn for ever."""
    while True:
        await conn.send(bytes(1 << 20))
        await conn.send(bytes(10))


ROLES = {role.__name__: role for role in (echo, share, busy, deaf, stay, talk)}


def allow_files() -> None:
    """As many open files as this process may ask for: the library leaves the limit as it is."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def crowd(device: str, via: str, host: str, count: int) -> None:
    allow_files()
    port = int(sys.stdin.readline())
    patient = SMALL
    conns = await asyncio.gather(
        *(
            connect(host, port, device=device, via=cast(Via, via), config=patient)
            for _ in range(count)
        )
    )

    async def talk(conn: Connection, number: int) -> bool:
        await conn.send(pattern(64, number))
        with await conn.recv() as message:
            return message == pattern(64, number)

    say(sum(await asyncio.gather(*(talk(conn, n) for n, conn in enumerate(conns)))))
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.gather(*(conn.close() for conn in conns))


async def main(role: str, device: str, via: str, host: str, count: str = "0") -> None:
    if role == "crowd":
        await crowd(device, via, host, int(count))
        return
    if role == "dial":
        port = int(count)
        await stay(await connect(host, port, device=device, via=cast(Via, via), config=SMALL))
    async with await listen(host, 0, device=device, via=cast(Via, via), config=SMALL) as listener:
        say(listener.port)
        async with await listener.accept() as conn:
            try:
                await ROLES[role](conn)
            except ConnectionError as error:
                say(type(error).__name__)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
