"""Measurement settings, such as the operation, its sizes and the duration."""

from __future__ import annotations

from dataclasses import dataclass

OPERATIONS = ("send", "write", "read", "atomic", "stream")
QP_TYPES = ("rc", "uc", "ud")
METRICS = ("lat", "bw", "rate")

KIB = 1 << 10
MIB = 1 << 20

ATOMIC = 8
"""The size of every atomic operation, in bytes."""

UD_SIZE = 1024
"""The size of the largest datagram measured by default.

A datagram of this size fits into a single packet on most networks.
"""
EVERY_SIZE = tuple(1 << power for power in range(1, 24))
"""The sizes measured by perftest's `--all` option, from 2 bytes to 8 MiB."""

DEFAULT_SIZE = {"lat": 64, "bw": 64 * KIB, "rate": 64}

# The default depth is 64, as in most benchmark comparisons. The default of perftest is 128.
DEFAULT_DEPTH = 64

MAX_DURATION = 540.0
"""The maximum duration of a timed part, in seconds.

It is one minute shorter than the server's `Limits.silence`.
"""
MAX_ITERATIONS = 100_000_000
MAX_INLINE = 1 << 16

# By default, a warm-up has at most WARM_UP operations, with at most WARM_UP_BYTES in total. It has
# at least MIN_WARM_UP operations, even if these exceed WARM_UP_BYTES. The warm-up fills caches and
# page tables, and gives adaptive parts of the device time to settle. The values are estimates.
WARM_UP, MIN_WARM_UP, WARM_UP_BYTES = 200, 2, 32 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a run. A run measures one or more operation sizes in turn.

    Attributes:
        operation: The kind of operation.
        metric: The quantity to measure.
        sizes: The operation sizes, in bytes.
        iterations: The total number of operations to time for each size, across all connections. If
            None, each size is measured for `duration` seconds.
        duration: The time to measure each size, in seconds. Not used if `iterations` is given.
        warm_up: The number of untimed operations to run on each connection before timing starts. If
            None, the number depends on the operation size.
        connections: The number of connections.
        depth: The number of operations in flight per connection.
        batch: The number of operations posted with one doorbell.
        imm: Whether to send immediate data.
        verify_all: Whether to verify every message instead of only the first and last message.
        gpu: Whether the client uses GPU memory.
        bidirectional: Whether the server responds to each operation with the same operation. If
            True, an operation counts as in flight until the response has arrived.
        qp: The type of plain queue pairs to measure. If empty, aiordma connections are measured.
        inline: The maximum number of bytes to send inline. Requires `qp`.
        moderation: The number of operations per completion. Requires `qp`.

    Raises:
        ValueError: If a setting is out of range, or if settings contradict each other.
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
    bidirectional: bool = False
    qp: str = ""
    inline: int = 0
    moderation: int = 1

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise ValueError(
                f"operation must be one of {', '.join(OPERATIONS)}, not {self.operation!r}"
            )
        if self.metric not in METRICS:
            raise ValueError(f"metric must be one of {', '.join(METRICS)}, not {self.metric!r}")
        self._check_sizes()
        self._check_amounts()
        self._check_queue_pair()
        if self.bidirectional and (
            self.metric == "lat" or self.operation not in ("send", "write") or self.batch > 1
        ):
            raise ValueError(
                "bidirectional requires the metric bw or rate, the operation send or write, and a "
                "batch size of 1"
            )
        if self.batch > 1 and self.operation in ("send", "stream"):
            raise ValueError("batch is supported only for write, read and atomic")
        if self.imm and self.operation not in ("send", "write"):
            raise ValueError("immediate data is supported only for send and write")
        if self.imm and self.batch > 1:
            raise ValueError("batch and immediate data cannot be combined")
        if self.metric == "lat" and (self.depth > 1 or self.batch > 1):
            raise ValueError(
                "depth and batch must be 1 for lat, which measures one operation at a time"
            )
        if self.operation == "stream" and self.depth > 1:
            raise ValueError(
                "depth is not supported for stream; the stream's buffer limits the data in flight"
            )
        if self.verify_all and self.operation not in ("send", "stream"):
            raise ValueError(
                "verify-all is supported only for send and stream; other operations are always "
                "verified"
            )
        if self.gpu and self.operation not in ("write", "read"):
            raise ValueError("GPU memory is supported only for write and read")
        if self.batch > self.depth:
            raise ValueError(f"batch must not exceed depth: {self.batch} > {self.depth}")

    def _check_queue_pair(self) -> None:
        if not self.qp:
            if self.inline or self.moderation > 1:
                raise ValueError("inline and moderation require plain queue pairs; set qp")
            return
        offered = {"rc": ("send", "write", "read"), "uc": ("send", "write"), "ud": ("send",)}
        if self.operation not in offered.get(self.qp, ()):
            raise ValueError(
                "qp must be rc (for send, write and read), uc (for send and write) or ud (for send)"
            )
        if self.batch > 1 or self.gpu:
            raise ValueError(
                "batch and GPU memory are not supported with plain queue pairs; omit qp"
            )
        if self.inline and self.operation == "read":
            raise ValueError("inline is not supported for read")
        if self.moderation > self.depth:
            raise ValueError(f"moderation must not exceed depth: {self.moderation} > {self.depth}")
        if self.moderation > 1 and self.bidirectional:
            raise ValueError(
                "moderation must be 1 for bidirectional measurements, which wait for each "
                "operation to complete"
            )

    def _check_sizes(self) -> None:
        if not self.sizes:
            raise ValueError("sizes must not be empty")
        if self.operation == "atomic" and self.sizes != (ATOMIC,):
            raise ValueError(f"the size of an atomic operation must be {ATOMIC} bytes")
        if self.operation != "send" and min(self.sizes) < 1:
            raise ValueError("the size must be at least 1; only send supports empty messages")
        if min(self.sizes) < 0:
            raise ValueError(f"the size must be at least 0, not {min(self.sizes)}")

    def _check_amounts(self) -> None:
        bounds = {
            "iterations": (1, MAX_ITERATIONS),
            "warm_up": (0, MAX_ITERATIONS),
            "connections": (1, 0xFFFF),
            "depth": (1, 0xFFFF),
            "batch": (1, 0xFFFF),
            "inline": (0, MAX_INLINE),
            "moderation": (1, 0xFFFF),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(
                    f"{name.replace('_', '-')} must be between {low} and {high}, not {value}"
                )
        if not 0 < self.duration <= MAX_DURATION:
            raise ValueError(
                f"duration must be positive and at most {MAX_DURATION:g} seconds, "
                f"not {self.duration:g}"
            )

    @property
    def halved(self) -> bool:
        """Whether the reported latency is half the round-trip time, as in perftest."""
        return self.operation in ("send", "write", "stream")

    def warm_up_for(self, size: int) -> int:
        """Return the number of untimed warm-up operations per connection."""
        if self.warm_up is not None:
            return self.warm_up
        return max(MIN_WARM_UP, min(WARM_UP, WARM_UP_BYTES // max(size, 1)))

    def iterations_per_connection(self) -> int | None:
        """Return the number of timed operations per connection.

        Returns None if the run is limited by time rather than by operation count.
        """
        return None if self.iterations is None else -(-self.iterations // self.connections)


def default_sizes(operation: str, metric: str, qp: str, every: bool) -> tuple[int, ...]:
    """Return the sizes to measure by default: one size, or every possible power of two."""
    if operation == "atomic":
        return (ATOMIC,)
    sizes = EVERY_SIZE if every else (DEFAULT_SIZE[metric],)
    return tuple(sorted({min(size, UD_SIZE) for size in sizes})) if qp == "ud" else sizes


def default_depth(operation: str, metric: str) -> int:
    return 1 if metric == "lat" or operation == "stream" else DEFAULT_DEPTH
