"""The one table of queue-pair state transitions.

It drives the check before ``ibv_modify_qp`` and the text of its error, the embedded device (the
build runs this file, which needs nothing else, for ``qp_states.h``) and the diagrams in the
documentation.

Sources: InfiniBand Architecture Specification volume 1, clause 10.3.1 (the states) and 11.2.5.2
(Modify Queue Pair, the attributes of each transition); ibv_modify_qp(3), the lists of required
attributes. Where the specification leaves room, the table says what the Linux kernel answers, so
that a diagnosis made here and one made by a kernel driver agree:

- RESET goes to INIT only (and to RESET); it cannot be put into the error state;
- the attributes of a queue pair in RTR cannot be changed: there is no RTR -> RTR;
- no transition takes ``CAP``: a queue pair is not resized;
- ``RATE_LIMIT`` is for raw packet queue pairs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from enum import IntEnum, IntFlag
from functools import lru_cache
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple


class QPType(IntEnum):
    """Transport service of a queue pair: ``enum ibv_qp_type``."""

    RC = 2
    UC = 3
    UD = 4
    RAW_PACKET = 8
    XRC_SEND = 9
    XRC_RECV = 10


class QPState(IntEnum):
    """State of a queue pair: ``enum ibv_qp_state``."""

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6


class QPAttrMask(IntFlag):
    """The attributes of a modify or query, as a mask: ``enum ibv_qp_attr_mask``."""

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


# Plain numbers: flags take a while to be put together, and this is done at every import.
_M = SimpleNamespace(**{bit.name or "": int(bit) for bit in QPAttrMask})
_NONE = 0
NO_ATTRIBUTES = QPAttrMask(0)
_KNOWN = sum(QPAttrMask)  # not ~QPAttrMask(0): that has the bits between the known ones as well

# What a queue pair of each type has at all. A rule below names an attribute once; a type that
# lacks the attribute neither needs nor takes it.
_COMMON = _M.STATE | _M.CUR_STATE | _M.EN_SQD_ASYNC_NOTIFY | _M.PKEY_INDEX | _M.PORT | _M.SQ_PSN
_CONNECTED = (
    _COMMON | _M.ACCESS_FLAGS | _M.AV | _M.PATH_MTU | _M.DEST_QPN | _M.RQ_PSN
    | _M.ALT_PATH | _M.PATH_MIG_STATE
)  # fmt: skip
_REQUESTER = _M.TIMEOUT | _M.RETRY_CNT | _M.RNR_RETRY | _M.MAX_QP_RD_ATOMIC
_RESPONDER = _M.MIN_RNR_TIMER | _M.MAX_DEST_RD_ATOMIC
_ATTRIBUTES: Mapping[QPType, int] = {
    QPType.RC: _CONNECTED | _REQUESTER | _RESPONDER,
    QPType.UC: _CONNECTED,
    QPType.UD: _COMMON | _M.QKEY,
    QPType.RAW_PACKET: _M.STATE | _M.PORT | _M.RATE_LIMIT,
    QPType.XRC_SEND: _CONNECTED | _REQUESTER,
    # The target side of XRC acknowledges, so it has a timeout, but it requests nothing.
    QPType.XRC_RECV: _CONNECTED | _M.TIMEOUT | _RESPONDER,
}
_RELIABLE = frozenset({QPType.RC, QPType.XRC_SEND, QPType.XRC_RECV})

# From, to, required, optional; for every type, less what the type lacks. STATE is understood.
_IDENTITY = _M.PKEY_INDEX | _M.PORT | _M.QKEY | _M.ACCESS_FLAGS
_RUNNING = (
    _M.CUR_STATE | _M.QKEY | _M.ACCESS_FLAGS | _M.ALT_PATH | _M.PATH_MIG_STATE | _M.MIN_RNR_TIMER
)
_RULES: tuple[tuple[QPState, QPState, int, int], ...] = (
    (QPState.RESET, QPState.INIT, _IDENTITY, _NONE),
    (QPState.INIT, QPState.INIT, _NONE, _IDENTITY),
    (
        QPState.INIT,
        QPState.RTR,
        _M.AV | _M.PATH_MTU | _M.DEST_QPN | _M.RQ_PSN | _RESPONDER,
        _M.PKEY_INDEX | _M.QKEY | _M.ACCESS_FLAGS | _M.ALT_PATH,
    ),
    (QPState.RTR, QPState.RTS, _M.SQ_PSN | _REQUESTER, _RUNNING | _M.RATE_LIMIT),
    (QPState.RTS, QPState.RTS, _NONE, _RUNNING | _M.RATE_LIMIT),
    (QPState.RTS, QPState.SQD, _NONE, _M.EN_SQD_ASYNC_NOTIFY),
    (QPState.SQD, QPState.RTS, _NONE, _RUNNING),
    (
        QPState.SQD,
        QPState.SQD,
        _NONE,
        _IDENTITY | _M.AV | _M.ALT_PATH | _M.PATH_MIG_STATE | _REQUESTER | _RESPONDER,
    ),
    (QPState.SQE, QPState.RTS, _NONE, _M.CUR_STATE | _M.QKEY | _M.ACCESS_FLAGS),
)


class Transition(NamedTuple):
    """One row: what a modify from one state to another must and may carry.

    ``required`` includes ``STATE`` where the state changes; where it stays, ``STATE`` is
    ``optional``. Everything outside ``required | optional`` is forbidden.
    """

    qp_type: QPType
    current: QPState
    next: QPState
    required: QPAttrMask
    optional: QPAttrMask


def _less(qp_type: QPType, current: QPState, following: QPState) -> int:
    """Attributes that a type has, but not on this step, though the rule names them."""
    if current is following is QPState.SQD and qp_type not in _RELIABLE:
        return int(QPAttrMask.PORT)  # 11.2.5.2: only a reliable path may move to another port
    if current is following is QPState.INIT and qp_type is QPType.RAW_PACKET:
        return int(QPAttrMask.PORT)  # the port of a raw queue pair is fixed by RESET -> INIT
    return _NONE


def _rows(qp_type: QPType) -> Iterator[Transition]:
    for current, following, required, optional in _RULES:
        if current is QPState.SQE and qp_type in _RELIABLE:
            continue  # 10.3.1: a reliable queue pair goes to ERR, never to SQE
        allowed = _ATTRIBUTES[qp_type] & ~_less(qp_type, current, following)
        changes = _NONE if current is following else _M.STATE
        yield Transition(
            qp_type,
            current,
            following,
            QPAttrMask((required & allowed) | changes),
            QPAttrMask((optional & allowed) | (_M.STATE & ~changes)),
        )
    # 10.3.1: from everywhere back to RESET, and into ERR; nothing else may be set on the way.
    for current in QPState:
        if current is QPState.SQE and qp_type in _RELIABLE:
            continue
        for following in (QPState.RESET, QPState.ERR):
            if current is QPState.RESET and following is QPState.ERR:
                continue
            if current is following:
                yield Transition(qp_type, current, following, NO_ATTRIBUTES, QPAttrMask.STATE)
            else:
                yield Transition(qp_type, current, following, QPAttrMask.STATE, NO_ATTRIBUTES)


TRANSITIONS: Mapping[tuple[QPType, QPState, QPState], Transition] = MappingProxyType(
    {
        (row.qp_type, row.current, row.next): row
        for qp_type in QPType
        for row in sorted(_rows(qp_type), key=lambda row: (row.current, row.next))
    }
)
"""Every legal transition, by (type, current state, next state)."""


def attribute_names(mask: int) -> str:
    """The attributes of a mask by name, ``"none"`` when there is no bit, unknown bits in hex."""
    names = [bit.name or "" for bit in QPAttrMask if mask & bit]
    unknown = mask & ~_KNOWN
    if unknown:
        names.append(hex(unknown))
    return ", ".join(names) or "none"


def next_states(qp_type: QPType, current: QPState) -> tuple[QPState, ...]:
    """The states that a modify can reach from ``current``, in the order of their numbers."""
    return tuple(state for state in QPState if (qp_type, current, state) in TRANSITIONS)


class TransitionCheck(NamedTuple):
    """The faults of a modify; ``ok`` when there is none.

    ``missing`` are required attributes that the mask lacks, ``forbidden`` those that it must not
    have. Both are empty when ``is_transition`` is false: there is no such row to compare with.
    """

    qp_type: QPType
    current: QPState
    next: QPState
    is_transition: bool
    missing: QPAttrMask
    forbidden: QPAttrMask

    @property
    def ok(self) -> bool:
        """True when the modify is legal."""
        return self.is_transition and not self.missing and not self.forbidden

    def problem(self) -> str:
        """Say what is wrong and what would be right; empty when the modify is legal."""
        if self.ok:
            return ""
        step = f"{self.qp_type.name} {self.current.name} -> {self.next.name}"
        if not self.is_transition:
            there = ", ".join(s.name for s in next_states(self.qp_type, self.current)) or "nowhere"
            return f"{step} is not a transition; from {self.current.name} it goes to: {there}"
        parts = []
        if self.missing:
            parts.append(f"missing: {attribute_names(self.missing)}")
        if self.forbidden:
            parts.append(f"forbidden: {attribute_names(self.forbidden)}")
        return f"{step}: {'; '.join(parts)}"


@lru_cache  # pure, and every connection makes the same few steps
def check_transition(
    qp_type: QPType, current: QPState, next: QPState, mask: int
) -> TransitionCheck:
    """Compare one modify with the table. Raises nothing: the answer says what is wrong.

    ``next`` is ``qp_state`` of the attributes when ``mask`` has ``STATE``, else ``current``
    (the state stays). ``mask`` may hold any bits; unknown ones are forbidden.
    """
    row = TRANSITIONS.get((qp_type, current, next))
    if row is None:
        return TransitionCheck(qp_type, current, next, False, NO_ATTRIBUTES, NO_ATTRIBUTES)
    return TransitionCheck(
        qp_type,
        current,
        next,
        True,
        QPAttrMask(row.required & ~mask),
        QPAttrMask(mask & ~int(row.required | row.optional)),
    )


_HEADER_TOP = """\
/* Generated from aiordma/_core/qp_states.py.
 *
 * Legal transitions of queue-pair states. Numbers are those of enum ibv_qp_type, ibv_qp_state
 * and ibv_qp_attr_mask. A modify is legal when its row is here, (mask & required) == required,
 * and (mask & ~(required | optional)) == 0; without IBV_QP_STATE, "to" is the current state.
 */
