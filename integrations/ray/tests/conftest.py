"""A real Ray cluster on this machine with the embedded device, for the tests of ray-aiordma."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[None]:
    # The actors inherit these variables.
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
