"""Connections over several devices: the tests of the folder `rails`."""

from __future__ import annotations

import pytest

from tests.processes import run_python


@pytest.mark.any_device
def test_with_three_devices() -> None:
    done = run_python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/transport/rails",
        AIORDMA_EMBEDDED_DEVICES="3",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
