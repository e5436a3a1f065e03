"""docs/security.md: every claim names a test, and these tests exist."""

from __future__ import annotations

import re

from tests.docs.pages import DOCS, ROOT

PAGE = (DOCS / "security.md").read_text()
ROWS = re.findall(r"^\| (?!Claim|---)(.+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
NAMED = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[2])})


def test_every_claim_names_a_test() -> None:
    assert len(ROWS) == len(re.findall(r"^\| (?!Claim)", PAGE, re.MULTILINE))
    assert len(ROWS) > 20
    for claim, _, tests in ROWS:
        assert re.fullmatch(r"`[^`]+`(, `[^`]+`)*", tests), claim


def test_the_tests_are_there() -> None:
    for name in NAMED:
        assert is_there(name), name


def is_there(name: str) -> bool:
    """Whether there is such a test of Python or step of C, or the inputs of a fuzz target."""
    place, _, step = name.replace("::", ": ").partition(": ")
    if place.endswith(".py"):
        found = rf"^(async )?def {step}\("
        text = (ROOT / place).read_text()
    elif step:
        found = rf"^\t.*\b[A-Z_]+\({step}\b"
        text = (ROOT / "softdev" / "tests" / "soft" / f"{place}.c").read_text()
    else:  # a fuzz target, whose kept inputs are replayed
        assert list((ROOT / "softdev" / "tests" / "fuzz" / "corpus" / place).iterdir())
        found = f"'{place}'"
        text = (ROOT / "softdev" / "tests" / "fuzz" / "meson.build").read_text()
    return re.search(found, text, re.MULTILINE) is not None
