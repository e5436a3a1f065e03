"""docs/environment-variables.md names every environment variable that aiordma reads."""

from __future__ import annotations

import re

from tests.docs.pages import DOCS, ROOT

SOURCES = {"aiordma": ("*.py", "*.pyx"), "native": ("*.c", "*.h"), "softdev": ("*.c", "*.h")}


def in_code() -> set[str]:
    """Names that the code has as a whole string, as `getenv` and `os.environ` need them."""
    return {
        name
        for folder, patterns in SOURCES.items()
        for pattern in patterns
        for path in (ROOT / folder).rglob(pattern)
        for name in re.findall(r'"(AIORDMA_[A-Z_]+)"', path.read_text())
    }


def test_the_table_has_every_variable_that_the_code_reads() -> None:
    page = (DOCS / "environment-variables.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \| .+ \|$", page, re.M)
    assert rows == sorted(in_code())
