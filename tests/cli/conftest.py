"""Fixtures for the tests of the command line."""

from __future__ import annotations

import asyncio
import sys

import pytest
import uvloop


@pytest.fixture(scope="session", autouse=True)
def first_child() -> None:
    """Make libuv open its signal pipe before the leak check, because the pipe stays open."""

    async def main() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
        await process.wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
