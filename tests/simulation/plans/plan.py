"""The plan of a connection, computed from its seed, so that both ends have the same plan."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from aiordma import Config

from .pattern import LARGEST

KINDS = {"messages": 4, "memory": 3}

CLIENT, SERVER = "client", "server"
# Ways to end, with their weights. `leaves`: the client's task is cancelled at a random moment.
ENDINGS = {
    f"{CLIENT} closes": 6,
    f"{SERVER} closes": 4,
    f"{CLIENT} aborts": 2,
    f"{SERVER} aborts": 2,
    f"{CLIENT} leaves": 4,
}

# Sizes around which the implementation changes.
BORDERS = (0, 1, 1016, 1024, 4096, 8184, 8192, LARGEST)

KEY = b"known to all hosts"

CONFIGS = {
    "default": Config(pool_limit=1 << 30),
    # Limits that are reached soon, and a short keep-alive.
    "small": Config(
        eager_size=1024,
        data_receives=4,
        control_receives=4,
        send_queue=16,
        fetch_ahead=64 << 10,
        lend_quota=1 << 20,
        keep_alive=0.5,
        pool_limit=1 << 30,
    ),
    "sealed": Config(pool_limit=1 << 30),
}

SECURITY: dict[str, dict[str, Any]] = {
    "default": {},
    "small": {"auth": KEY},
    # Operations on memory are a part of the plans.
    "sealed": {"auth": KEY, "encrypt": "messages"},
}


@dataclass(frozen=True)
class Plan:
    """One connection. `strict`: neither end is ever killed, so only planned failures are
    allowed."""

    seed: int
    config: str
    strict: bool
    kind: str
    ending: str
    largest: int
    count: int

    @classmethod
    def of(cls, seed: int, config: str, *, strict: bool) -> Plan:
        chance = random.Random(seed)
        (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
        (ending,) = chance.choices(list(ENDINGS), list(ENDINGS.values()))
        largest = min(LARGEST, int(2 ** chance.uniform(10, 26)))
        return cls(seed, config, strict, kind, ending, largest, chance.randint(1, 8))

    def chance(self, *what: object) -> random.Random:
        """A random generator for each part of the plan."""
        return random.Random(f"{self.seed} {what}")

    def number(self, *what: object) -> int:
        """The number of the payload, for `Patterns`."""
        return self.chance("bytes", *what).getrandbits(62)

    def size(self, *what: object) -> int:
        return size(self.chance("size", *what), self.largest)

    @property
    def leaves(self) -> bool:
        """One end disconnects at a random moment."""
        return self.ending.endswith("leaves")


def size(chance: random.Random, largest: int) -> int:
    """A random size: each power of two equally often, and sizes near the limits."""
    if chance.random() < 0.2:
        border = chance.choice([border for border in BORDERS if border <= largest])
        return min(largest, max(0, border + chance.choice((-1, 0, 0, 1))))
    return int(2 ** chance.uniform(-1, math.log2(largest)))
