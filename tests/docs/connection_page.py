"""Generate parts of docs/design.md from the tables of handshakes, connections and failover."""

from __future__ import annotations

from collections.abc import Callable

from aiordma._core.connection_states import _ROWS, ConnectionState
from aiordma._transport.failover import TRANSITIONS, FailoverEvent
from aiordma._transport.handshake import STEPS, Action, Direction, Message, Sides


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
        "handshake": f"```text\n{sequence(STEPS['tcp', True])}```\n",
        "steps": steps(),
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


def sequence(sides: Sides) -> str:
    """Return a diagram of a handshake. Each side continues until it has to receive a message."""
    lines = ["client                             server"]
    remaining = [list(side) for side in sides]
    arrived = [0, 0]
    while any(remaining):
        for side, steps in enumerate(remaining):
            while steps and (steps[0].direction is not Direction.RECEIVE or arrived[side]):
                direction, what = steps.pop(0)
                if direction is Direction.RECEIVE:
                    arrived[side] -= 1
                elif direction is Direction.SEND:
                    arrived[1 - side] += 1
                    arrow = f" {what.name} ".center(24, "-")
                    lines.append(" " * 9 + (f"<{arrow}" if side else f"{arrow}>"))
                else:
                    lines.append(" " * 35 + what.name if side else what.name)
    return "\n".join([*lines, ""])


def steps() -> str:
    """Return the tables of the messages and actions, and of each method's steps."""
    meanings = "".join(
        f"| {it.name} | {it.value} |\n" for it in [*Message, *Action] if it is not Action.END
    )
    lines = ["| method | key | side | steps |\n|---|---|---|---|\n"]
    for (method, key), sides in STEPS.items():
        for name, side in zip(Sides._fields, sides, strict=True):
            cells = method, "yes" if key else "no", name, f"`{' '.join(map(str, side))}`"
            lines.append(f"| {' | '.join(cells)} |\n")
    return f"| message or action | meaning |\n|---|---|\n{meanings}\n{''.join(lines)}"
