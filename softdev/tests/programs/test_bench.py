"""Test the comparison of bench/ that runs perftest."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from bench import perftest
from bench.lanes import Options, seconds


def test_perftest_comparison_measures_aiordma_and_perftest() -> None:
    data = perftest.COMPARISON.measure(Options(turns=1, share=0.01))
    for work in (perftest.SEND, perftest.WRITE, perftest.LATENCY):
        for who in ("aiordma", "perftest"):
            (once,) = seconds(data, work, who)
            assert once > 0


def test_perftest_tries_another_port_when_one_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.socket()) as other:
        other.bind(("", 0))
        ports = [perftest.free_port(), other.getsockname()[1]]
        monkeypatch.setattr(perftest, "free_port", ports.pop)
        ends = [perftest.End.here("embedded0")] * 2
        assert perftest.InPerftest(*ends).do("send_lat", size=64, count=10) > 0
    assert ports == []
