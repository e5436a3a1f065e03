"""Warnings about unknown environment variables whose names start with AIORDMA_."""

from __future__ import annotations

import os
import warnings
from functools import cache

from aiordma._core.environment import unknown_variables

reported: set[str] = set()
"""The variables this process has already warned about."""


def report_unknown_variables() -> None:
    """Warn about unknown environment variables named AIORDMA_*, once per variable and process."""
    for name, text in unknown_variables(os.environ).items():
        if name not in reported:
            warnings.warn(text, RuntimeWarning, stacklevel=3)
            reported.add(name)


check_environment = cache(report_unknown_variables)
"""Call `report_unknown_variables` the first time; later calls do nothing."""
