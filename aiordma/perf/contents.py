"""The payload of a measurement: bytes that both ends can compute and so compare."""

from __future__ import annotations

from random import Random

# The seed of the server's bytes is that of the client's plus this.
SERVER = 1


def contents(seed: int, size: int) -> bytes:
    """Incompressible bytes, determined by the seed."""
    return Random(seed).randbytes(size)


def difference(got: bytes | memoryview, expected: bytes) -> str:
    """A description of the first difference; empty when there is none."""
    if len(got) != len(expected):
        return f"{len(got)} bytes instead of {len(expected)}"
    if got == expected:
        return ""
    at = next(index for index in range(len(expected)) if got[index] != expected[index])
    return f"byte {at} is {got[at]:#04x} instead of {expected[at]:#04x}"
