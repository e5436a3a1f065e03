"""Generate the diagram and tables of docs/queue-pair-states.md from the transition table."""

from __future__ import annotations

from aiordma._core.qp_states import NO_ATTRIBUTES, TRANSITIONS, QPAttrMask, QPState, QPType
from aiordma.verbs._qp.qp_attributes import MASK_OF_FIELD

ENDS = (QPState.RESET, QPState.ERR)


def sections() -> dict[str, str]:
    """Return the generated sections of the page by name."""
    diagram = f"```mermaid\n{mermaid(QPType.UC)}```\n"
    return {"diagram": diagram, "attributes": attributes(), "transitions": transitions()}


def mermaid(qp_type: QPType) -> str:
    """Return a Mermaid state diagram for a queue pair type.

    Solid arrows are ``modify`` calls. The device itself makes the transitions marked *device* when
    an operation fails (IBTA 10.3.1). An arrow from ``working`` applies to every state inside it.
    """
    steps = [(row.current, row.next) for row in TRANSITIONS.values() if row.qp_type is qp_type]
    inside = [step for step in steps if not set(ENDS) & set(step)]
    lines = ["stateDiagram-v2", "    state working {"]
    lines += [f"        {current.name} --> {following.name}" for current, following in inside]
    if (QPState.SQE, QPState.RTS) in inside:
        lines.append("        RTS --> SQE: device on error")
    lines += ["    }", "    [*] --> RESET: ibv_create_qp"]
    lines += [
        f"    {current.name} --> {following.name}"
        for current, following in steps
        if current in ENDS
    ]
    lines += ["    working --> RESET", "    working --> ERR: modify, or device on error"]
    return "\n".join(lines) + "\n"


def attributes() -> str:
    """Return a table of the attributes whose ``modify`` arguments have different names."""
    fields: dict[QPAttrMask, list[str]] = {}
    for field, bit in MASK_OF_FIELD.items():
        fields.setdefault(bit, []).append(field)
    lines = ["| attribute | arguments of `modify` |\n|---|---|\n"]
    for bit, names in sorted(fields.items()):
        if names != [str(bit.name).lower()]:
            lines.append(f"| `{bit.name}` | {', '.join(f'`{name}`' for name in names)} |\n")
    return "".join(lines)


def transitions() -> str:
    """Return a table of the transitions to states other than RESET and ERR."""
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
    """List the attributes in `mask` except the state, which every transition sets."""
    names = [f"`{bit.name}`" for bit in QPAttrMask if mask & ~QPAttrMask.STATE & bit]
    return ", ".join(names) or "-"
