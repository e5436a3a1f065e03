"""Test that docs/environment-variables.md has exactly the variables that the code reads."""

from __future__ import annotations

import re

from aiordma._core.environment import VARIABLES
from tests.docs.pages import DOCS, ROOT

SOURCES = {
    "aiordma": ("*.py", "*.pyx"),
    "integrations": ("*.py", "*.c", "*.h"),
    "native": ("*.c", "*.h"),
    "softdev": ("*.c", "*.h"),
}
LIST = ROOT / "aiordma" / "_core" / "environment.py"
OTHERS = {"AIORDMA_NUMPY"}  # a tensor transport of Ray, not a variable


def in_code() -> set[str]:
    """Return all names that are string literals in the code, as in `getenv("...")`."""
    return {
        name
        for folder, patterns in SOURCES.items()
        for pattern in patterns
        for path in (ROOT / folder).rglob(pattern)
        if path != LIST
        for name in re.findall(r'"(AIORDMA_[A-Z_]+)"', path.read_text())
    } - OTHERS


def test_table_lists_every_variable_used_in_the_code() -> None:
    page = (DOCS / "environment-variables.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \| .+ \|$", page, re.M)
    assert rows == sorted(in_code()) == list(VARIABLES)
