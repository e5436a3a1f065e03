"""Measurement payloads. Both ends compute them, so that they can verify received data."""

from __future__ import annotations

from random import Random

# Offset of the seed of the server's bytes from that of the client's.
SERVER = 1

# Bytes generated per call, because Random is limited to less than 256 MiB. This is a multiple of
# its 4-byte words, so that the result is the same as that of a single call.
PART = 1 << 20


def contents(seed: int, size: int) -> bytes:
    """Return `size` incompressible, pseudorandom bytes generated from `seed`."""
    random = Random(seed)
    return b"".join(random.randbytes(min(PART, size - at)) for at in range(0, size, PART))


def difference(got: bytes | memoryview, expected: bytes) -> str:
    """Describe the first difference between received and expected bytes.

    Returns an empty string if they are equal.
    """
    if len(got) != len(expected):
        return f"{len(got)} bytes instead of {len(expected)}"
    if bytes(got) == expected:  # a memoryview compares item by item
        return ""
    at = next(index for index in range(len(expected)) if got[index] != expected[index])
    return f"byte {at} is {got[at]:#04x} instead of {expected[at]:#04x}"
