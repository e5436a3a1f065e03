"""Test concurrent operations in random order on both ends, against a model (`programs.py`)."""

from __future__ import annotations

import pytest

from .connection_factory import ConnectionFactory
from .programs import run_seed


@pytest.mark.parametrize("seed", range(8))
async def test_random_operations_lose_nothing_and_end(
    factory: ConnectionFactory, seed: int
) -> None:
    await run_seed(factory, seed)
