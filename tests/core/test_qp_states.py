"""The table of queue-pair transitions: a second entry of its contents, the check, the outputs."""

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
    mermaid,
)

ALL = sum(QPAttrMask)


def mask(names: str) -> int:
    return sum(QPAttrMask[name] for name in names.split())


# Written a second time, row by row, from IBTA volume 1 clause 11.2.5.2: required | optional.
EXPECTED = {
    QPType.RC: """
        RESET INIT: PKEY_INDEX PORT ACCESS_FLAGS |
        INIT INIT: | PKEY_INDEX PORT ACCESS_FLAGS
        INIT RTR: AV PATH_MTU DEST_QPN RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER \
            | ALT_PATH ACCESS_FLAGS PKEY_INDEX
        RTR RTS: TIMEOUT RETRY_CNT RNR_RETRY SQ_PSN MAX_QP_RD_ATOMIC \
            | CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE
        RTS RTS: | CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE
        RTS SQD: | EN_SQD_ASYNC_NOTIFY
        SQD RTS: | CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE
        SQD SQD: | PORT AV TIMEOUT RETRY_CNT RNR_RETRY MAX_QP_RD_ATOMIC MAX_DEST_RD_ATOMIC \
            ALT_PATH ACCESS_FLAGS PKEY_INDEX MIN_RNR_TIMER PATH_MIG_STATE
    """,
    QPType.UC: """
        RESET INIT: PKEY_INDEX PORT ACCESS_FLAGS |
        INIT INIT: | PKEY_INDEX PORT ACCESS_FLAGS
        INIT RTR: AV PATH_MTU DEST_QPN RQ_PSN | ALT_PATH ACCESS_FLAGS PKEY_INDEX
        RTR RTS: SQ_PSN | CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE
        RTS RTS: | CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE
        RTS SQD: | EN_SQD_ASYNC_NOTIFY
        SQD RTS: | CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE
        SQD SQD: | AV ALT_PATH ACCESS_FLAGS PKEY_INDEX PATH_MIG_STATE
        SQE RTS: | CUR_STATE ACCESS_FLAGS
    """,
    QPType.UD: """
        RESET INIT: PKEY_INDEX PORT QKEY |
        INIT INIT: | PKEY_INDEX PORT QKEY
        INIT RTR: | PKEY_INDEX QKEY
        RTR RTS: SQ_PSN | CUR_STATE QKEY
        RTS RTS: | CUR_STATE QKEY
        RTS SQD: | EN_SQD_ASYNC_NOTIFY
        SQD RTS: | CUR_STATE QKEY
        SQD SQD: | PKEY_INDEX QKEY
        SQE RTS: | CUR_STATE QKEY
    """,
    QPType.RAW_PACKET: """
        RESET INIT: PORT |
        INIT INIT: |
        INIT RTR: |
        RTR RTS: | RATE_LIMIT
        RTS RTS: | RATE_LIMIT
        RTS SQD: |
        SQD RTS: |
        SQD SQD: |
        SQE RTS: |
    """,
    QPType.XRC_SEND: """
        RESET INIT: PKEY_INDEX PORT ACCESS_FLAGS |
        INIT INIT: | PKEY_INDEX PORT ACCESS_FLAGS
        INIT RTR: AV PATH_MTU DEST_QPN RQ_PSN | ALT_PATH ACCESS_FLAGS PKEY_INDEX
        RTR RTS: TIMEOUT RETRY_CNT RNR_RETRY SQ_PSN MAX_QP_RD_ATOMIC \
            | CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE
        RTS RTS: | CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE
        RTS SQD: | EN_SQD_ASYNC_NOTIFY
        SQD RTS: | CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE
        SQD SQD: | PORT AV TIMEOUT RETRY_CNT RNR_RETRY MAX_QP_RD_ATOMIC ALT_PATH ACCESS_FLAGS \
            PKEY_INDEX PATH_MIG_STATE
    """,
    QPType.XRC_RECV: """
        RESET INIT: PKEY_INDEX PORT ACCESS_FLAGS |
        INIT INIT: | PKEY_INDEX PORT ACCESS_FLAGS
        INIT RTR: AV PATH_MTU DEST_QPN RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER \
            | ALT_PATH ACCESS_FLAGS PKEY_INDEX
        RTR RTS: TIMEOUT SQ_PSN | CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE
        RTS RTS: | CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE
        RTS SQD: | EN_SQD_ASYNC_NOTIFY
        SQD RTS: | CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE
        SQD SQD: | PORT AV TIMEOUT MAX_DEST_RD_ATOMIC ALT_PATH ACCESS_FLAGS PKEY_INDEX \
            MIN_RNR_TIMER PATH_MIG_STATE
    """,
}
RELIABLE = {QPType.RC, QPType.XRC_SEND, QPType.XRC_RECV}


