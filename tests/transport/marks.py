"""Marks of tests that need not run in all four ways; see conftest.py."""

from __future__ import annotations

import pytest

one_loop = pytest.mark.one_loop
by_cm = pytest.mark.by_cm
by_tcp = pytest.mark.by_tcp
looks = pytest.mark.looks
