"""The number of passed tests in README.md, from what pytest said at the end of each run.

    python tests/counts.py [--check] DEVICE=LOG...

Reads the closing line of pytest in each LOG and writes a row per DEVICE between the marks in
README.md; rows of other devices stay. With --check it writes nothing, and fails where the README
says something else. A run that did not pass counts for nothing.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- counts: written by `make counts` -->\n", "<!-- end of counts -->"
HEAD = "| device | tests passed | skipped |\n|---|---|---|\n"

CLOSING = re.compile(r"^=+ (.*\d+ passed.*) in [\d.]+s.* =+\s*$", re.MULTILINE)
ROW = re.compile(r"^\| `(\w+)` \| (\d+) \| (\d+) \|$", re.MULTILINE)

Counts = dict[str, tuple[int, int]]
"""Passed and skipped by device."""


def parts(readme: str) -> tuple[str, str, str]:
    """What stands before, between and after the marks, which belong to the outer two."""
    start, end = readme.index(BEGIN) + len(BEGIN), readme.index(END)
    return readme[:start], readme[start:end], readme[end:]


def parse(section: str) -> Counts:
    return {row[1]: (int(row[2]), int(row[3])) for row in ROW.finditer(section)}


def render(counts: Counts) -> str:
    rows = (f"| `{name}` | {passed} | {skipped} |\n" for name, (passed, skipped) in counts.items())
    return HEAD + "".join(rows)


def read_log(log: str) -> tuple[int, int]:
    """Passed and skipped of the last run in it.  ValueError unless it passed."""
    found = CLOSING.findall(log)
    if not found:
        raise ValueError("no closing line of pytest that says what passed")
    outcomes = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", found[-1])}
    if unwanted := outcomes.keys() & {"failed", "error", "errors", "deselected"}:
        raise ValueError(f"not a whole run that passed ({', '.join(sorted(unwanted))})")
    return outcomes["passed"], outcomes.get("skipped", 0)


def main(arguments: list[str]) -> str | None:
    check = "--check" in arguments
    before, section, after = parts(README.read_text())
    old = parse(section)
    new = dict(old)
    for argument in arguments:
        if argument != "--check":
            device, _, log = argument.partition("=")
            new[device] = read_log(Path(log).read_text())
    if check:
        return None if new == old else f"README.md says {old}, the runs say {new}: make counts"
    README.write_text(before + render(new) + after)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
