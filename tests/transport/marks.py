"""Marks for tests that need not run in every combination; see tests/combinations.py."""

from __future__ import annotations

import pytest

one_loop = pytest.mark.one_loop
by_cm = pytest.mark.by_cm
by_tcp = pytest.mark.by_tcp
counts_turns = pytest.mark.counts_turns
sets_polling = pytest.mark.sets_polling
on_pair = pytest.mark.on_pair
on_device = pytest.mark.on_device
