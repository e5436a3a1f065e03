"""Run scenarios with many seeds: python -m tests.simulation COUNT [FIRST]."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time

from .scenarios import failure


def main(count: int, first: int = 1) -> None:
    seeds, begun = range(first, first + count), time.monotonic()
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for text in pool.imap_unordered(failure, seeds, chunksize=max(1, min(20, count // 20))):
            if text:
                sys.exit(text)
    seconds = time.monotonic() - begun
    print(f"{count} seeds from {first} on in {seconds:.0f} s: {count / seconds:.1f} a second")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
