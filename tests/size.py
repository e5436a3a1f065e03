"""Count the tokens of code and the words of pages in each part of the repository.

    python -m tests.size [--record]

Comments, docstrings, blanks and layout do not count. A program in a string counts like code. The
exit status is 1 if a part is larger than in size.json. ``--record`` writes the current figures
there. A commit that increases a figure says why.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).with_suffix(".json")

# A file belongs to the first part whose pattern matches its path.
PARTS = {
    "tests of the device": r"softdev/tests/",
    "device": r"softdev/",
    "tests of the library": r"(native/)?tests/|conftest\.py",
    "library": r"(aiordma|native)/",
    "around it": r"(integrations|bench|examples|docs)/",
}
PAGES = "words of pages"

OPERATORS = r"->|\.{3}|<<=|>>=|\*\*|//|\+\+|--|&&|\|\||<<|>>|[-+*/%&|^=!<>:]=|[^\w\s]"
C = re.compile(
    r"(?s:/\*.*?\*/)|//[^\n]*"
    rf'|(?P<token>"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|\w[\w.]*|{OPERATORS})'
)
PYTHON = re.compile(
    r'(?ms:^[ \t]*r?"""(?:\\.|[^\\])*?"""[ \t]*$)|#[^\n]*'  # a docstring
    r'|(?s:\w*"""(?P<text>(?:\\.|[^\\])*?)""")'
    rf'|(?P<token>\w*"(?:\\.|[^"\\\n])*"|\w*\'(?:\\.|[^\'\\\n])*\'|\w+|{OPERATORS})'
)
LANGUAGES = dict.fromkeys((".py", ".pyx", ".pxd", ".pyi", ".in"), PYTHON) | dict.fromkeys(
    (".c", ".h"), C
)


def tokens(text: str, language: re.Pattern[str]) -> int:
    """Return the number of names, numbers, operators and strings.

    A trailing comma before a closing bracket does not count, because it is only layout.
    """
    count = 0
    for found in language.finditer(text):
        groups = found.groupdict()
        if groups.get("text"):
            count += tokens(groups["text"], C)
        elif groups["token"]:
            count += groups["token"] != "," or not re.match(r"\s*[)\]}]", text[found.end() :])
    return count


def measure() -> dict[str, tuple[int, int, int]]:
    """Return the number of files, lines, and tokens (or words, for pages) of each part."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = dict.fromkeys([*PARTS, PAGES], (0, 0, 0))
    for name in listed.stdout.splitlines():
        path = ROOT / name
        language = LANGUAGES.get(path.suffix)
        part = next((it for it, pattern in PARTS.items() if re.match(pattern, name)), None)
        if path.suffix == ".md":
            part = PAGES
        elif language is None or part is None:
            continue
        text = path.read_text()
        size = tokens(text, language) if language else len(text.split())
        files, lines, sizes = found[part]
        found[part] = files + 1, lines + text.count("\n"), sizes + size
    return found


def main(arguments: list[str]) -> None:
    """Print the table. Exit with status 1 if a part has grown."""
    measured = measure()
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    print(f"{'':22} files    lines    tokens  recorded")
    grown = []
    for part, (files, lines, size) in measured.items():
        most = recorded.get(part, 0)
        print(f"{part:22} {files:5} {lines:8,} {size:9,} {most:9,}")
        if size > most:
            grown.append(f"{part}: {size - most:,} more")
    if arguments == ["--record"]:
        sizes = {part: size for part, (_, _, size) in measured.items()}
        RECORD.write_text(json.dumps(sizes, indent=4) + "\n")
    elif grown:
        sys.exit(
            "larger than recorded: "
            + "; ".join(grown)
            + "\nMake it smaller, or record it (make size ARGS=--record) and say why in the commit."
        )


if __name__ == "__main__":
    main(sys.argv[1:])
