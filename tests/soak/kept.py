"""What a process holds, counted by kind, so that two moments far apart can be compared."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from aiordma.testing import Held

# Which one it is does not matter: the number of a socket, of a process, of a deleted file.
NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class Kept:
    """Open files by what they are, threads, objects of the device by class, blocks of the pool."""

    files: Counter[str]
    threads: int
    objects: dict[str, int]
    leases: int

    @classmethod
    def now(cls, leases: int) -> Kept:
        held = Held.now()
        files = Counter(NUMBERS.sub("#", target) for target in held.files.values())
        return cls(files, held.threads, dict(held.objects), leases)

    def growth(self, after: Kept) -> list[str]:
        """What there is more of."""
        pairs = {
            "threads": (self.threads, after.threads),
            "blocks of the pool": (self.leases, after.leases),
        }
        for before, later in ((self.files, after.files), (self.objects, after.objects)):
            for kind in later:
                pairs[kind] = before.get(kind, 0), later[kind]
        return [
            f"{kind}: {was} before, {now} now" for kind, (was, now) in pairs.items() if now > was
        ]
