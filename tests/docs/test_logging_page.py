"""Test that docs/monitoring.md lists every logger of the package with its levels."""

from __future__ import annotations

import logging
import re

from tests.docs.names import PACKAGE
from tests.docs.pages import DOCS

LEVEL = r"(debug|info|warning|error|critical|exception|log)\b"
OWN = re.compile(r'^logger\b.*\bgetLogger\("([\w.]+)"\)$', re.MULTILINE)
USED = re.compile(rf"\blogger\.{LEVEL}")
DIRECTLY = re.compile(rf'\bgetLogger\("([\w.]+)"\)\.{LEVEL}')
# The levels at which the package calls those logger methods that are not named after a level.
LEVELS = {"exception": ("ERROR",), "log": ("INFO", "WARNING")}


def in_code() -> set[tuple[str, str]]:
    """Return the loggers and the levels at which they log."""
    found: set[tuple[str, str]] = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        own = OWN.findall(text)
        assert len(own) <= 1, f"{path} has several loggers: this test knows of one per module"
        methods = [(own[0], used) for used in USED.findall(text)] + DIRECTLY.findall(text)
        for name, method in methods:
            found.update((name, level) for level in LEVELS.get(method, (method.upper(),)))
    return found


def test_table_lists_every_logger_and_level() -> None:
    page = (DOCS / "monitoring.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| ([A-Z]+) \| .+ \|$", page, re.M)
    assert sorted(rows) == sorted(in_code())
    order = [(name, getattr(logging, level)) for name, level in rows]
    assert order == sorted(order)
    assert all(name.split(".")[0] == "aiordma" for name, _ in rows)
