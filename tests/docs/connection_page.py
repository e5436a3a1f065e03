"""Generate parts of docs/design.md from the tables of connection and failover states."""

from __future__ import annotations

from collections.abc import Callable

from aiordma._core.connection_states import _ROWS, ConnectionState
from aiordma._transport.failover import TRANSITIONS, FailoverEvent


def sections() -> dict[str, str]:
    """Return the generated sections of the page by name."""
    rows = "".join(f"| {member.name} | {member.value} |\n" for member in ConnectionState)
    arrows = "".join(
        f"    {before.name} --> {after.name}: {event.name}{f' / {step_name(step)}' if step else ''}"
        "\n"
        for (before, event), (after, step) in TRANSITIONS.items()
        if event is not FailoverEvent.ENDED
    )
    return {
        "failover": f"```mermaid\nstateDiagram-v2\n    [*] --> SETTLED\n{arrows}```\n",
        "diagram": f"```mermaid\n{mermaid()}```\n",
        "states": f"| state | meaning |\n|---|---|\n{rows}",
    }


def step_name(step: Callable[..., None] | None) -> str:
    """Return the name of a failover's step, or an empty string for no step."""
    return "" if step is None else step.__name__.removeprefix("_")


def mermaid() -> str:
    """Return a diagram of the connection states. Events with the same next state share an arrow."""
    lines = ["stateDiagram-v2", "    [*] --> CONNECTING"]
    for state, rows in _ROWS.items():
        events: dict[ConnectionState, list[str]] = {}
        for event, row in rows.items():
            events.setdefault(row.next, []).append(event.name)
        lines += [f"    {state.name} --> {to.name}: {', '.join(of)}" for to, of in events.items()]
    return "\n".join([*lines, "    CLOSED --> [*]", ""])
