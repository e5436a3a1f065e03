"""A child process that prints its address and exits together with its parent."""

from __future__ import annotations

import asyncio
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiordma import ConnectionClosedError

T = TypeVar("T")

# How long a child may take to print its address, in seconds. Starting an interpreter can be slow on
# a busy or emulated machine.
START_TIMEOUT = 120.0
# How long a child may take to exit before it is killed, in seconds.
GRACE = 5.0
# How long to wait, in seconds, for a child to exit after its connection has broken.
EXIT_WAIT = 3.0


class ChildError(Exception):
    """Raised if the child process fails. The message describes the failure."""


class Child:
    """A running child process and the address it listens on.

    Use `listening_child` to start a child process.
    """

    def __init__(self, process: Process, host: str, port: int) -> None:
        self._process = process
        self.host = host
        self.port = port

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, but raise ChildError as soon as the child process exits."""
        task = asyncio.create_task(work)
        death = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() or is_connection_loss(task.exception()):
                await asyncio.wait({death}, timeout=EXIT_WAIT)
                if death.done():
                    raise ChildError(f"the server process {describe(death.result())}")
            return await task
        finally:
            for pending in (task, death):
                pending.cancel()
            await asyncio.gather(task, death, return_exceptions=True)


def is_connection_loss(error: BaseException | None) -> bool:
    """Return whether the child's death may have caused `error`.

    Every connection error counts except ConnectionClosedError, which reports a clean close.
    """
    return isinstance(error, ConnectionError) and not isinstance(error, ConnectionClosedError)


def describe(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


@asynccontextmanager
async def listening_child(command: Sequence[str]) -> AsyncIterator[Child]:
    """Start `command` in a child process, and wait for it to print "HOST PORT".

    On exit, the context manager closes the child's standard input and waits for the child to exit.
    The command must exit at end-of-file on standard input. A child that does not exit in time is
    killed. The child shares this process's standard error. Ctrl-C does not reach the child, because
    it runs in a separate session.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, start_new_session=True
    )
    try:
        yield await read_address(process)
    finally:
        await end(process)


async def read_address(process: Process) -> Child:
    """Wait until the child prints the address on which it listens."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT):
            line = (await process.stdout.readline()).decode()
            if not line:
                status = await process.wait()
                raise ChildError(
                    f"the server process {describe(status)} before it started listening"
                )
    except TimeoutError as error:
        raise ChildError(
            f"timed out after {START_TIMEOUT:g} s waiting for the server process to start listening"
        ) from error
    try:
        host, port = line.split()
        return Child(process, host, int(port))
    except ValueError as error:
        raise ChildError(f"the server process printed {line!r} instead of its address") from error


async def end(process: Process) -> None:
    """Close the child's standard input, which ends it. Kill it if it has not exited in time."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(GRACE):
            await process.wait()
    except BaseException as error:
        if process.returncode is None:
            process.kill()
            await process.wait()
        if not isinstance(error, TimeoutError):
            raise
