"""A peer that reads a region over two rails, and stops between its requests and the responses.

Run as ``python -m tests.transport.rails.stopping_reader HOST``. It prints the port it listens on,
and "ready" when it can use the region over both rails. After a line of input it starts to read, and
stops itself as soon as both rails have requests. Once SIGCONT resumes it, it prints "disconnected"
when the lead's link has ended, and sends the data it has read.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace

from aiordma import listen
from tests.transport.connection_factory import SMALL, yield_loop

from .joining import TWO, further, until_rails

# Retries must not run out while a process is stopped or a port is down.
CONFIG = replace(SMALL, ack_timeout=10.0)


async def main(host: str) -> None:
    async with await listen(host, 0, device=TWO, via="tcp", config=CONFIG) as listener:
        print(listener.port, flush=True)
        async with await listener.accept() as conn:
            await until_rails([conn])
            region = await conn.recv_region()
            while not region._keys:
                await yield_loop(1)
            print("ready", flush=True)
            sys.stdin.readline()
            data = bytearray(region.length)
            lead, other = conn._queue, further(conn).queue
            assert other is not None
            completions = other.completions
            reading = asyncio.ensure_future(conn.read(region, data))
            while not other.outstanding and other.completions == completions:
                await yield_loop(1)  # the lead receives the first request
            os.kill(os.getpid(), signal.SIGSTOP)
            while lead.qp.wire is not None:
                await yield_loop(1)
            print("disconnected", flush=True)
            await reading
            await conn.send(data)
            await conn.wait_closed()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
