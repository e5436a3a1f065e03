"""What the tests of the command line share."""

from __future__ import annotations

import asyncio
import sys

import pytest
import uvloop


@pytest.fixture(scope="session", autouse=True)
def first_child() -> None:
    """libuv makes its pipe for signals with a process's first child and keeps it: not a leak."""

    async def main() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
        await process.wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
