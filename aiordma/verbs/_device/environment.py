"""The report of environment variables that aiordma does not know."""

from __future__ import annotations

import os
import warnings
from functools import cache

from aiordma._core.environment import unknown_variables

reported: set[str] = set()
"""Variables that this process has reported."""


def report_unknown_variables() -> None:
    """Warn of each variable AIORDMA_* that aiordma does not know, once for the process."""
    for name, text in unknown_variables(os.environ).items():
        if name not in reported:
            warnings.warn(text, RuntimeWarning, stacklevel=3)
            reported.add(name)


check_environment = cache(report_unknown_variables)
"""The same where it is called often: only the first call looks at the environment."""
