"""Run every comparison of bench/ with as little work as possible: `make comparisons`.

`make test` does not run these tests, because the times of contenders that poll depend on the
machine's other work.
"""

from __future__ import annotations

import json
import re

import pytest

from bench import peers
from bench.__main__ import COMPARISONS, IN_ALL
from bench.lanes import Options


# The perftest comparison is tested in softdev/tests/programs.
@pytest.mark.parametrize("name", [name for name in IN_ALL if name != "perftest"])
def test_comparison_runs_and_evaluates_every_contender(name: str) -> None:
    """Each contender runs once with as little work as possible."""
    comparison = COMPARISONS[name]
    data = comparison.measure(Options(turns=1, share=0.01, most=64 << 10))
    assert data
    for entry in data:
        package = re.match("ucxx|nixl", entry["who"])
        if package and not peers.is_installed(package[0]):
            assert entry["seconds"] == []
        else:
            (seconds,) = entry["seconds"]
            assert 0 < seconds < 60
    requirements = list(comparison.requirements(json.loads(json.dumps(data))))
    assert requirements or name == "perftest"
    for requirement in requirements:
        if not re.search("ucxx|nixl", requirement.what):
            assert requirement.reached is not None
