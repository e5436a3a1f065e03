"""The generated parts of docs/connections.md: diagram and tables from the one table of states."""

from __future__ import annotations

from aiordma._core.connection_states import TRANSITIONS, ConnectionState, LifecycleEvent, mermaid


def sections() -> dict[str, str]:
    """The text of each generated part, by its mark."""
    return {
        "diagram": f"```mermaid\n{mermaid()}```\n",
        "states": rows("state", ConnectionState),
        "events": rows("event", LifecycleEvent),
        "transitions": transitions(),
    }


def rows(title: str, kind: type[ConnectionState] | type[LifecycleEvent]) -> str:
    lines = [f"| {title} | meaning |", "|---|---|"]
    lines += [f"| {member.name} | {member.value} |" for member in kind]
    return "\n".join(lines) + "\n"


def transitions() -> str:
    """One row for each transition."""
    lines = ["| state | event | next state | error of the waiters |", "|---|---|---|---|"]
    for (state, event), row in TRANSITIONS.items():
        cause = row.cause.value if row.cause is not None else "-"
        lines.append(f"| {state.name} | {event.name} | {row.next.name} | {cause} |")
    return "\n".join(lines) + "\n"
