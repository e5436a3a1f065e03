"""The comparison of bench/ that runs perftest."""

from __future__ import annotations

from bench import perftest
from bench.lanes import Options, seconds


def test_perftest_beside_aiordma() -> None:
    data = perftest.COMPARISON.measure(Options(turns=1, share=0.01))
    for work in (perftest.SEND, perftest.WRITE, perftest.LATENCY):
        for who in ("aiordma", "perftest"):
            (once,) = seconds(data, work, who)
            assert once > 0
