"""Test concurrent operations in random order on both ends, against a model (`programs.py`)."""

from __future__ import annotations

import pytest

from .connection_factory import ConnectionFactory
from .programs import run_seed


@pytest.mark.parametrize("seed", range(8))
async def test_random_concurrent_operations_match_the_model(
    factory: ConnectionFactory, seed: int
) -> None:
    await run_seed(factory, seed)
