"""Tests of the transport are coroutines, run on both loops; `place` is where they connect.

A test that says nothing runs four times: on asyncio and uvloop, by "cm" and "tcp".  What does not
depend on the loop is marked `one_loop`, what does not depend on the way to connect `by_cm` or
`by_tcp`.  On another device than the embedded one, which in the virtual machine is slow, each test
runs in one of its ways, and so it does with `--one-way`.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, cast
from zlib import crc32

import pytest

from aiordma import driver
from aiordma.transport import Via
from tests.conftest import EMBEDDED, LOOPS, Run

from .place import Place

# Seconds that a test may take on the embedded device, unless marked `time_limit`; a busy machine
# is many times slower than one that is not.
TIME_LIMIT = 100.0

# The virtual machine emulates its processors; measured: about this many times slower.
SLOW = 8.0


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "one_loop: the event loop does not matter, asyncio's will do",
        "by_cm: only through the connection manager",
        "by_tcp: only by an exchange over TCP",
        "looks: a task that is about to wait looks first whether it must",
        "time_limit(seconds): instead of the usual limit, on the embedded device",
    ):
        config.addinivalue_line("markers", line)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "place" not in metafunc.fixturenames:
        return
    node = metafunc.definition
    vias = ["cm", "tcp"]
    if node.get_closest_marker("by_cm"):
        vias = ["cm"]
    elif node.get_closest_marker("by_tcp"):
        vias = ["tcp"]
    loops = ["asyncio"] if node.get_closest_marker("one_loop") else list(LOOPS)
    ways = [(loop, via) for loop in loops for via in vias]
    option = metafunc.config.getoption
    if option("--device") != EMBEDDED or option("--one-way"):
        # The same one in every run, and each about as often as the others.
        ways = [ways[crc32(node.name.encode()) % len(ways)]]
    # As a mark, which takes the place of the parameters that the fixture `run` has by itself.
    node.add_marker(pytest.mark.parametrize(("run", "via"), ways, indirect=True))


@pytest.fixture(autouse=True)
def _on_a_loop(run: Run) -> None:
    """Every test of this folder has the loop as a parameter."""


@pytest.fixture(autouse=True)
def _looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests count turns of the loop, of which an await that need not wait has none."""
    if request.node.get_closest_marker("looks") is None:
        monkeypatch.setattr(driver, "LOOK_ONCE_US", 0)


@pytest.fixture
def via(request: pytest.FixtureRequest) -> Via:
    value: Via = request.param
    return value


@pytest.fixture
def place(device_name: str, host: str, via: Via) -> Place:
    return Place(device_name, host, via, 1.0 if device_name == EMBEDDED else SLOW)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine test by the `run` fixture, within its time limit."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in names}
    marker = pyfuncitem.get_closest_marker("time_limit")
    limit = marker.args[0] if marker else TIME_LIMIT
    if pyfuncitem.config.getoption("--device") != EMBEDDED:
        limit *= SLOW

    async def main() -> None:
        async with asyncio.timeout(limit):
            await pyfuncitem.obj(**arguments)

    run = cast(Run, pyfuncitem.funcargs["run"])
    run(main())
    return True
