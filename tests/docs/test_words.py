"""The vocabulary: the glossary is in order, and words that it replaced do not come back."""

from __future__ import annotations

import functools
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
    "softdev",
    "tests",
)

READABLE = (".py", ".pyi", ".pyx", ".pxd", ".md", ".c", ".h", ".toml", ".build", "")
# Random input; this table itself.
EXEMPT = ("softdev/tests/fuzz/corpus/", "tests/docs/test_words.py")

# The word, as a pattern, and what to write instead.
BANNED = {
    "kin": "in-band connect",
    "lie_down|get_up": "park, resume",
    "neighbours?": "local peer",
    "nobody|somebody|anybody|whoever": "name the subject",
    "everybody": "name the subject",
    # Of one thread, process or peer; people are "users who want".
    "who (is|was|has|cannot|comes|leaves|records|starts|uses|waits|wakes)": "name the subject",
    "plainly": "fast path, try_..._fast",
    "parcels?": "payload",
    "hush|unask|rouse|nudge|glances?": "disarm, rearm, hold_polling, schedule_step, brief_spin",
    "bells?": "notify pipe",
    "incarnation": "fork generation",
    "hollow": "zero-fill",
    "let_downs": "timeouts",
    "look_for_wires?|looks_for_wire": "refresh_wires, read_wires",
    "lingers": "idle_timeout",
    "in vain": "miss",
    "untold": "noop_answer",
    "said_goodbye|last_word": "goodbye_sent, peer_close_error",
    r"turns? of (the|its) (event )?loop|loop's (next )?turns?": "iteration of the loop",
    "knock|knocks|knocked": "connect attempt, accepted",
}


def terms() -> list[tuple[str, str, str]]:
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", (DOCS / "glossary.md").read_text(), re.M)
    return [row for row in rows if row[0] != "term"]


def test_the_glossary_is_in_order() -> None:
    names = [name.casefold() for name, _, _ in terms()]
    assert names == sorted(set(names))


def test_a_term_has_one_sentence_and_a_source() -> None:
    for name, meaning, source in terms():
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


@functools.cache
def lines_with_any() -> list[tuple[str, str]]:
    """The place and the text of each line with any banned word.

    In pages, names of tests and files in backticks are exempt.
    """
    banned = word("|".join(BANNED))
    found = []
    for file in files():
        text = file.read_text(errors="replace")
        if file.suffix == ".md":
            text = re.sub(r"`[^`\n]*`", "", text)
        if banned.search(text):
            place = file.relative_to(ROOT)
            lines = enumerate(text.splitlines(), 1)
            found += [(f"{place}:{n}", line) for n, line in lines if banned.search(line)]
    return found


def word(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w)({pattern})(?!\w)", re.IGNORECASE)


@pytest.mark.parametrize("pattern", BANNED)
def test_no_banned_word(pattern: str) -> None:
    hits = [f"{place}: {line}" for place, line in lines_with_any() if word(pattern).search(line)]
    assert not hits, f"write instead: {BANNED[pattern]}"
