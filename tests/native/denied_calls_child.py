"""Send messages in processes to which the kernel denies a system call.

The program prints the outcomes as JSON.

usage: python -m tests.native.denied_calls_child LINKS

Each process is a fork that denies itself one call before it starts the device.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

import aiordma
from tests.denied_calls import CALLS, Call, deny

HOST = "127.0.0.1"
ERRORS = (errno.EPERM, errno.ENOSYS)
SIZES = (10, 100_000, 2_000_000)
TIMEOUT = 60  # seconds for the work of one process


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Call `work` with a pipe's write end in a forked child. Return its PID and the read end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(TIMEOUT)
        try:
            work(writer)
        except BaseException as error:
            report_and_exit(writer, f"{type(error).__name__}: {error}")
        report_and_exit(writer, "works")
    os.close(writer)
    return pid, reader


def report_and_exit(writer: int, text: str) -> NoReturn:
    os.write(writer, text.encode())
    os._exit(0)


async def echo(conn: aiordma.Connection) -> None:
    async for message in conn:
        await conn.send(message)


async def send(port: int) -> None:
    async with await aiordma.connect(HOST, port, device="embedded0") as conn:
        for size in SIZES:
            await conn.send(bytes(size))
            assert len(await conn.recv()) == size


async def within_process() -> None:
    async with await aiordma.start_server(echo, HOST, device="embedded0") as server:
        await send(server.port)


def serve(writer: int) -> None:
    async def main() -> None:
        async with await aiordma.start_server(echo, HOST, device="embedded0") as server:
            os.write(writer, b"%d" % server.port)
            await server.serve_forever()

    asyncio.run(main())


def between_processes(work: Callable[[int], None]) -> None:
    server, reader = forked(work)
    try:
        asyncio.run(send(int(os.read(reader, 1000))))
    finally:
        os.kill(server, 9)
        os.waitpid(server, 0)


def outcome(call: Call, error: int) -> str:
    """Deny `call` and run the attempts. Return the first error, or "works" if there is none."""

    def work(writer: int) -> None:
        async def main() -> None:
            deny(call, error)
            try:
                await within_process()
            except aiordma.RDMAError as failure:
                # Exit here, because asyncio.run() cannot clean up while some of these calls are
                # denied.
                report_and_exit(writer, str(failure))

        asyncio.run(main())

    def client(writer: int) -> None:
        deny(call, error)
        between_processes(serve)

    found = ""
    for attempt in (work,) if call.is_needed else (work, client):
        pid, reader = forked(attempt)
        found = os.fdopen(reader).read()
        os.waitpid(pid, 0)
        if found != "works":
            break
    return found


def main(links: str) -> None:
    warnings.simplefilter("ignore")
    os.environ["AIORDMA_EMBEDDED_LINKS"] = links
    found = {
        f"{call.name} {errno.errorcode[error]}": outcome(call, error)
        for call in CALLS
        if links in call.links
        for error in ERRORS
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
