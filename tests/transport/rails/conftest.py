"""Fixtures for connections over several devices.

The number of devices is fixed when a process starts, so these tests run in a separate process
(tests/transport/test_rails.py).
"""

from __future__ import annotations

import os

import pytest

from aiordma import verbs
from aiordma._transport import rails

HAS_SEVERAL_DEVICES = bool({"AIORDMA_EMBEDDED_DEVICES", "RAILS_DEVICES"} & os.environ.keys())

if not HAS_SEVERAL_DEVICES:
    collect_ignore_glob = ["test_*.py"]  # has no effect on files named on the command line


@pytest.fixture(scope="session", autouse=True)
def several_devices() -> None:
    """Fail instead of waiting for rails that cannot exist."""
    if not HAS_SEVERAL_DEVICES:
        pytest.fail("needs three devices: set AIORDMA_EMBEDDED_DEVICES=3", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def opened(several_devices: None, device: verbs.Device) -> None:
    """Set up the device before the first leak check."""


@pytest.fixture(autouse=True)
def no_rail_comes_back_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rails, "FIRST_DELAY", 1e6)
    monkeypatch.setattr(rails, "MAX_DELAY", 1e6)
