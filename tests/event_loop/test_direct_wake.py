"""Test switching off the direct wake-up of tasks (docs/completion.md)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MESSAGES = 20

# Prints how often the event loop wakes a task that waits for an operation. A callback sends the
# messages, so the receiver is the only task and always has to wait.
PROGRAM = f"""\
import asyncio
import aiordma

class Loop(asyncio.SelectorEventLoop):
    asked = 0

    def call_soon(self, callback, *args, context=None):
        if getattr(callback, "__name__", "") == "task_wakeup":
            self.asked += not isinstance(args[0], asyncio.Future)
        return super().call_soon(callback, *args, context=context)

async def main():
    loop = asyncio.get_running_loop()
    async with await aiordma.listen("127.0.0.1", device="embedded0") as listener:
        accepting = asyncio.create_task(listener.accept())
        client = await aiordma.connect(*listener.address[:2], device="embedded0")
        async with client, await accepting as server:
            loop.asked = 0
            for n in range({MESSAGES}):
                loop.call_soon(client.send_nowait, b"%d" % n)
                assert await server.recv() == b"%d" % n
            print(loop.asked)

with asyncio.Runner(loop_factory=Loop) as runner:
    runner.run(main())
"""


def count_task_wake_ups(value: str) -> int:
    """Run PROGRAM with AIORDMA_NO_DIRECT_WAKE set to `value`. Return the count it prints."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "AIORDMA_NO_DIRECT_WAKE": value},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.parametrize(("value", "expected"), [("", 0), ("1", MESSAGES)])
def test_environment_variable_disables_direct_wake(value: str, expected: int) -> None:
    assert count_task_wake_ups(value) == expected
