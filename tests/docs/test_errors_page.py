"""docs/errors.md: each text is one that the source has, and each class exists."""

from __future__ import annotations

import ast
import builtins
import functools
import re

import pytest

from aiordma import errors
from tests.docs.pages import DOCS, ROOT

PAGE = (DOCS / "errors.md").read_text()
ROWS = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+) \|$", PAGE, re.MULTILINE)


@functools.cache
def texts() -> tuple[str, ...]:
    """Every string of the package, with "..." for what is filled in."""
    found = set()
    for path in (ROOT / "aiordma").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (it.value if isinstance(it, ast.Constant) else "..." for it in node.values)
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return tuple(found)


def is_a_text(shown: str) -> bool:
    pattern = ".*".join(map(re.escape, shown.removesuffix("...").split("...")))
    return any(re.search(pattern, text, re.DOTALL) for text in texts())


def test_the_page_has_rows() -> None:
    assert len(ROWS) > 30
    assert len(ROWS) == len(re.findall(r"^\| `", PAGE, re.MULTILINE))


@pytest.mark.parametrize(("text", "kinds"), [(text, kinds) for text, kinds, _ in ROWS])
def test_a_row(text: str, kinds: str) -> None:
    assert is_a_text(text), f"no text of the source: {text}"
    for kind in re.findall(r"`(\w+Error)`", kinds):
        assert hasattr(errors, kind) or hasattr(builtins, kind)
