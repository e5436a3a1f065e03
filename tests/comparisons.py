"""Every comparison of bench/, with the least work: `make comparisons`.

How long contenders that poll take depends on the other work of the machine, so these are no tests
of `make test`.
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
def test_comparison_runs_and_judges_every_contender(name: str) -> None:
    """One run with the least work: every contender runs and every requirement is judged."""
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