def expected_rows(qp_type: QPType) -> dict[tuple[QPState, QPState], tuple[int, int]]:
    rows = {}
    for line in EXPECTED[qp_type].strip().splitlines():
        step, _, attributes = line.partition(":")
        current, following = (QPState[name] for name in step.split())
        required, optional = (mask(part) for part in attributes.split("|"))
        if current is following:
            optional |= QPAttrMask.STATE
        else:
            required |= QPAttrMask.STATE
        rows[current, following] = required, optional
    for current in QPState:
        if current is not QPState.SQE or qp_type not in RELIABLE:
            state = int(QPAttrMask.STATE)
            rows[current, QPState.RESET] = (
                (state, 0) if current is not QPState.RESET else (0, state)
            )
            rows[current, QPState.ERR] = (state, 0) if current is not QPState.ERR else (0, state)
    del rows[QPState.RESET, QPState.ERR]
    return rows


@pytest.mark.parametrize("qp_type", QPType)
def test_table_against_its_second_entry(qp_type: QPType) -> None:
    actual = {
        (current, following): (int(row.required), int(row.optional))
        for (of, current, following), row in TRANSITIONS.items()
        if of is qp_type
    }
    assert actual == expected_rows(qp_type)


types = st.sampled_from(QPType)
states = st.sampled_from(QPState)
masks = st.builds(sum, st.sets(st.sampled_from([1 << n for n in range(27)])))


@given(types, states, states, masks)
def test_check_agrees_with_the_rule(
    qp_type: QPType, current: QPState, following: QPState, bits: int
) -> None:
    check = check_transition(qp_type, current, following, bits)
    row = expected_rows(qp_type).get((current, following))
    assert check.is_transition == (row is not None)
    if row is None:
        assert (check.missing, check.forbidden) == (0, 0)
    else:
        required, optional = row
        assert check.missing == required - (required & bits)
        assert check.forbidden == bits - (bits & (required | optional))
    assert check.ok == (check.problem() == "")


def test_texts() -> None:
    check = check_transition(
        QPType.RC, QPState.INIT, QPState.RTR, mask("STATE AV PATH_MTU DEST_QPN RQ_PSN QKEY")
    )
    assert check.missing == mask("MAX_DEST_RD_ATOMIC MIN_RNR_TIMER")
    assert check.forbidden == QPAttrMask.QKEY
    assert check.problem() == (
        "RC INIT -> RTR: missing: MIN_RNR_TIMER, MAX_DEST_RD_ATOMIC; forbidden: QKEY"
    )
    assert check_transition(QPType.RC, QPState.RESET, QPState.RTS, ALL).problem() == (
        "RC RESET -> RTS is not a transition; from RESET it goes to: RESET, INIT"
    )
    assert "goes to: nowhere" in check_transition(QPType.RC, QPState.SQE, QPState.RTS, 1).problem()


def test_unknown_bits_are_forbidden_and_named_in_hex() -> None:
    check = check_transition(QPType.RC, QPState.ERR, QPState.RESET, 1 | 1 << 22)
    assert check.forbidden == 1 << 22
    assert "forbidden: 0x400000" in check.problem()
    assert attribute_names(0) == "none"
    assert attribute_names(ALL) == ", ".join(bit.name or "" for bit in QPAttrMask)


@pytest.mark.parametrize("qp_type", QPType)
def test_diagram_draws_every_row(qp_type: QPType) -> None:
    """And nothing else: an arrow from the box is one from each state inside."""
    text = mermaid(qp_type)
    box = re.search(r"^    state working \{\n(.*?)^    \}$", text, re.DOTALL | re.MULTILINE)
    assert box
    inside = {QPState[name] for name in re.findall(r"\b[A-Z]+\b", box[1])}
    drawn = []
    for current, following, label in re.findall(r"^ +(\w+) --> (\w+)(.*)$", text, re.MULTILINE):
        if not label.startswith(": device"):
            from_states = inside if current == "working" else [QPState[current]]
            drawn += [(state, QPState[following]) for state in from_states]
    assert sorted(drawn) == sorted(expected_rows(qp_type))
    assert ("RTS --> SQE: device" in text) == (qp_type not in RELIABLE)
