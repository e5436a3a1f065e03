"""The vocabulary: the glossary is in order, and words that it replaced do not come back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT

# The folders that are free of the words of BANNED_EVERYWHERE, and of all words of BANNED.
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
CLEAN = (
    "README.md", "CONTRIBUTING.md", "docs", "bench", "examples",
    "aiordma/cli", "aiordma/cm", "aiordma/perf", "aiordma/streams",
    "aiordma/_core", "aiordma/_loop", "aiordma/_memory", "aiordma/_transport",
    "aiordma/async_queue_pair.py", "aiordma/config.py", "aiordma/dmabuf.py", "aiordma/errors.py",
    "aiordma/events.py", "aiordma/mr_pool.py", "aiordma/reconnecting.py", "aiordma/testing.py",
    "aiordma/trace.py", "aiordma/transport.py",
    "tests/cli", "tests/cm", "tests/core", "tests/docs", "tests/examples", "tests/loop",
    "tests/memory", "tests/network", "tests/perf", "tests/programs",
    "tests/soak", "tests/softroce", "tests/software", "tests/transport",
)  # fmt: skip

# Random input; this table itself.
EXEMPT = ("tests/fuzz/corpus/", "tests/docs/test_words.py")

# The word, as a pattern, and what to write instead.
BANNED_EVERYWHERE = {
    "kin": "in-band connect",
    "lie_down|get_up": "park, resume",
    "neighbours?": "local peer",
    "nobody|somebody|anybody|whoever": "name the subject",
}
BANNED = {
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


def files(names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            readable = file.suffix in (".py", ".pyi", ".md", ".c", ".h", ".toml", "")
            exempt = str(file.relative_to(ROOT)).startswith(EXEMPT)
            if readable and not exempt and file.is_file():
                yield file


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        *((pattern, EVERYWHERE) for pattern in BANNED_EVERYWHERE),
        *((pattern, CLEAN) for pattern in BANNED),
    ],
)
def test_no_banned_word(pattern: str, names: tuple[str, ...]) -> None:
    """In pages, names of tests and files in backticks are exempt."""
    word = re.compile(rf"(?<!\w)({pattern})(?!\w)", re.IGNORECASE)
    hits = [
        f"{file.relative_to(ROOT)}:{number}: {line}"
        for file in files(names)
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1)
        if word.search(re.sub(r"`[^`]*`", "", line) if file.suffix == ".md" else line)
    ]
    assert not hits, f"write instead: {(BANNED_EVERYWHERE | BANNED)[pattern]}"
