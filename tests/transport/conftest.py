"""Tests of the transport are coroutines, run on both loops; `place` is where they connect.

A test that says nothing runs four times: asyncio and uvloop, "cm" and "tcp".  What does not
depend on the loop is marked `one_loop`, what does not depend on the way to connect `one_via`.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, cast

import pytest

from aiordma.transport import Via
from tests.conftest import Run

from .place import Place

# Seconds that a test may take on the embedded device, unless marked `time_limit`.
TIME_LIMIT = 20.0

# The virtual machine emulates its processors; measured: about this many times slower.
SLOW = 8.0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "time_limit(seconds): instead of the usual limit, on the embedded device"
    )


@pytest.fixture(autouse=True)
def _on_both_loops(run: Run) -> None:
    """Every test of this folder has the loop as a parameter."""


@pytest.fixture(params=["cm", "tcp"])
def via(request: pytest.FixtureRequest) -> Via:
    value: Via = request.param
    return value


@pytest.fixture
def place(device_name: str, host: str, via: Via) -> Place:
    return Place(device_name, host, via, 1.0 if device_name == "embedded0" else SLOW)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine test by the `run` fixture, within its time limit."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in names}
    marker = pyfuncitem.get_closest_marker("time_limit")
    limit = marker.args[0] if marker else TIME_LIMIT
    if pyfuncitem.config.getoption("--device") != "embedded0":
        limit *= SLOW

    async def main() -> None:
        async with asyncio.timeout(limit):
            await pyfuncitem.obj(**arguments)

    run = cast(Run, pyfuncitem.funcargs["run"])
    run(main())
    return True
