"""What is measured: the operation, how much of it at a time, and how long."""

from __future__ import annotations

from dataclasses import dataclass

OPERATIONS = ("send", "write", "read", "atomic", "stream")
METRICS = ("lat", "bw", "rate")

KIB = 1 << 10
MIB = 1 << 20

ATOMIC = 8
"""Bytes of an atomic operation; there are no others."""

EVERY_SIZE = tuple(1 << power for power in range(1, 24))
"""2 B to 8 MiB, as perftest's --all."""

DEFAULT_SIZE = {"lat": 64, "bw": 64 * KIB, "rate": 64}

# 64 as in most comparisons; perftest has 128.
DEFAULT_DEPTH = 64

LONGEST = 3600.0
"""Seconds of one timed part, at most: a latency costs 8 bytes of memory."""
MOST_ITERATIONS = 100_000_000

# Operations before the timed ones: caches, page tables and the adaptive parts of the device are
# then as they stay.  By judgement; fewer of those that take long by themselves.
WARM_UP, LEAST_WARM_UP, WARM_UP_BYTES = 200, 2, 32 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run, of one size after another.  Raises ValueError for what makes no sense.

    `iterations` operations of each size, over all connections; None: for `duration` seconds.
    `depth` operations are under way on each connection at a time, `batch` of them posted with one
    doorbell.  `verify_all` compares every message and not the first and the last alone.  With `gpu`
    the client's memory is that of a GPU.
    """

    operation: str
    metric: str
    sizes: tuple[int, ...]
    iterations: int | None = None
    duration: float = 1.0
    warm_up: int | None = None
    connections: int = 1
    depth: int = 1
    batch: int = 1
    imm: bool = False
    verify_all: bool = False
    gpu: bool = False

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise ValueError(f"the operation is one of {', '.join(OPERATIONS)}")
        if self.metric not in METRICS:
            raise ValueError(f"what is measured is one of {', '.join(METRICS)}")
        self._check_sizes()
        self._check_amounts()
        if self.batch > 1 and self.operation in ("send", "stream"):
            raise ValueError("a batch has reads, writes and atomics; it cannot hold messages")
        if self.imm and self.operation not in ("send", "write"):
            raise ValueError("immediate data travels with send and write alone")
        if self.imm and self.batch > 1:
            raise ValueError("a batch has no immediate data")
        if self.metric == "lat" and (self.depth > 1 or self.batch > 1):
            raise ValueError(
                "a latency is that of one operation at a time: depth and batch are for bw and rate"
            )
        if self.operation == "stream" and self.depth > 1:
            raise ValueError("a stream has no depth: its buffer decides how much is under way")
        if self.verify_all and self.operation not in ("send", "stream"):
            raise ValueError(
                "verify-all is for send and stream: what writes, reads and atomics leave in memory "
                "is compared anyway"
            )
        if self.gpu and self.operation not in ("write", "read"):
            raise ValueError("memory of a GPU can be written from and read into, and nothing else")
        if self.batch > self.depth:
            raise ValueError(f"a batch of {self.batch} is more than a depth of {self.depth}")

    def _check_sizes(self) -> None:
        if not self.sizes:
            raise ValueError("there is no size to measure")
        if self.operation == "atomic" and self.sizes != (ATOMIC,):
            raise ValueError(f"an atomic operation has {ATOMIC} bytes")
        if self.operation != "send" and min(self.sizes) < 1:
            raise ValueError("only messages can be empty: a size is at least 1")
        if min(self.sizes) < 0:
            raise ValueError("a size is not negative")

    def _check_amounts(self) -> None:
        bounds = {
            "iterations": (1, MOST_ITERATIONS),
            "warm_up": (0, MOST_ITERATIONS),
            "connections": (1, 0xFFFF),
            "depth": (1, 0xFFFF),
            "batch": (1, 0xFFFF),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name.replace('_', '-')} is within {low} and {high}")
        if not 0 < self.duration <= LONGEST:
            raise ValueError(f"a duration is more than 0 and at most {LONGEST:g} seconds")

    @property
    def halved(self) -> bool:
        """Whether a latency is half of a round trip, as perftest has it: there and back again."""
        return self.operation in ("send", "write", "stream")

    def warm_up_for(self, size: int) -> int:
        """Operations of each connection that are not timed."""
        if self.warm_up is not None:
            return self.warm_up
        return max(LEAST_WARM_UP, min(WARM_UP, WARM_UP_BYTES // max(size, 1)))

    def share(self) -> int | None:
        """Operations of each connection; None: until the time is over."""
        return None if self.iterations is None else -(-self.iterations // self.connections)


def default_sizes(operation: str, metric: str) -> tuple[int, ...]:
    return (ATOMIC,) if operation == "atomic" else (DEFAULT_SIZE[metric],)


def default_depth(operation: str, metric: str) -> int:
    return 1 if metric == "lat" or operation == "stream" else DEFAULT_DEPTH
