"""Tests that every claim of docs/security.md names tests, and that these exist."""

from __future__ import annotations

import re

from tests.docs.pages import DOCS, ROOT

PAGE = (DOCS / "security.md").read_text()
CLAIMS = re.findall(r"^\| ([A-Z]\d+) \|", PAGE.partition("## Tests")[0], re.MULTILINE)
TESTS = dict(re.findall(r"^\| ([A-Z]\d+) \| (.+) \|$", PAGE.partition("## Tests")[2], re.MULTILINE))
NAMED = sorted({name for tests in TESTS.values() for name in re.findall(r"`([^`]+)`", tests)})


def test_every_security_claim_cites_tests() -> None:
    assert len(CLAIMS) > 20
    assert list(TESTS) == CLAIMS
    for claim, tests in TESTS.items():
        assert re.fullmatch(r"`[^`]+`(, `[^`]+`)*", tests), claim


def test_tests_cited_by_security_claims_exist() -> None:
    for name in NAMED:
        assert exists(name), name


def exists(name: str) -> bool:
    """Return whether a Python test, C test step or fuzz target of this name exists."""
    place, _, step = name.replace("::", ": ").partition(": ")
    if place.endswith(".py"):
        found = rf"^(async )?def {step}\("
        text = (ROOT / place).read_text()
    elif step:
        found = rf"^\t.*\b[A-Z_]+\((?:\w+\()?{step}\b"
        text = (ROOT / "softdev" / "tests" / "soft" / f"{place}.c").read_text()
    else:  # a fuzz target with a corpus to replay
        assert list((ROOT / "softdev" / "tests" / "fuzz" / "corpus" / place).iterdir())
        found = f"'{place}'"
        text = (ROOT / "softdev" / "tests" / "fuzz" / "meson.build").read_text()
    return re.search(found, text, re.MULTILINE) is not None
