"""The table of queue-pair state transitions.

It is used for the check before ``ibv_modify_qp``, the text of its error, and the diagram in the
documentation. The build generates ``qp_steps.py`` from the software device's header
abi/qp_states.h, which cites the sources of the transitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum, IntFlag
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from aiordma._core.qp_steps import STEPS


class QPType(IntEnum):
    """The transport service of a queue pair (``enum ibv_qp_type``)."""

    RC = 2
    UC = 3
    UD = 4
    RAW_PACKET = 8
    XRC_SEND = 9
    XRC_RECV = 10


class QPState(IntEnum):
    """The state of a queue pair (``enum ibv_qp_state``)."""

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6


class QPAttrMask(IntFlag):
    """A mask of queue pair attributes to modify or query (``enum ibv_qp_attr_mask``)."""

    STATE = 1 << 0
    CUR_STATE = 1 << 1
    EN_SQD_ASYNC_NOTIFY = 1 << 2
    ACCESS_FLAGS = 1 << 3
    PKEY_INDEX = 1 << 4
    PORT = 1 << 5
    QKEY = 1 << 6
    AV = 1 << 7
    PATH_MTU = 1 << 8
    TIMEOUT = 1 << 9
    RETRY_CNT = 1 << 10
    RNR_RETRY = 1 << 11
    RQ_PSN = 1 << 12
    MAX_QP_RD_ATOMIC = 1 << 13
    ALT_PATH = 1 << 14
    MIN_RNR_TIMER = 1 << 15
    SQ_PSN = 1 << 16
    MAX_DEST_RD_ATOMIC = 1 << 17
    PATH_MIG_STATE = 1 << 18
    CAP = 1 << 19
    DEST_QPN = 1 << 20
    RATE_LIMIT = 1 << 25


NO_ATTRIBUTES = QPAttrMask(0)
_KNOWN = sum(QPAttrMask)  # unlike ~QPAttrMask(0), without unassigned bits in between


class Transition(NamedTuple):
    """A valid transition, with the attributes that it requires and allows.

    ``STATE`` is required if the state changes, and optional otherwise. All attributes outside
    ``required | optional`` are forbidden.
    """

    qp_type: QPType
    current: QPState
    next: QPState
    required: QPAttrMask
    optional: QPAttrMask


def _rows() -> Iterator[Transition]:
    """Yield all valid transitions: those in the table, and those to RESET and ERR."""
    for qp_type, current, following, required, optional in STEPS:
        # The table omits STATE, which is optional if the state stays the same.
        state_bit = 0 if current == following else QPAttrMask.STATE
        yield Transition(
            QPType(qp_type),
            QPState(current),
            QPState(following),
            QPAttrMask(required | state_bit),
            QPAttrMask(optional | (QPAttrMask.STATE & ~state_bit)),
        )
    # IBTA 10.3.1 allows transitions to RESET and ERR from every state, except from RESET to ERR.
    # They take no attributes other than the state.
    known_states = sorted({(qp_type, current) for qp_type, current, *_ in STEPS})
    for qp_type, current in (*known_states, *((it, QPState.ERR) for it in QPType)):
        for following in (QPState.RESET, QPState.ERR):
            if (current, following) != (QPState.RESET, QPState.ERR):
                required, optional = QPAttrMask.STATE, NO_ATTRIBUTES
                if current == following:
                    required, optional = optional, required
                yield Transition(QPType(qp_type), QPState(current), following, required, optional)


TRANSITIONS: Mapping[tuple[QPType, QPState, QPState], Transition] = MappingProxyType(
    {row[:3]: row for row in sorted(_rows())}
)
"""Every legal transition, by (type, current state, next state)."""


def attribute_names(mask: int) -> str:
    """Return the attribute names in a mask, with unknown bits in hex, or ``"none"`` for 0."""
    names = [bit.name or "" for bit in QPAttrMask if mask & bit]
    unknown = mask & ~_KNOWN
    if unknown:
        names.append(hex(unknown))
    return ", ".join(names) or "none"


def next_states(qp_type: QPType, current: QPState) -> tuple[QPState, ...]:
    """Return the states to which ``current`` can be modified, in numerical order."""
    return tuple(state for state in QPState if (qp_type, current, state) in TRANSITIONS)


class TransitionCheck(NamedTuple):
    """The result of checking an ibv_modify_qp(3) call against the table of transitions.

    ``missing`` contains the required attributes that the mask lacks. ``forbidden`` contains the
    attributes in the mask that the transition does not allow. If the table has no row for the two
    states, ``is_transition`` is false and both masks are empty.
    """

    qp_type: QPType
    current: QPState
    next: QPState
    is_transition: bool
    missing: QPAttrMask
    forbidden: QPAttrMask

    @property
    def ok(self) -> bool:
        """Whether the call is valid."""
        return self.is_transition and not self.missing and not self.forbidden

    def problem(self) -> str:
        """Return a description of the problem, or an empty string if the call is valid."""
        if self.ok:
            return ""
        step = f"{self.qp_type.name} {self.current.name} -> {self.next.name}"
        if not self.is_transition:
            states = next_states(self.qp_type, self.current)
            valid = ", ".join(state.name for state in states) or "none"
            return f"{step} is not a transition; valid states after {self.current.name}: {valid}"
        parts = []
        if self.missing:
            parts.append(f"missing: {attribute_names(self.missing)}")
        if self.forbidden:
            parts.append(f"forbidden: {attribute_names(self.forbidden)}")
        return f"{step}: {'; '.join(parts)}"


@lru_cache  # all connections make the same few transitions
def check_transition(
    qp_type: QPType, current: QPState, next: QPState, mask: int
) -> TransitionCheck:
    """Check an ibv_modify_qp(3) call, and return what is wrong with it, if anything.

    Pass ``qp_state`` as ``next`` if ``mask`` has ``STATE``. Otherwise pass ``current``, because the
    state does not change. Unknown bits in ``mask`` are forbidden attributes.
    """
    row = TRANSITIONS.get((qp_type, current, next))
    if row is None:
        return TransitionCheck(
            qp_type,
            current,
            next,
            is_transition=False,
            missing=NO_ATTRIBUTES,
            forbidden=NO_ATTRIBUTES,
        )
    return TransitionCheck(
        qp_type,
        current,
        next,
        is_transition=True,
        missing=QPAttrMask(row.required & ~mask),
        forbidden=QPAttrMask(mask & ~int(row.required | row.optional)),
    )
