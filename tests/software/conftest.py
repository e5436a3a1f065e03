"""Third-party software, unchanged, with its connections over RDMA."""

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

# uvloop's loop, likewise; not a class statement, because its type stubs contradict asyncio's.
UVLoop: Any = type("UVLoop", (streams.OverRDMA, uvloop.Loop), {})

# The time limit of a test is the only one: those of the software and of aiordma are seconds.
PATIENT = replace(UNTIMED, keep_alive=None)


def made(kind: Callable[[], Any], device_name: str) -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = kind()
    loop.device = device_name  # type: ignore[attr-defined]
    loop.config = PATIENT  # type: ignore[attr-defined]
    return loop


def pytest_asyncio_loop_factories(
    config: pytest.Config,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Loops whose connections by host and port are RDMA streams, on asyncio and uvloop."""
    device_name = str(config.getoption("--device"))
    return {
        "asyncio": noting(partial(made, streams.EventLoop, device_name)),
        "uvloop": noting(partial(made, UVLoop, device_name)),
    }


@pytest.fixture(autouse=True)
def on_the_device(device: object) -> None:
    """Every test needs the device, since the loops use it."""
