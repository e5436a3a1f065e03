"""The generated parts of docs/queue-pair-states.md: diagrams and tables from the one table."""

from __future__ import annotations

from collections.abc import Iterable

from aiordma._core.qp_states import NO_ATTRIBUTES, TRANSITIONS, QPAttrMask, QPState, QPType, mermaid
from aiordma.verbs._qp.qp_attributes import MASK_OF_FIELD

ENDS = (QPState.RESET, QPState.ERR)


def sections() -> dict[str, str]:
    """The text of each generated part, by its mark."""
    return {"diagrams": diagrams(), "attributes": attributes(), "transitions": transitions()}


def diagrams() -> str:
    """One diagram for all types that have the same states and steps."""
    types_of: dict[str, list[QPType]] = {}
    for qp_type in QPType:
        types_of.setdefault(mermaid(qp_type), []).append(qp_type)
    return "\n".join(
        f"{_join(qp_type.name for qp_type in types)}:\n\n```mermaid\n{diagram}```\n"
        for diagram, types in types_of.items()
    )


def attributes() -> str:
    """The argument of ``modify`` for each attribute."""
    fields: dict[QPAttrMask, list[str]] = {}
    for field, bit in MASK_OF_FIELD.items():
        fields.setdefault(bit, []).append(f"`{field}`")
    rows = (f"| `{bit.name}` | {', '.join(names)} |\n" for bit, names in sorted(fields.items()))
    return "| attribute | arguments of `modify` |\n|---|---|\n" + "".join(rows)


def transitions() -> str:
    """A row for each step, but those to the ends, and the types that take it alike."""
    types: dict[tuple[QPState, QPState, QPAttrMask, QPAttrMask], list[str]] = {}
    for row in sorted(TRANSITIONS.values(), key=lambda row: (row.current, row.next)):
        if row.next in ENDS:
            assert (row.required | row.optional) & ~QPAttrMask.STATE == NO_ATTRIBUTES
        else:
            step = row.current, row.next, row.required, row.optional
            types.setdefault(step, []).append(row.qp_type.name)
    lines = ["| from | to | type | requires | may set |\n|---|---|---|---|---|\n"]
    for (current, following, required, optional), names in types.items():
        cells = current.name, following.name, ", ".join(names), _bits(required), _bits(optional)
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def _bits(mask: QPAttrMask) -> str:
    """The attributes of a state, without the state itself, which is an argument of the step."""
    names = [f"`{bit.name}`" for bit in QPAttrMask if mask & ~QPAttrMask.STATE & bit]
    return ", ".join(names) or "-"


def _join(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
