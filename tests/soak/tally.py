"""Counts of operations and verified bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """Counts of operations and of verified bytes, and the errors."""

    done: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    wrong: list[str] = field(default_factory=list)

    def count(self, what: str, size: int = 0) -> None:
        self.done[what] += 1
        self.bytes += size

    def take(self) -> Tally:
        """The counts since the last call."""
        taken = Tally(self.done.copy(), self.bytes, self.wrong.copy())
        self.done.clear()
        self.bytes = 0
        self.wrong.clear()
        return taken
