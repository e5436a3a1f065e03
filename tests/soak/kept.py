"""The resources of a process, counted by kind, to compare two moments."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from aiordma.testing import Held

# Numbers in targets (of sockets, processes, deleted files) are ignored.
NUMBERS = re.compile(r"\d+")

# The files that the embedded device has open for each local peer.  Two processes that attach to
# each other at the same moment attach twice, which may or may not happen.
PROCESS = "anon_inode:[pidfd]"
PER_LOCAL_PEER = {PROCESS: 1, "socket:[#]": 1, "pipe:[#]": 3}


@dataclass(frozen=True)
class Kept:
    """Open files by kind, threads, objects of the device by class, blocks of the pool."""

    files: Counter[str]
    threads: int
    objects: dict[str, int]
    leases: int

    @classmethod
    def now(cls, leases: int) -> Kept:
        held = Held.now()
        files = Counter(NUMBERS.sub("#", target) for target in held.files.values())
        return cls(files, len(held.threads), dict(held.objects), leases)

    def growth(self, after: Kept) -> list[str]:
        """The growth by kind."""
        pairs = {
            "threads": (self.threads, after.threads),
            "blocks of the pool": (self.leases, after.leases),
        }
        met_twice = min(1, max(0, after.files[PROCESS] - self.files[PROCESS]))
        files = after.files - Counter({kind: n * met_twice for kind, n in PER_LOCAL_PEER.items()})
        for before, later in ((self.files, files), (self.objects, after.objects)):
            for kind in later:
                pairs[kind] = before.get(kind, 0), later[kind]
        return [
            f"{kind}: {was} before, {now} now" for kind, (was, now) in pairs.items() if now > was
        ]
