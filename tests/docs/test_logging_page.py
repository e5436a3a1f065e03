"""docs/logging.md names every logger of the package, with every level that it uses."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.names import PACKAGE
from tests.docs.pages import DOCS

LEVELS = {"debug", "info", "warning", "error", "critical", "exception", "log"}


def logger_name(call: ast.expr) -> str | None:
    """Of ``logging.getLogger("name")``."""
    match call:
        case ast.Call(func=ast.Attribute(attr="getLogger"), args=[ast.Constant(value=str(name))]):
            return name
    return None


def uses(path: Path) -> Iterator[tuple[str, str]]:
    """Loggers and the names of the methods that are called on them."""
    tree = ast.parse(path.read_text())
    own = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and node.value is not None
        and (name := logger_name(node.value))
    ]
    assert len(own) <= 1, f"{path} has several loggers: this test knows of one per module"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in LEVELS:
            if isinstance(node.value, ast.Name) and node.value.id == "logger":
                yield own[0], node.attr
            elif found := logger_name(node.value):
                yield found, node.attr


def in_code() -> set[tuple[str, str]]:
    found = {use for path in PACKAGE.rglob("*.py") for use in uses(path)}
    # The level of `log` is a variable, with both values (endpoint.py).
    variable = {(name, level) for name, method in found if method == "log"
                for level in ("info", "warning")}  # fmt: skip
    return {
        (name, {"exception": "ERROR"}.get(method, method.upper()))
        for name, method in found | variable
        if method != "log"
    }


def test_the_table_has_every_logger_and_level() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (\w+) \| .+ \|$", (DOCS / "logging.md").read_text(), re.M)
    assert sorted(rows) == sorted(in_code())
    order = [(name, getattr(logging, level)) for name, level in rows]
    assert order == sorted(order)


def test_every_logger_is_below_that_of_the_package() -> None:
    assert all(name.split(".")[0] == "aiordma" for name, _ in in_code())
