"""A process with open connections, and its children created by fork and by multiprocessing.

Run as `python -m tests.transport.forking ROLE LOOP DEVICE VIA HOST`. It prints one line for each
check that passed. A failed check raises an exception, which sets the exit status.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import uvloop

from aiordma import Buffer, Connection, Server, streams, verbs
from aiordma.errors import BufferStateError, UnsupportedError, WrongLoopError
from aiordma.transport import Via, start_server

from .connection_factory import SMALL, ConnectionFactory, echo, ends, lease_over, pattern

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
METHODS = ("fork", "spawn", "forkserver")


def say(text: object) -> None:
    print(text, flush=True)


async def talk(conn: Connection, seed: int) -> None:
    """Exchange short and long messages with an echo server."""
    for size in (0, 100, 5000, 200_000):
        data = pattern(size, seed)
        sending = asyncio.create_task(conn.send(data))
        with await conn.recv() as message:
            assert message == data
        await sending


class Parent:
    """A server, a connection to it, and shared memory, all in this process."""

    def __init__(
        self, factory: ConnectionFactory, server: Server, conn: Connection, buffer: Buffer
    ) -> None:
        self.share = conn.share(buffer, lease=3600)
        self.factory = factory
        self.server = server
        self.conn = conn
        self.buffer = buffer

    @classmethod
    @asynccontextmanager
    async def open(cls, factory: ConnectionFactory) -> AsyncIterator[Parent]:
        where: dict[str, Any] = {**factory.where, "config": SMALL}
        async with (
            await start_server(echo, factory.host, **where) as server,
            await factory.connect(server.port) as conn,
        ):
            with conn.alloc(64) as buffer:
                parent = cls(factory, server, conn, buffer)
                await parent.check()
                yield parent
                await parent.check()

    async def check(self) -> None:
        """Check that the connection still works and that the server accepts new peers."""
        async with self.factory.within(20):
            await talk(self.conn, 1)
            async with await self.factory.connect(self.server.port) as another:
                await talk(another, 2)


def forked(child: Callable[[], None]) -> int:
    """Fork a child that runs a function and exits with status 0 unless it fails. Return its PID."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            child()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    return pid


async def ended(pid: int) -> int:
    """Wait for a child and return its exit status."""
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    return os.waitstatus_to_exitcode(status)


# ---- fork ----------------------------------------------------------------------------------------


def uses_what_it_inherited(parent: Parent) -> None:
    """Check that using inherited objects fails, and that closing them has no effect."""
    conn = parent.conn

    async def use() -> None:
        for awaitable in (
            conn.send(b"x"), conn.recv(), conn.recv_into(bytearray(8)), conn.request_region(8),
            parent.server.serve_forever(),
        ):  # fmt: skip
            error = await ends(awaitable, WrongLoopError)
            assert "created before fork()" in str(error)
            assert "parent" in str(error)
        await conn.close()
        await conn.wait_closed()
        conn.abort()
        await parent.server.close()

    run(use())
    with pytest.raises(BufferStateError, match="parent"):
        conn._endpoint.driver.pd.reg_mr(64)
    parent.share.revoke()
    parent.buffer.release()
    gc.collect()


def has_its_own(parent: Parent) -> None:
    """Check that the child can open connections to itself and to its parent."""

    async def main() -> None:
        factory = parent.factory
        async with Parent.open(factory) as own:
            with own.conn.share(own.buffer, lease=0.01) as share:
                await lease_over(share)
        async with await factory.connect(parent.server.port) as conn:
            await talk(conn, 3)

    run(main())
    assert not verbs.live(), verbs.live()


def run(main: Any) -> None:
    with asyncio.Runner(loop_factory=LOOPS[sys.argv[2]]) as runner:
        runner.run(main)


def is_refused(parent: Parent) -> None:
    """Check that the child can use via='tcp' but not the connection manager."""

    async def main() -> None:
        factory = parent.factory
        for attempt in (factory.connect(parent.server.port), factory.listen()):
            error = await ends(attempt, UnsupportedError)
            assert "via='tcp'" in str(error)
        async with Parent.open(replace(factory, via="tcp")):
            pass

    run(main())
    assert not verbs.live(), verbs.live()


