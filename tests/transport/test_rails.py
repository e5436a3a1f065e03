"""Connections over several devices: the tests of the folder `rails`."""

from __future__ import annotations

import pytest

from tests.conftest import kind_of
from tests.processes import run_python


@pytest.mark.timeout(1600)  # in an emulated machine
def test_over_several_devices(device_name: str, pytestconfig: pytest.Config) -> None:
    """With embedded devices all of them; with others, three of a kind, those of what the rails
    carry, also when one breaks."""
    if (kind := kind_of(device_name)) == "embedded":
        several = {"AIORDMA_EMBEDDED_DEVICES": "3"}
    else:
        several = {"AIORDMA_RAILS": f"{kind}0,{kind}1,{kind}2"}
    once = ["--once"] if pytestconfig.getoption("--once") else []
    done = run_python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--device", device_name,
        *once, "tests/transport/rails", **several, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
