"""A process that executes commands at one end of the connections measured by `cost`.

    python -m bench.end         read commands, one per line, and print each result

Each command has the form `NAME ARGUMENTS` in JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, Self

import aiordma
from aiordma._event_loop.driver import Driver

from .footprint import footprint, peak, reset_peak

# The size of the pattern that fills a transfer's buffer, in bytes.
PATTERN = 1 << 20
CONFIG = aiordma.Config(keep_alive=None, max_message=1 << 40)


def allow_files() -> None:
    """Raise the soft limit on open files to the hard limit.

    Programs must do this themselves, because aiordma never changes the limit.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def pool_of(conn: aiordma.Connection) -> aiordma.MemoryPool:
    driver: Driver = conn._endpoint.driver
    return driver.pool


class Commands:
    """The commands an end can execute. Transfers use the first connection."""

    def __init__(self) -> None:
        self._conns: list[aiordma.Connection] = []
        self._listener: aiordma.Listener | None = None
        self._buffer = bytearray()
        self._base = 0

    async def listen(self) -> int:
        self._listener = await aiordma.listen("127.0.0.1", 0, config=CONFIG)
        return self._listener.port

    async def accept(self, count: int) -> None:
        assert self._listener is not None
        for _ in range(count):
            self._conns.append(await self._listener.accept())

    async def connect(self, port: int, count: int) -> None:
        for _ in range(count):
            self._conns.append(await aiordma.connect("127.0.0.1", port, config=CONFIG))

    async def ask(self) -> None:
        """Send a small message on each connection and wait for the responses."""
        for conn in self._conns:
            await conn.send(b"a small message")
            with await conn.recv():
                pass

    async def answer(self) -> None:
        for conn in self._conns:
            with await conn.recv() as message:
                await conn.send(message)

    async def footprint(self) -> dict[str, int]:
        return footprint(pool_of(self._conns[0]))

    # ---- one large transfer --------------------------------------------------------------

    async def buffer(self, size: int, filled: bool) -> None:
        """Allocate the program's buffer, and start measuring additional memory use.

        All of the buffer's pages are already resident when the measurement starts.
        """
        self._buffer = bytearray(os.urandom(PATTERN) if filled else b"\xff" * PATTERN) * (
            size // PATTERN
        )
        reset_peak()
        self._base = peak()

    async def send(self) -> None:
        await self._conns[0].send(self._buffer)

    async def recv_into(self) -> None:
        await self._conns[0].recv_into(self._buffer)

    async def share(self, rights: int) -> None:
        conn = self._conns[0]
        with conn.register(self._buffer) as memory:
            share = await conn.send_region(memory, access=aiordma.Rights(rights), lease=None)
            with share, await conn.recv():  # the peer sends an empty message when it is done
                pass

    async def read(self) -> None:
        conn = self._conns[0]
        remote = await conn.recv_region()
        await conn.read(remote, self._buffer)
        await conn.send(b"")

    async def write(self) -> None:
        conn = self._conns[0]
        remote = await conn.recv_region()
        await conn.write(self._buffer, remote)
        await conn.send(b"")

    async def extra(self) -> tuple[int, int]:
        """Return the additional peak memory use in bytes, and the buffer's checksum.

        The peak is measured from the call to `buffer`, and does not include the buffer itself.
        """
        extra = peak() - self._base
        return extra, zlib.crc32(self._buffer)

    async def close(self) -> None:
        for conn in self._conns:
            await conn.close()
        if self._listener is not None:
            await self._listener.close()


async def main() -> None:
    allow_files()
    commands = Commands()
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        name, arguments = json.loads(line)
        command: Callable[..., Awaitable[Any]] = getattr(commands, name)
        print(json.dumps(await command(*arguments)), flush=True)
    await commands.close()


class End:
    """A context manager that runs the process for one end.

    `tell` sends the process a command, and `answer` returns the result.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.end"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = self._process.pid

    def tell(self, command: Callable[..., Awaitable[Any]], *arguments: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command.__name__, arguments]).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def do(self, command: Callable[..., Awaitable[Any]], *arguments: object) -> Any:
        self.tell(command, *arguments)
        return self.answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


if __name__ == "__main__":
    asyncio.run(main())
