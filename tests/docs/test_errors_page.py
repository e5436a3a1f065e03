"""Tests that each text and class in docs/errors.md exists in the source."""

from __future__ import annotations

import ast
import builtins
import functools
import re

import pytest

from aiordma import errors
from aiordma._transport import auth
from tests.docs.pages import DOCS, ROOT

PAGE = (DOCS / "errors.md").read_text()
ROWS = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+) \|$", PAGE, re.MULTILINE)


@functools.cache
def texts() -> tuple[str, ...]:
    """Return every string in the package, with "..." for interpolated values."""
    found = set()
    for path in (ROOT / "aiordma").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (it.value if isinstance(it, ast.Constant) else "..." for it in node.values)
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return tuple(found)


def matches_source_text(shown: str) -> bool:
    pattern = ".*".join(map(re.escape, shown.removesuffix("...").split("...")))
    return any(re.search(pattern, text, re.DOTALL) for text in texts())


AUTHENTICATION = [
    ROOT / "aiordma" / name
    for name in (
        "_core/authentication.py",
        "_transport/auth.py",
        "_transport/encryption.py",
        "_transport/handshake.py",
    )
]


def raised_by_authentication() -> dict[str, str]:
    """Map the text of every authentication failure to its exception class.

    This includes each AuthenticationError and all errors of the authentication modules, except
    those that indicate a bug in the library.
    """
    found = {}
    for path in (ROOT / "aiordma").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for call in ast.walk(tree):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.args):
                continue
            kind, argument = call.func.id, call.args[0]
            if kind == "InternalError":
                continue
            if kind == "AuthenticationError" or (path in AUTHENTICATION and kind.endswith("Error")):
                found[text_of(argument)] = kind
    return found


def text_of(argument: ast.expr) -> str:
    """Return the message that an expression yields, with "..." for interpolated values."""
    if isinstance(argument, ast.Name):
        return str(getattr(auth, argument.id))
    parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
    return "".join(str(it.value) if isinstance(it, ast.Constant) else "..." for it in parts)


@pytest.mark.parametrize(("text", "kind"), sorted(raised_by_authentication().items()))
def test_errors_page_lists_every_authentication_error(text: str, kind: str) -> None:
    rows = [
        kinds
        for shown, kinds, _ in ROWS
        if re.search(".*".join(map(re.escape, shown.removesuffix("...").split("..."))), text)
    ]
    assert any(f"`{kind}`" in kinds for kinds in rows), f"docs/errors.md lacks {kind}: {text}"


def test_source_scan_finds_known_authentication_errors() -> None:
    texts = raised_by_authentication()
    required = "the peer requires a key: pass the same auth= on both sides"
    assert texts[required] == "AuthenticationError"
    assert texts[auth.NOT_THE_SAME_KEY] == "AuthenticationError"
    assert texts["auth must be bytes, not ..."] == "TypeError"


def test_every_row_of_the_errors_page_is_parsed() -> None:
    assert len(ROWS) > 30
    assert len(ROWS) == len(re.findall(r"^\| `", PAGE, re.MULTILINE))


@pytest.mark.parametrize(("text", "kinds"), [(text, kinds) for text, kinds, _ in ROWS])
def test_error_text_and_types_of_a_row_exist_in_the_source(text: str, kinds: str) -> None:
    assert matches_source_text(text), f"no text of the source: {text}"
    for kind in re.findall(r"`(\w+Error)`", kinds):
        assert hasattr(errors, kind) or hasattr(builtins, kind)
