"""Connections over several devices.  How many a process has is fixed when it begins, so these tests
run in one of their own (tests/transport/test_rails.py).
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
    """Before leaks are looked for."""


@pytest.fixture(autouse=True)
def no_rail_comes_back_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rails, "FIRST_DELAY", 1e6)
    monkeypatch.setattr(rails, "MAX_DELAY", 1e6)
