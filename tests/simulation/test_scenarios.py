"""Test each scenario with some seeds, one of them twice. `make simulate` runs more."""

from __future__ import annotations

import pytest

from .scenarios import SCENARIOS

pytestmark = pytest.mark.needs("faults")


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_trace_is_determined_by_its_seed(name: str) -> None:
    traces = [SCENARIOS[name].run(seed) for seed in (1, 2, 3, 1)]
    assert traces[0] == traces[3]
    assert len(set(traces)) == 3
