"""Test the warning about environment variables that aiordma does not know."""

from __future__ import annotations

import pytest

from aiordma import testing
from aiordma.verbs._device import environment
from tests.processes import run_python

pytestmark = pytest.mark.any_device

SAYS = (
    "RuntimeWarning: unknown environment variable AIORDMA_EMBEDDED_FAULT: did you mean "
    "AIORDMA_EMBEDDED_FAULTS?"
)
OPENS = """
import sys
import aiordma
print("imported", file=sys.stderr)
from aiordma import verbs
for _ in range(2):
    verbs.find_device("embedded0").open().close()
"""


def test_opening_a_device_warns_once_about_unknown_variables() -> None:
    done = run_python("-c", OPENS, AIORDMA_EMBEDDED_FAULT="register=1")
    before, _, after = done.stderr.partition("imported")
    assert before == ""
    assert after.count(SAYS) == 1
    assert run_python("-c", OPENS).stderr == "imported\n"
    failed = run_python("-W", "error", "-c", OPENS, AIORDMA_EMBEDDED_FAULT="register=1")
    assert failed.returncode == 1
    assert SAYS in failed.stderr


@pytest.mark.needs("faults")
def test_simulation_warns_once_about_unknown_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(_: testing.World) -> int:
        return 5

    monkeypatch.setattr(environment, "reported", set())
    monkeypatch.setenv("AIORDMA_SIMULATION_SEED", "61")
    says = "^unknown environment variable AIORDMA_SIMULATION_SEED: did you mean AIORDMA_SIMULATION"
    with pytest.warns(RuntimeWarning, match=says):
        assert testing.simulate(main) == 5
    assert testing.simulate(main) == 5
