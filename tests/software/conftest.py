"""Software that nobody here wrote, unchanged, with its connections carried over RDMA."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from aiordma import streams

# uvloop's loop, likewise; not a class statement, because its type stubs contradict asyncio's.
UVLoop: Any = type("UVLoop", (streams.OverRDMA, uvloop.Loop), {})


Carried = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[streams.EventLoop, UVLoop], ids=["asyncio", "uvloop"])
def carried(request: pytest.FixtureRequest, device_name: str) -> Carried:
    """Runs a coroutine on a loop whose connections by host and port are RDMA streams."""
    kind = request.param

    def run(coroutine: Coroutine[Any, Any, None]) -> None:
        def loop() -> asyncio.AbstractEventLoop:
            made: asyncio.AbstractEventLoop = kind()
            made.device = device_name  # type: ignore[attr-defined]
            return made

        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(asyncio.wait_for(coroutine, 300))

    return run
