"""Fixtures that run unchanged third-party software with its connections over RDMA."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import uvloop

from aiordma import streams
from tests.combinations import noting
from tests.transport.connection_factory import UNTIMED

# The uvloop version of streams.EventLoop. A class statement would fail type checking, because
# uvloop's type stubs contradict asyncio's.
UVLoop: Any = type("UVLoop", (streams.OverRDMA, uvloop.Loop), {})

# Disable aiordma's time limits, which are only a few seconds long. The test's own time limit is
# sufficient.
PATIENT = replace(UNTIMED, keep_alive=None)


def made(kind: Callable[[], Any], device_name: str) -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = kind()
    loop.device = device_name  # type: ignore[attr-defined]
    loop.config = PATIENT  # type: ignore[attr-defined]
    return loop


def pytest_asyncio_loop_factories(
    config: pytest.Config,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return factories for asyncio and uvloop loops whose connections use RDMA streams."""
    device_name = str(config.getoption("--device"))
    return {
        "asyncio": noting(partial(made, streams.EventLoop, device_name)),
        "uvloop": noting(partial(made, UVLoop, device_name)),
    }


@pytest.fixture(autouse=True)
def on_the_device(device: object) -> None:
    """Make every test depend on the device, because the loops use it."""
