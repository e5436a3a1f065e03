"""Fixtures for connections over several devices.

The number of devices is fixed when a process starts, so these tests run in a separate process
(tests/transport/test_rails.py).
"""

from __future__ import annotations

import os

import pytest

from aiordma import verbs
from aiordma._transport import rails

if not {"AIORDMA_EMBEDDED_DEVICES", "RAILS_DEVICES"} & os.environ.keys():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def opened(device: verbs.Device) -> None:
    """Set up the device before the first leak check."""


@pytest.fixture(autouse=True)
def no_rail_comes_back_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rails, "FIRST_DELAY", 1e6)
    monkeypatch.setattr(rails, "MAX_DELAY", 1e6)
