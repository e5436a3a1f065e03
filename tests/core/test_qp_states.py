"""Tests of the table of queue-pair transitions, its checks and its generated output."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._core.qp_states import (
    TRANSITIONS,
    QPAttrMask,
    QPState,
    QPType,
    attribute_names,
    check_transition,
)
from tests.docs.states_page import mermaid

ALL = sum(QPAttrMask)


def mask(names: str) -> int:
    return sum(QPAttrMask[name] for name in names.split())


RELIABLE = {QPType.RC, QPType.XRC_SEND, QPType.XRC_RECV}


@pytest.mark.parametrize("qp_type", QPType)
def test_every_state_can_reset_and_fail(qp_type: QPType) -> None:
    """These transitions need no other attributes. Only RESET to ERR is not allowed."""
    state = QPAttrMask.STATE
    for current in QPState:
        there = current is not QPState.SQE or qp_type not in RELIABLE
        for following in (QPState.RESET, QPState.ERR):
            row = TRANSITIONS.get((qp_type, current, following))
            if there and (current, following) != (QPState.RESET, QPState.ERR):
                assert row
                assert row[3:] == ((0, state) if current is following else (state, 0))
            else:
                assert row is None


types = st.sampled_from(QPType)
states = st.sampled_from(QPState)
masks = st.builds(sum, st.sets(st.sampled_from([1 << n for n in range(27)])))


@given(types, states, states, masks)
def test_check_transition_matches_the_transition_table(
    qp_type: QPType, current: QPState, following: QPState, bits: int
) -> None:
    check = check_transition(qp_type, current, following, bits)
    row = TRANSITIONS.get((qp_type, current, following))
    assert check.is_transition == (row is not None)
    if row is None:
        assert (check.missing, check.forbidden) == (0, 0)
    else:
        assert check.missing == row.required - (row.required & bits)
        assert check.forbidden == bits - (bits & (row.required | row.optional))
    assert check.ok == (check.problem() == "")


def test_check_transition_problem_names_attributes_and_states() -> None:
    check = check_transition(
        QPType.RC, QPState.INIT, QPState.RTR, mask("STATE AV PATH_MTU DEST_QPN RQ_PSN QKEY")
    )
    assert check.missing == mask("MAX_DEST_RD_ATOMIC MIN_RNR_TIMER")
    assert check.forbidden == QPAttrMask.QKEY
    assert check.problem() == (
        "RC INIT -> RTR: missing: MIN_RNR_TIMER, MAX_DEST_RD_ATOMIC; forbidden: QKEY"
    )
    assert check_transition(QPType.RC, QPState.RESET, QPState.RTS, ALL).problem() == (
        "RC RESET -> RTS is not a transition; valid states after RESET: RESET, INIT"
    )
    assert (
        "valid states after SQE: none"
        in check_transition(QPType.RC, QPState.SQE, QPState.RTS, 1).problem()
    )


def test_unknown_attribute_bits_are_forbidden_and_shown_in_hex() -> None:
    check = check_transition(QPType.RC, QPState.ERR, QPState.RESET, 1 | 1 << 22)
    assert check.forbidden == 1 << 22
    assert "forbidden: 0x400000" in check.problem()
    assert attribute_names(0) == "none"
    assert attribute_names(ALL) == ", ".join(bit.name or "" for bit in QPAttrMask)


@pytest.mark.parametrize("qp_type", QPType)
def test_diagram_contains_every_transition(qp_type: QPType) -> None:
    """There are no other arrows. An arrow from the box stands for one from each state in it."""
    text = mermaid(qp_type)
    box = re.search(r"^    state working \{\n(.*?)^    \}$", text, re.DOTALL | re.MULTILINE)
    assert box
    inside = {QPState[name] for name in re.findall(r"\b[A-Z]+\b", box[1])}
    drawn = []
    for current, following, label in re.findall(r"^ +(\w+) --> (\w+)(.*)$", text, re.MULTILINE):
        if not label.startswith(": device"):
            from_states = inside if current == "working" else [QPState[current]]
            drawn += [(state, QPState[following]) for state in from_states]
    assert sorted(drawn) == sorted(it[1:] for it in TRANSITIONS if it[0] is qp_type)
    assert ("RTS --> SQE: device" in text) == (qp_type not in RELIABLE)
