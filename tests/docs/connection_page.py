"""The generated parts of docs/design.md: diagram and states of a connection, from the one table."""

from __future__ import annotations

from aiordma._core.connection_states import ConnectionState, mermaid


def sections() -> dict[str, str]:
    """The text of each generated part, by its mark."""
    rows = "".join(f"| {member.name} | {member.value} |\n" for member in ConnectionState)
    return {
        "diagram": f"```mermaid\n{mermaid()}```\n",
        "states": f"| state | meaning |\n|---|---|\n{rows}",
    }
