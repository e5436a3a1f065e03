"""Run the tests of connections over several devices, with one test for each file in the folder
`rails`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import kind_of
from tests.processes import run_python

# These files transfer data over rails and are run on each kind of device. The others are run once.
ON_OTHERS = ("test_failover", "test_striped", "test_striped_operations")


def over_several_devices(file: Path) -> Callable[[str, pytest.Config], None]:
    """Return a test that runs `file` with three devices of the tested kind."""

    def test(device_name: str, pytestconfig: pytest.Config) -> None:
        if (kind := kind_of(device_name)) == "embedded":
            several = {"AIORDMA_EMBEDDED_DEVICES": "3"}
        else:
            several = {"RAILS_DEVICES": f"{kind}0,{kind}1,{kind}2"}
        once = ["--once"] if pytestconfig.getoption("--once") else []
        done = run_python(
            "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
            "--device", device_name, *once, file, **several, timeout=550,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    return test if file.stem in ON_OTHERS else pytest.mark.any_device(test)


for file in (Path(__file__).parent / "rails").glob("test_*.py"):
    globals()[file.stem] = over_several_devices(file)
