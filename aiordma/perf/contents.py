"""Measurement payloads. Both ends compute them, so that they can verify received data."""

from __future__ import annotations

from random import Random

# The difference between the seeds of the server's payload and the client's payload.
SERVER = 1

# The number of bytes to generate per call to `Random.randbytes`, which is limited to less than 256
# MiB. Because the generator produces 4-byte words, changing PART to another multiple of 4 does not
# change the contents.
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
    if bytes(got) == expected:  # comparing memoryviews is slower
        return ""
    at = next(index for index in range(len(expected)) if got[index] != expected[index])
    return f"byte {at} is {got[at]:#04x} instead of {expected[at]:#04x}"
