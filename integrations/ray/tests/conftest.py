"""The cluster of the tests of ray-aiordma: real, on this machine, with the embedded device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="without the tests marked long, as CI")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        config.hook.pytest_deselected(items=[it for it in items if it.get_closest_marker("long")])
        items[:] = [it for it in items if not it.get_closest_marker("long")]


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[None]:
    # For the actors, which inherit the environment.
    os.environ["AIORDMA_DEVICE"] = "embedded0"
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's name
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=1 << 30)
    try:
        yield
    finally:
        ray.shutdown()
