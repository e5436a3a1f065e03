"""Warnings about unknown environment variables whose names start with AIORDMA_."""

from __future__ import annotations

import os
import warnings
from functools import cache

from aiordma._core.environment import unknown_variables

reported: set[str] = set()
"""The names of unknown variables for which a warning has been issued."""


def report_unknown_variables() -> None:
    """Warn about unknown ``AIORDMA_*`` environment variables, but only once for each variable."""
    for name, text in unknown_variables(os.environ).items():
        if name not in reported:
            warnings.warn(text, RuntimeWarning, stacklevel=3)
            reported.add(name)


check_environment = cache(report_unknown_variables)
"""Run `report_unknown_variables` on the first call only."""
