"""The generated parts of docs/queue-pair-states.md match the table of states."""

from __future__ import annotations

import re

import pytest

from aiordma._core.qp_states import TRANSITIONS, QPAttrMask, QPState, QPType
from tests.docs.states_page import transitions

ROW = re.compile(r"^\| (\w+) \| (\w+) \| (.*) \| (.*) \|$", re.MULTILINE)
END = re.compile(r"^To (\w+), with no other attribute, from (.*)\.$", re.MULTILINE)


def bits(cell: str) -> int:
    return sum(QPAttrMask[name] for name in re.findall(r"`(\w+)`", cell))


@pytest.mark.parametrize("qp_type", QPType)
def test_the_tables_can_be_read_back(qp_type: QPType) -> None:
    section = transitions().split(f"### {qp_type.name}\n")[1].split("###")[0]
    read = {
        (QPState[row[1]], QPState[row[2]]): (bits(row[3]), bits(row[4]))
        for row in ROW.finditer(section)
        if row[1] != "from"
    }
    for end, sources in END.findall(section):
        read |= {(QPState[name], QPState[end]): (0, 0) for name in re.findall(r"[A-Z]+", sources)}
    state = ~int(QPAttrMask.STATE)
    assert read == {
        (row.current, row.next): (row.required & state, row.optional & state)
        for row in TRANSITIONS.values()
        if row.qp_type is qp_type
    }
