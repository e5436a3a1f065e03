"""Tests of child processes: errors about their end, and that every child is reaped."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from aiordma.cli import child
from aiordma.cli.child import ChildError, listening_child

LISTENING = "import os, sys, time; print('127.0.0.1', os.getpid(), flush=True)\n"
UNTIL_INPUT_ENDS = LISTENING + "sys.stdin.read()"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture(autouse=True)
def no_child_left() -> Iterator[None]:
    yield
    with pytest.raises(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def test_listening_child_reports_its_address() -> None:
    async with listening_child(python(UNTIL_INPUT_ENDS)) as server:
        assert server.host == "127.0.0.1"
        assert server.port > 0


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "raise SystemExit(3)",
            "the server process ended with exit status 3 before it started listening",
        ),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL before it started listening"),
        ("print('hello')", r"printed 'hello\\n' instead of its address"),
        ("print('a port')", r"printed 'a port\\n' instead of its address"),
    ],
)
async def test_child_error_is_raised_when_child_reports_no_address(code: str, text: str) -> None:
    with pytest.raises(ChildError, match=text):
        async with listening_child(python(code)):
            raise AssertionError("it did not listen")


async def test_waiting_for_a_silent_child_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "START_TIMEOUT", 0.01)
    with pytest.raises(ChildError, match=r"timed out after 0\.01 s waiting for the server process"):
        async with listening_child(python("import sys; sys.stdin.read()")):
            raise AssertionError("it did not listen")


async def test_child_is_killed_when_it_does_not_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "GRACE", 0.01)
    async with listening_child(python(LISTENING + "time.sleep(1000)")):
        pass


async def test_child_exits_when_the_parent_is_cancelled() -> None:
    with pytest.raises(TimeoutError):
        async with listening_child(python(UNTIL_INPUT_ENDS)) as server, asyncio.timeout(0.01):
            await server.guard(forever())


async def test_child_is_killed_when_waiting_for_it_is_cancelled() -> None:
    with pytest.raises(TimeoutError):
        async with (
            asyncio.timeout(None) as limit,
            listening_child(python(LISTENING + "time.sleep(1000)")),
        ):
            limit.reschedule(asyncio.get_running_loop().time() + 0.01)


async def test_guard_returns_the_result_or_raises_the_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child, "EXIT_WAIT", 0.01)

    async def answer() -> int:
        return 42

    async def fail(error: type[Exception]) -> None:
        raise error

    async with listening_child(python(UNTIL_INPUT_ENDS)) as server:
        assert await server.guard(answer()) == 42
        for error in (ConnectionResetError, LookupError):  # and the child lives
            with pytest.raises(error):
                await server.guard(fail(error))


@pytest.mark.parametrize("breaks", [False, True])
async def test_guard_raises_child_error_when_the_child_is_killed(breaks: bool) -> None:
    """The child's death is reported even if it also breaks the connection."""

    async def kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        if breaks:
            raise ConnectionResetError
        await forever()

    with pytest.raises(ChildError, match="the server process was killed by SIGKILL"):
        async with listening_child(python(UNTIL_INPUT_ENDS)) as server:
            await server.guard(kill(server.port))  # it has told its process id for a port
