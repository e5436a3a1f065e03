"""Sample statistics: quantiles by nearest rank, and bandwidth and rate in perftest's units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import fsum, sqrt

MIB = 1 << 20


def rank(count: int, permille: int) -> int:
    """Return a quantile's index among `count` sorted samples, using the nearest-rank method."""
    return max(0, -(-count * permille // 1000) - 1)


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary statistics for a set of samples, in the same unit as the samples.

    Each quantile is one of the samples.
    """

    count: int
    min: float
    median: float
    p90: float
    p99: float
    p99_9: float
    max: float
    mean: float
    deviation: float
    """The standard deviation of the samples."""

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        """Compute the statistics of `samples`, or raise ValueError if it is empty."""
        if not samples:
            raise ValueError("no samples to summarise")
        ordered = sorted(samples)
        count = len(ordered)
        mean = min(max(fsum(ordered) / count, ordered[0]), ordered[-1])  # rounding errors
        return cls(
            count,
            min=ordered[0],
            median=ordered[rank(count, permille=500)],
            p90=ordered[rank(count, permille=900)],
            p99=ordered[rank(count, permille=990)],
            p99_9=ordered[rank(count, permille=999)],
            max=ordered[-1],
            mean=mean,
            deviation=sqrt(fsum((sample - mean) ** 2 for sample in ordered) / count),
        )

    def scaled(self, factor: float) -> Summary:
        """Return the same statistics, with all values multiplied by `factor`."""
        return Summary(
            **{
                name: value if name == "count" else value * factor
                for name, value in asdict(self).items()
            }
        )


@dataclass(frozen=True, slots=True)
class Throughput:
    """The bandwidth and operation rate of a series of equal-sized operations."""

    operations: int
    size: int
    seconds: float

    @property
    def mb_per_s(self) -> float:
        """The bandwidth in MiB per second, which perftest calls MB/s."""
        return self.operations * self.size / MIB / self.seconds

    @property
    def gbit_per_s(self) -> float:
        """The bandwidth in units of 10^9 bits per second."""
        return self.operations * self.size * 8 / 1e9 / self.seconds

    @property
    def mmsg_per_s(self) -> float:
        """The rate in millions of operations per second."""
        return self.operations / 1e6 / self.seconds


def slices(whole: Throughput, marks: Sequence[tuple[float, int]], gap: float) -> list[Throughput]:
    """Split a run into intervals, and return each interval's throughput.

    A mark consists of a time in seconds and the number of operations completed up to that time.
    Each mark ends one interval and starts the next. A mark is skipped if either interval would be
    shorter than `gap` seconds. The intervals cover the whole run, so the run's throughput lies
    between the lowest and the highest interval throughput.
    """
    ends = [(0.0, 0)]
    for mark in marks:
        if ends[-1][0] + gap <= mark[0] <= whole.seconds - gap:
            ends.append(mark)
    ends.append((whole.seconds, whole.operations))
    return [
        Throughput(done - before, whole.size, now - then)
        for (then, before), (now, done) in pairwise(ends)
    ]


def tail(samples: Sequence[float], points: int = 100) -> list[tuple[float, float]]:
    """Return points on the complementary cumulative distribution of `samples`.

    Each point consists of a sample and the fraction of samples that are at least as large. The
    fractions are evenly spaced on a logarithmic scale. The last point contains the largest sample.
    """
    ordered = sorted(samples)
    count = len(ordered)
    above = {round(count ** (1 - step / points)) for step in range(points + 1)}
    return [(ordered[count - number], number / count) for number in sorted(above, reverse=True)]
