"""What travels in a measurement: bytes that both ends know, so that each can compare."""

from __future__ import annotations

from random import Random

# What the server sends or keeps has the number after that of what the client does.
SERVER = 1


def contents(seed: int, size: int) -> bytes:
    """The same for the same seed, and incompressible."""
    return Random(seed).randbytes(size)


def difference(got: bytes | memoryview, expected: bytes) -> str:
    """Where the two differ first; empty when they do not."""
    if len(got) != len(expected):
        return f"{len(got)} bytes instead of {len(expected)}"
    if got == expected:
        return ""
    at = next(index for index in range(len(expected)) if got[index] != expected[index])
    return f"byte {at} is {got[at]:#04x} instead of {expected[at]:#04x}"
