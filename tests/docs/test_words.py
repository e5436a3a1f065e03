"""The vocabulary: the glossary is in order, and words that it replaced do not come back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT

# Where the words must not come back.
EVERYWHERE = (
    "README.md",
    "CONTRIBUTING.md",
    "aiordma",
    "bench",
    "docs",
    "examples",
    "native",
    "tests",
)

READABLE = (".py", ".pyi", ".pyx", ".pxd", ".md", ".c", ".h", ".toml", ".build", "")
# Random input; this table itself.
EXEMPT = ("tests/fuzz/corpus/", "tests/docs/test_words.py")

# The word, as a pattern, and what to write instead.
BANNED = {
    "kin": "in-band connect",
    "lie_down|get_up": "park, resume",
    "neighbours?": "local peer",
    "nobody|somebody|anybody|whoever": "name the subject",
    "everybody": "name the subject",
    "plainly": "fast path, try_..._fast",
    "parcels?": "payload",
    "hush|unask|rouse|nudge|glances?": "disarm, rearm, hold_polling, schedule_step, brief_spin",
    "bells?": "notify pipe",
    "incarnation": "fork generation",
    "hollow": "zero-fill",
    "let_downs": "timeouts",
    "lingers": "idle_timeout",
    "in vain": "miss",
    "untold": "noop_answer",
    "said_goodbye|last_word": "goodbye_sent, peer_close_error",
    "knock|knocks|knocked": "connect attempt, accepted",
}


def terms() -> list[tuple[str, str, str]]:
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", (DOCS / "glossary.md").read_text(), re.M)
    return [row for row in rows if row[0] != "term"]


def test_the_glossary_is_in_order() -> None:
    names = [name.casefold() for name, _, _ in terms()]
    assert names == sorted(set(names))


@pytest.mark.parametrize(("name", "meaning", "source"), terms())
def test_a_term_has_one_sentence_and_a_source(name: str, meaning: str, source: str) -> None:
    assert re.fullmatch(r"[A-Z0-9][^.]*\.", meaning), name
    assert source.strip(), name


def files() -> Iterator[Path]:
    for name in EVERYWHERE:
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            readable = file.suffix in READABLE
            exempt = str(file.relative_to(ROOT)).startswith(EXEMPT)
            if readable and not exempt and file.is_file():
                yield file


@pytest.mark.parametrize("pattern", BANNED)
def test_no_banned_word(pattern: str) -> None:
    """In pages, names of tests and files in backticks are exempt."""
    word = re.compile(rf"(?<!\w)({pattern})(?!\w)", re.IGNORECASE)
    hits = [
        f"{file.relative_to(ROOT)}:{number}: {line}"
        for file in files()
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1)
        if word.search(re.sub(r"`[^`]*`", "", line) if file.suffix == ".md" else line)
    ]
    assert not hits, f"write instead: {BANNED[pattern]}"
