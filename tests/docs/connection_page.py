"""The generated parts of docs/design.md, from the tables of a connection and of its failover."""

from __future__ import annotations

from aiordma._core.connection_states import ConnectionState, mermaid
from aiordma._transport.failover import TRANSITIONS, FailoverEvent


def sections() -> dict[str, str]:
    """The text of each generated part, by its mark."""
    rows = "".join(f"| {member.name} | {member.value} |\n" for member in ConnectionState)
    arrows = "".join(
        f"    {before.name} --> {after.name}: {event.name}{f' / {step}' if step else ''}\n"
        for (before, event), (after, step) in TRANSITIONS.items()
        if event is not FailoverEvent.ENDED
    )
    return {
        "failover": f"```mermaid\nstateDiagram-v2\n    [*] --> SETTLED\n{arrows}```\n",
        "diagram": f"```mermaid\n{mermaid()}```\n",
        "states": f"| state | meaning |\n|---|---|\n{rows}",
    }
