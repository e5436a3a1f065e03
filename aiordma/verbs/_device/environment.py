"""Warnings about environment variables that look like aiordma's, but that it does not know."""

from __future__ import annotations

import os
import warnings
from functools import cache

from aiordma._core.environment import unknown_variables

reported: set[str] = set()
"""The variables about which this process has already warned."""


def report_unknown_variables() -> None:
    """Warn about unknown environment variables named AIORDMA_*, once per process for each."""
    for name, text in unknown_variables(os.environ).items():
        if name not in reported:
            warnings.warn(text, RuntimeWarning, stacklevel=3)
            reported.add(name)


check_environment = cache(report_unknown_variables)
"""A version of `report_unknown_variables` that is cheap to call often.

Only its first call looks at the environment.
"""
