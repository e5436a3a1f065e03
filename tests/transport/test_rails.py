"""Connections over several devices: the tests of the folder `rails`."""

from __future__ import annotations

import pytest

from aiordma import verbs
from tests.processes import run_python


@pytest.mark.timeout(1600)  # in an emulated machine
def test_over_several_devices(device: verbs.Device) -> None:
    """With embedded devices all of them; with others those of what the rails carry."""
    alike = [it.name for it in verbs.devices() if it.library.name == device.library.name]
    several = "AIORDMA_EMBEDDED_DEVICES", "3"
    if device.name != "embedded0":
        assert len(alike) > 1
        several = "AIORDMA_RAILS", ",".join(alike[:2])
    done = run_python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/transport/rails",
        **dict([several]), timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
