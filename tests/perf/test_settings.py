"""Tests of valid and contradictory settings."""

from __future__ import annotations

from typing import Any

import pytest

from aiordma.perf.server import Limits
from aiordma.perf.settings import (
    EVERY_SIZE,
    MAX_DURATION,
    METRICS,
    OPERATIONS,
    Settings,
    default_depth,
)
from aiordma.perf.settings import default_sizes as sizes_of

BASE: dict[str, Any] = {"operation": "write", "metric": "bw", "sizes": (64,), "depth": 8}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("every", [True, False])
def test_default_settings_are_valid(operation: str, metric: str, every: bool) -> None:
    Settings(
        operation=operation,
        metric=metric,
        sizes=sizes_of(operation, metric, "", every),
        depth=default_depth(operation, metric),
    )


def test_datagram_sizes_fit_one_packet() -> None:
    assert sizes_of("send", "bw", "ud", every=False) == (1024,)
    assert sizes_of("send", "lat", "ud", every=False) == (64,)
    assert sizes_of("send", "lat", "ud", every=True) == EVERY_SIZE[:10]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"operation": "swap"}, "operation must be one of send, write, "),
        ({"metric": "speed"}, "metric must be one of lat, bw, rate"),
        ({"sizes": ()}, "sizes must not be empty"),
        ({"sizes": (64, 0)}, "only send supports empty messages"),
        ({"operation": "send", "sizes": (-1,)}, "the size must be at least 0, not -1"),
        ({"operation": "atomic"}, "an atomic operation must be 8 bytes"),
        ({"iterations": 0}, "iterations must be between 1 and "),
        ({"warm_up": -1}, "warm-up must be between 0 and "),
        ({"connections": 0}, "connections must be between 1 and "),
        ({"depth": 1 << 16}, "depth must be between 1 and 65535"),
        ({"duration": 0.0}, "duration must be positive"),
        ({"duration": float("nan")}, "duration must be positive"),
        ({"duration": 541.0}, "at most 540 seconds"),
        ({"operation": "send", "batch": 2}, "batch is supported only for write, read and atomic"),
        ({"operation": "read", "imm": True}, "data is supported only for send and write"),
        ({"batch": 2, "imm": True}, "batch and immediate data cannot be combined"),
        ({"batch": 9}, "batch must not exceed depth: 9 > 8"),
        ({"metric": "lat"}, "one operation at a time"),
        ({"operation": "stream"}, "depth is not supported for stream"),
        ({"verify_all": True}, "verify-all is supported only for send and stream"),
        ({"operation": "atomic", "sizes": (8,), "gpu": True}, "GPU memory is supported only"),
        ({"operation": "read", "bidirectional": True}, "bidirectional requires the metric bw or"),
        ({"inline": 64}, "require plain queue pairs"),
        ({"moderation": 2}, "require plain queue pairs"),
        ({"qp": "xrc"}, "qp must be rc "),
        ({"qp": "ud"}, "or ud .for send"),
        ({"qp": "rc", "batch": 2}, "not supported with plain queue pairs"),
        ({"qp": "rc", "operation": "read", "inline": 8}, "inline is not supported for read"),
        ({"qp": "rc", "moderation": 9}, "moderation must not exceed depth: 9 > 8"),
        ({"qp": "rc", "moderation": 2, "bidirectional": True}, "moderation must be 1"),
        ({"qp": "rc", "inline": 1 << 17}, "inline must be between 0 and 65536"),
    ],
)
def test_contradictory_settings_are_rejected(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Settings(**{**BASE, **changes})


def test_maximum_duration_is_shorter_than_the_server_timeout() -> None:
    assert Settings(**BASE, duration=MAX_DURATION).duration < Limits().silence


def test_every_size_covers_the_same_sizes_as_perftest() -> None:
    assert (EVERY_SIZE[0], EVERY_SIZE[-1], len(EVERY_SIZE)) == (2, 1 << 23, 23)


def test_warm_up_has_fewer_iterations_for_large_sizes() -> None:
    settings = Settings(operation="send", metric="lat", sizes=(0,))
    assert [settings.warm_up_for(size) for size in (0, 64, 1 << 20, 1 << 30)] == [200, 200, 32, 2]
    asked = Settings(operation="send", metric="lat", sizes=(0,), warm_up=7)
    assert asked.warm_up_for(1 << 30) == 7


def test_iterations_are_divided_among_the_connections() -> None:
    settings = Settings(operation="send", metric="lat", sizes=(1,), iterations=10, connections=3)
    assert settings.iterations_per_connection() == 4
    assert Settings(operation="send", metric="lat", sizes=(1,)).iterations_per_connection() is None
