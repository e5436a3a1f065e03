"""What one end of a connection does, and what it has at hand."""

from __future__ import annotations

from dataclasses import dataclass

from aiordma import Connection

from .pattern import Patterns
from .plan import CLIENT, SERVER, Plan


@dataclass
class Part:
    """The part of one end."""

    conn: Connection
    plan: Plan
    side: str
    patterns: Patterns

    def __post_init__(self) -> None:
        """What a kind of part has beside."""

    @property
    def peer(self) -> str:
        """The other side."""
        return SERVER if self.side == CLIENT else CLIENT

    async def run(self) -> None:
        raise NotImplementedError
