"""The payload of a measurement: bytes that both ends can compute and so compare."""

from __future__ import annotations

from random import Random

# The seed of the server's bytes is that of the client's plus this.
SERVER = 1

# Bytes that are made at a time: Random makes less than 256 MiB. A multiple of its words of 4 bytes,
# so that they are the bytes that it makes in one go.
PART = 1 << 20


def contents(seed: int, size: int) -> bytes:
    """Incompressible bytes, determined by the seed."""
    random = Random(seed)
    return b"".join(random.randbytes(min(PART, size - at)) for at in range(0, size, PART))


def difference(got: bytes | memoryview, expected: bytes) -> str:
    """A description of the first difference; empty when there is none."""
    if len(got) != len(expected):
        return f"{len(got)} bytes instead of {len(expected)}"
    if bytes(got) == expected:  # a memoryview compares item by item
        return ""
    at = next(index for index in range(len(expected)) if got[index] != expected[index])
    return f"byte {at} is {got[at]:#04x} instead of {expected[at]:#04x}"
