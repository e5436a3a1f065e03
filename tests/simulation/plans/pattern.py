"""Payload that the receiver knows in advance."""

from __future__ import annotations

import random

LARGEST = 1 << 16
# The possible offsets of patterns; a wrong message, length or offset differs.
STARTS = 1 << 20


class Wrong(AssertionError):
    """What must not be."""


class Patterns:
    """Patterns, by number."""

    def __init__(self) -> None:
        self._bytes = memoryview(random.Random(1).randbytes(STARTS + LARGEST))

    def of(self, number: int, size: int) -> memoryview:
        """`size` bytes, determined by the number."""
        start = random.Random(number).randrange(STARTS)
        return self._bytes[start : start + size]

    def check(self, what: str, number: int, found: memoryview) -> None:
        """Raise Wrong unless these are the bytes of that number."""
        if found != self.of(number, len(found)):
            raise Wrong(f"{what} of {len(found)} bytes is not what was sent")
