"""A child process that prints its address, and that ends when its parent needs it no more."""

from __future__ import annotations

import asyncio
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiordma import ConnectionClosedError

T = TypeVar("T")

# Seconds until a child must have printed its address: it starts an interpreter, on a machine that
# may be busy or emulated.
START_TIMEOUT = 120.0
# Seconds that a child may take to end when asked, before it is killed.
GRACE = 5.0
# A connection breaks a moment before its dead process can be reaped: seconds to wait for that.
LAST_BREATH = 3.0


class ChildError(Exception):
    """The child process failed; the text says how it ended."""


class Child:
    """A running child and the address it listens on.  Made by `listening_child`."""

    def __init__(self, process: Process, host: str, port: int) -> None:
        self._process = process
        self.host = host
        self.port = port

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, which needs the child; ChildError as soon as the child has ended."""
        task = asyncio.create_task(work)
        death = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() or broke(task.exception()):
                await asyncio.wait({death}, timeout=LAST_BREATH)
                if death.done():
                    raise ChildError(f"the server process {describe(death.result())}")
            return await task
        finally:
            for pending in (task, death):
                pending.cancel()
            await asyncio.gather(task, death, return_exceptions=True)


def broke(error: BaseException | None) -> bool:
    """Whether an error may result from the child's death; a clean close does not."""
    return isinstance(error, ConnectionError) and not isinstance(error, ConnectionClosedError)


def describe(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


@asynccontextmanager
async def listening_child(command: Sequence[str]) -> AsyncIterator[Child]:
    """Start `command`, which prints "HOST PORT" when it listens and ends when its input ends.

    The child has ended and is reaped when the context exits, also after an exception.  It shares
    this process's standard error.  It has a session of its own, so that Ctrl-C does not reach it:
    it ends because this process does.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, start_new_session=True
    )
    try:
        yield await announced(process)
    finally:
        await end(process)


async def announced(process: Process) -> Child:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT):
            line = (await process.stdout.readline()).decode()
            if not line:
                status = await process.wait()
                raise ChildError(f"the server process {describe(status)} before it listened")
    except TimeoutError as error:
        raise ChildError(
            f"the server process printed no address within {START_TIMEOUT:g} s"
        ) from error
    try:
        host, port = line.split()
        return Child(process, host, int(port))
    except ValueError as error:
        raise ChildError(f"the server process printed {line!r} instead of its address") from error


async def end(process: Process) -> None:
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
