"""Payload that the receiver knows in advance, compared at the speed of memory."""

from __future__ import annotations

import mmap
import random
from pathlib import Path

import numpy as np

LARGEST = 64 << 20
# The possible offsets of patterns in the file; a wrong message, length or offset differs.
STARTS = 1 << 20

# The bytes compared at a time, which fit the processor's cache.
PIECE = 256 << 10


class Wrong(AssertionError):
    """An error that the soak has found."""


def write_patterns(path: Path, seed: int) -> None:
    """The file that all processes of a soak share."""
    path.write_bytes(np.random.default_rng(seed).bytes(LARGEST + STARTS))


class Patterns:
    """Patterns of the file, by number; mapped private and read-only, so that they can be
    registered."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        self._bytes = memoryview(self._mapped)

    def forget_copies(self) -> None:
        """While nothing of it is registered: what is private of it is memory of this process.

        The kernel makes such copies of what is registered, also for reading alone (ib_umem_get),
        and keeps them: up to all of the file.
        """
        self._mapped.madvise(mmap.MADV_DONTNEED)

    def of(self, number: int, size: int) -> memoryview:
        """`size` bytes, determined by the number."""
        start = random.Random(number).randrange(STARTS)
        return self._bytes[start : start + size]

    def check(self, what: str, number: int, found: memoryview) -> None:
        """Raise Wrong unless these are the bytes of that number."""
        expected = self.of(number, len(found))
        for start in range(0, len(found), PIECE):
            ours = np.frombuffer(expected[start : start + PIECE], np.uint8)
            theirs = np.frombuffer(found[start : start + PIECE], np.uint8)
            different = np.flatnonzero(ours != theirs)
            if different.size:
                raise Wrong(
                    f"{what} of {len(found)} bytes differs at byte {start + int(different[0])}"
                )
