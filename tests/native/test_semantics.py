"""Tests of the page semantics.md against the embedded device.

The files, clauses and tests that the page names must exist. It must have every clause that the
device's comments cite.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEVICE = ROOT / "softdev" / "src"
TESTS = ROOT / "softdev" / "tests"
PAGE = ROOT / "softdev" / "docs" / "semantics.md"

# Matches citations of IBTA volume 1: sections, compliance statements and annexes. A section outside
# chapters 9 to 14 is recognized only after "IBTA".
CITED = re.compile(
    r"IBTA (?:vol 1, )?(?P<named>\d+\.\d+(?:\.\d+)*)"
    r"|\b(?P<section>(?:9|1[0-4])\.\d+\.\d+(?:\.\d+)*)\b"
    r"|\b(?P<statement>[Co]\d+-\d+(?:\.\d+)*)\b"
    r"|\b(?P<annex>[Aa]nnex A\d+(?:\.\d+)*)"
)
MANUAL_PAGE = re.compile(r"ibv_\w+\(3\)")


@dataclass(frozen=True)
class Row:
    rule: str
    clauses: tuple[str, ...]
    files: tuple[str, ...]
    program: str
    function: str


def clauses_of(text: str) -> set[str]:
    found = {match[match.lastgroup or 0] for match in CITED.finditer(text)}
    return {clause[0].lower() + clause[1:] if "nnex" in clause else clause for clause in found}


def rows() -> list[Row]:
    table = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| ") or cells[0] == "Rule":
            continue
        rule, clauses, files, test = cells
        program, function = test.strip("`").split(": ")
        names = tuple(name.strip("`") for name in files.split(", "))
        table.append(Row(rule, tuple(clauses.split(", ")), names, program, function))
    return table


TABLE = rows()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.rule[:40])
def test_semantics_row_refers_to_existing_clauses_and_tests(row: Row) -> None:
    text = "".join(path.read_text() for name in row.files for path in DEVICE.rglob(name))
    cited = clauses_of(text) | set(MANUAL_PAGE.findall(text))
    for clause in row.clauses:
        assert clause in cited
    if row.program.endswith(".py"):
        assert f"\ndef {row.function}(" in (ROOT / row.program).read_text()
        return
    program = next(TESTS.glob(f"*/{row.program}.c")).read_text()
    assert re.search(rf"^static (?:inline )?void {row.function}\(", program, re.MULTILINE)
    called = rf"^\t(?:.*\b)?(?:[A-Z_]+\((?:\w+\()?{row.function}\b|{row.function}\()"
    assert re.search(called, program, re.MULTILINE), "never called"


def test_every_cited_clause_is_in_the_table() -> None:
    there = {clause for row in TABLE for clause in row.clauses}
    missing = {
        clause: path.name
        for path in sorted(DEVICE.rglob("*.[ch]"))
        for clause in clauses_of(path.read_text()) - there
    }
    assert not missing


def test_semantics_table_has_no_duplicate_rules() -> None:
    assert len({row.rule for row in TABLE}) == len(TABLE)