#ifndef AIORDMA_SOFT_QP_STATES_H
#define AIORDMA_SOFT_QP_STATES_H

#include <stdint.h>

struct soft_qp_transition {
	uint8_t qp_type;
	uint8_t from;
	uint8_t to;
	uint32_t required;
	uint32_t optional;
};

static const struct soft_qp_transition soft_qp_transitions[] = {
"""


def c_header() -> str:
    """The table as a C header, ``qp_states.h`` of the embedded device."""
    lines = [_HEADER_TOP]
    lines += [
        f"\t{{ {row.qp_type:2d}, {row.current:d}, {row.next:d}, "
        f"0x{row.required:07x}, 0x{row.optional:07x} }},"
        f" /* {row.qp_type.name} {row.current.name} -> {row.next.name} */\n"
        for row in TRANSITIONS.values()
    ]
    lines.append("};\n\n#endif\n")
    return "".join(lines)


def mermaid(qp_type: QPType) -> str:
    """A Mermaid state diagram of one type, for the documentation.

    Solid arrows are modifies; those marked *device* are made by the device itself when an
    operation fails (10.3.1). An arrow from ``working`` leaves each of the states inside.
    """
    steps = [(row.current, row.next) for row in TRANSITIONS.values() if row.qp_type is qp_type]
    ends = (QPState.RESET, QPState.ERR)
    inside = [step for step in steps if not set(ends) & set(step)]
    lines = ["stateDiagram-v2", "    state working {"]
    lines += [f"        {current.name} --> {following.name}" for current, following in inside]
    if qp_type not in _RELIABLE:
        lines.append("        RTS --> SQE: device on error")
    lines += ["    }", "    [*] --> RESET: ibv_create_qp"]
    lines += [
        f"    {current.name} --> {following.name}"
        for current, following in steps
        if current in ends
    ]
    lines += ["    working --> RESET", "    working --> ERR: modify, or device on error"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(c_header())
