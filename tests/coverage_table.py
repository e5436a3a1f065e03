"""Prints one table of the lines that tests run, per folder of Python and C.

    python -m tests.coverage_table PYTHON.json C.json

PYTHON.json is from ``coverage json``, C.json from ``gcovr --json-summary`` (`make coverage`). The
exit status is 1 where a folder is below the percentage that it must reach.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

# What each folder must reach; one that is not listed must reach the value of the folder above. Of
# native/verbs, what only vendors' libraries call does not run here. A higher percentage is a reason
# to raise the number.
LEAST = {
    "aiordma": 93.0,
    "aiordma/_datapath": 89.0,
    "native": 90.0,
    "softdev/src": 95.0,
    "softdev/src/ud": 94.0,
}

Lines = tuple[int, int]
"""How many lines there are, and how many of them ran."""


def least(folder: str) -> float:
    """The percentage that a folder must reach: its own, or that of the closest folder above."""
    while folder not in LEAST:
        folder = str(Path(folder).parent)
    return LEAST[folder]


def read(python: str, c: str) -> dict[str, Lines]:
    """The lines of each folder, from the two reports."""
    folders: defaultdict[str, Lines] = defaultdict(lambda: (0, 0))

    def add(path: str, total: int, ran: int) -> None:
        folder = str(Path(path).parent)
        before = folders[folder]
        folders[folder] = before[0] + total, before[1] + ran

    modules = json.loads(Path(python).read_text())["files"]
    # Without its plugin coverage.py knows nothing of them.
    unseen = {str(it) for it in Path("aiordma").rglob("*.pyx")} - modules.keys()
    if unseen:
        raise SystemExit(f"no lines are known of {', '.join(sorted(unseen))}")
    for path, file in modules.items():
        add(path, file["summary"]["num_statements"], file["summary"]["covered_lines"])
    for file in json.loads(Path(c).read_text())["files"]:
        add(file["filename"], file["line_total"], file["line_covered"])
    return dict(sorted(folders.items()))


def main(python: str, c: str) -> int:
    table = Table("folder", title="lines that tests run")
    for heading in ("lines", "not run", "%", "at least"):
        table.add_column(heading, justify="right")
    failed = False
    for folder, (total, ran) in read(python, c).items():
        percent = 100 * ran / total if total else 100.0
        below = percent < least(folder)
        failed |= below
        row = folder, f"{total:,}", f"{total - ran:,}", f"{percent:.1f}", f"{least(folder):.0f}"
        table.add_row(*row, style="red" if below else None)
    Console().print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