async def fork(factory: ConnectionFactory) -> None:
    await forks(factory, uses_what_it_inherited, has_its_own)


async def fork_with_librdmacm(factory: ConnectionFactory) -> None:
    await forks(factory, uses_what_it_inherited, is_refused)


async def forks(factory: ConnectionFactory, *children: Callable[[Parent], None]) -> None:
    async with Parent.open(factory) as parent:
        for child in children:
            pid = forked(lambda child=child: child(parent))  # type: ignore[misc]
            await parent.check()
            assert await ended(pid) == 0
            await parent.check()
            say(child.__name__)


def exits(factory: ConnectionFactory) -> None:
    """Let children exit normally, which finalizes the inherited objects in any order."""
    loop = asyncio.new_event_loop()
    opened = Parent.open(factory)
    parent = loop.run_until_complete(opened.__aenter__())
    for end in (sys.exit, gc.collect, lambda: None):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            end()
            return
        loop.run_until_complete(parent.check())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == 0, (end, status)
        loop.run_until_complete(parent.check())
    loop.run_until_complete(opened.__aexit__(None, None, None))
    loop.close()
    say("exits")


async def grandchildren(factory: ConnectionFactory) -> None:
    """Fork children of a child that has opened a device."""

    def child() -> None:
        run(generation(2))

    async def generation(more: int) -> None:
        async with Parent.open(factory):
            if more:
                assert await ended(forked(lambda: run(generation(more - 1)))) == 0

    async with Parent.open(factory):
        assert await ended(forked(child)) == 0
    say("grandchildren")


async def outlived(factory: ConnectionFactory) -> None:
    """Print the PID of a child that waits for stdin, then the port, and serve until killed."""
    async with Parent.open(factory) as parent:
        say(forked(lambda: (os.read(0, 1), None)[1]))
        say(parent.server.port)
        await parent.server.serve_forever()


# ---- multiprocessing and subprocess --------------------------------------------------------------


def visit(factory: ConnectionFactory, port: int, number: int) -> None:
    """Talk to the server at `port` from another process, and open a `Parent` in that process."""

    async def main() -> None:
        async with await factory.connect(port) as conn:
            await talk(conn, number)
        async with Parent.open(factory):
            pass

    asyncio.run(main())


async def processes(factory: ConnectionFactory) -> None:
    for method in METHODS:
        context: Any = multiprocessing.get_context(method)
        async with Parent.open(factory) as parent:
            process = context.Process(target=visit, args=(factory, parent.server.port, 5))
            process.start()
            await parent.check()
            await asyncio.to_thread(process.join)
            assert process.exitcode == 0, (method, process.exitcode)
        say(f"Process by {method}")


LISTS_FILES = """
import os
for fd in os.listdir("/proc/self/fd"):
    try:
        print(fd, os.readlink(f"/proc/self/fd/{fd}"))
    except FileNotFoundError:
        pass
"""


async def programs(factory: ConnectionFactory) -> None:
    """Check that another program inherits no file descriptors, even with close_fds=False."""
    before = set(os.listdir("/proc/self/fd"))
    async with Parent.open(factory) as parent:
        async with await streams.create_server(asyncio.Protocol, factory.host, **factory.where):
            listing = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-S", "-c", LISTS_FILES],
                close_fds=False,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        lines = listing.stdout.splitlines()
        inherited = [line for line in lines if line.split()[0] not in before]
        assert not inherited, inherited
        await parent.check()
    say("no descriptor")


ROLES = {
    role.__name__: role
    for role in (fork, fork_with_librdmacm, grandchildren, outlived, processes, programs)
}


def main(role: str, loop: str, device: str, via: str, host: str, slow: str) -> None:
    factory = ConnectionFactory(device, host, cast(Via, via), float(slow))
    if role == "exits":
        exits(factory)
        return
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(ROLES[role](factory))


if __name__ == "__main__":
    main(*sys.argv[1:])
