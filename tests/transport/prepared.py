"""Other processes that are there at once: forked from one that has imported everything.

Run as `python -m tests.transport.prepared DEVICE VIA HOST`.  For each line `ROLE PORT` that it
reads it forks a peer in that role of `tests.transport.child`, which connects to that port, or
listens when it is 0.  The peer prints its process number and its port, as soon as it has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import cast

from aiordma import connect, listen
from aiordma.transport import Via

from .child import ROLES
from .connection_factory import SMALL


async def peer(device: str, via: Via, host: str, role: str, port: int) -> None:
    if port:
        os.write(1, f"{os.getpid()} {port}\n".encode())
        conn = await connect(host, port, device=device, via=via, config=SMALL)
    else:
        async with await listen(host, 0, device=device, via=via, config=SMALL) as listener:
            os.write(1, f"{os.getpid()} {listener.port}\n".encode())
            conn = await listener.accept()
    async with conn:
        with contextlib.suppress(ConnectionError):
            await ROLES[role](conn)


def main(device: str, via: str, host: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they are not waited for
    for line in sys.stdin:
        role, port = line.split()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sys.stdin.close()
            asyncio.run(peer(device, cast(Via, via), host, role, int(port)))
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
