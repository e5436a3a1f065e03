"""The environment variables that aiordma reads, and a check for unknown variables."""

from __future__ import annotations

import re
from collections.abc import Mapping

PREFIX = "AIORDMA_"

# Every variable needs a row in docs/environment-variables.md. A test compares that page, this list
# and the variables that the code reads.
VARIABLES = (
    "AIORDMA_DEVICE",
    "AIORDMA_EMBEDDED_DEVICES",
    "AIORDMA_EMBEDDED_FAULTS",
    "AIORDMA_EMBEDDED_LINKS",
    "AIORDMA_EMBEDDED_PATH_TIMEOUT",
    "AIORDMA_MONITOR",
    "AIORDMA_NO_DIRECT_WAKE",
    "AIORDMA_SIMULATION_LOG",
    "AIORDMA_SIMULATION_SEEDS",
    "AIORDMA_TRACE",
)

# Kubernetes sets these variables in its pods for a service called "aiordma" or "aiordma-...".
_KUBERNETES_VARIABLE = re.compile(r"\w+_(SERVICE_(HOST|PORT\w*)|PORT(_\d+_(TCP|UDP|SCTP)\w*)?)")


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a warning for each variable that starts with AIORDMA_ but is unknown to aiordma.

    The case of the prefix does not matter. Empty variables and those that Kubernetes sets for a
    service are ignored.
    """
    in_pod = "KUBERNETES_SERVICE_HOST" in environment
    return {
        name: _description(name)
        for name, value in environment.items()
        if value
        and name.upper().startswith(PREFIX)
        and name not in VARIABLES
        and not (in_pod and _KUBERNETES_VARIABLE.fullmatch(name))
    }


def _description(name: str) -> str:
    if nearest := _nearest(name.upper()):
        return f"unknown environment variable {name}: did you mean {nearest}?"
    return (
        f"unknown environment variable {name}: aiordma does not read it "
        "(docs/environment-variables.md lists the variables that it reads)"
    )


def _nearest(name: str) -> str:
    """Return the known variable that `name` is probably a misspelling of, or an empty string."""
    from difflib import get_close_matches  # noqa: PLC0415 - only where a name is wrong

    rest = name.removeprefix(PREFIX)
    known = {variable.removeprefix(PREFIX): variable for variable in VARIABLES}
    suffix_matches = [it for it in known if it == rest or it.endswith(f"_{rest}")]
    candidates = suffix_matches or get_close_matches(rest, known, 1)
    return known[candidates[0]] if candidates else ""
