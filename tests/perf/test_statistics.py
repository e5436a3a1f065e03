"""Tests of the statistics of samples, compared with numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiordma.perf.statistics import Summary, Throughput, rank, slices, tail

SAMPLES = st.lists(st.floats(min_value=0, max_value=1e6, allow_subnormal=False), min_size=1)


@given(SAMPLES)
def test_quantiles_match_numpy(samples: list[float]) -> None:
    """numpy's `inverted_cdf` is the nearest-rank method."""
    summary, ordered = Summary.of(samples), sorted(samples)
    assert summary.p99 == ordered[rank(len(samples), 990)]
    assert summary.p99_9 == ordered[rank(len(samples), 999)]
    for part, value in (
        (0, summary.min),
        (0.5, summary.median),
        (0.9, summary.p90),
        (1, summary.max),
    ):
        assert value == np.quantile(samples, part, method="inverted_cdf")
    assert summary.mean == pytest.approx(np.mean(samples))
    assert summary.deviation == pytest.approx(np.std(samples), abs=1e-6)
    assert summary.min <= summary.mean <= summary.max
    assert summary.count == len(samples)


@example(25_000, 541)  # 25_000 * (541 / 1000) > 13_525
@given(st.integers(1, 10**9), st.integers(0, 1000))
def test_rank_satisfies_the_nearest_rank_definition(count: int, permille: int) -> None:
    index = rank(count, permille)
    assert 0 <= index < count
    assert (index + 1) * 1000 >= permille * count
    assert index == 0 or index * 1000 < permille * count


def test_summary_raises_value_error_without_samples() -> None:
    with pytest.raises(ValueError, match="no samples to summarise"):
        Summary.of([])


def test_scaled_summary_multiplies_all_times_by_the_factor() -> None:
    summary = Summary.of([1.0, 2.0, 4.0])
    micro = summary.scaled(1e6)
    assert (micro.count, micro.min, micro.median, micro.max) == (3, 1e6, 2e6, 4e6)
    assert micro.deviation == pytest.approx(summary.deviation * 1e6)


def test_throughput_converts_units() -> None:
    throughput = Throughput(operations=1000, size=1 << 20, seconds=2.0)
    assert throughput.mb_per_s == 500
    assert throughput.gbit_per_s == pytest.approx(500 * 8 * 1.048576 / 1000)
    assert throughput.mmsg_per_s == 0.0005


@given(SAMPLES)
def test_tail_starts_at_the_minimum_and_ends_at_the_maximum(samples: list[float]) -> None:
    points = tail(samples)
    assert points[0] == (min(samples), 1.0)
    assert points[-1] == (max(samples), 1 / len(samples))
    for value, above in points:
        assert sum(sample >= value for sample in samples) >= round(above * len(samples))
    values, parts = zip(*points, strict=True)
    assert list(values) == sorted(values)
    assert list(parts) == sorted(parts, reverse=True)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 1000))), st.integers(1, 8))
@example([(4, 10), (1, 0), (4, 30)], 3)  # a sample that is too near
@example([(2, 10)], 1)  # the end is far behind the last sample
def test_throughput_slices_add_up_to_the_total(steps: list[tuple[int, int]], rest: int) -> None:
    """The throughput of the whole is therefore between the minimum and the peak."""
    marks, second, done = [], 0, 0
    for seconds, operations in steps:
        second, done = second + seconds, done + operations
        marks.append((float(second), done))
    whole = Throughput(done + rest, 1 << 20, float(second + rest))
    found = slices(whole, marks, gap=2)
    assert sum(one.seconds for one in found) == whole.seconds
    assert sum(one.operations for one in found) == whole.operations
    assert all(one.seconds >= 2 for one in found) or len(found) == 1
    speeds = [one.mb_per_s for one in found]
    assert min(speeds) <= whole.mb_per_s <= max(speeds)
