"""perftest: latency and bandwidth of every operation of a reliable connection."""

from __future__ import annotations

import pytest

from .conftest import run_pair

ITERATIONS = 100


def result(text: str) -> list[float]:
    """The numbers of the one line below the headings."""
    lines = text.splitlines()
    heading = next(at for at, line in enumerate(lines) if line.lstrip().startswith("#bytes"))
    return [float(word) for word in lines[heading + 1].split()]


@pytest.mark.parametrize("operation", ["send", "write", "read", "atomic"])
def test_latency(operation: str, port: int) -> None:
    words = [f"ib_{operation}_lat", "-p", str(port), "-n", str(ITERATIONS), "-d", "embedded0"]
    server, client = run_pair(words, [*words, "127.0.0.1"], port)
    server.expect()
    size, count, least, most, typical, average, *_ = result(client.expect())
    assert (size, count) == (8 if operation == "atomic" else 2, ITERATIONS)
    # Half a microsecond for each way, and a second for a machine that is busy.
    assert 0.5 < least <= typical <= most < 1e6
    assert least <= average <= most


@pytest.mark.parametrize("operation", ["send", "write", "read", "atomic"])
def test_bandwidth(operation: str, port: int) -> None:
    words = [f"ib_{operation}_bw", "-p", str(port), "-n", str(ITERATIONS), "-d", "embedded0"]
    server, client = run_pair(words, [*words, "127.0.0.1"], port)
    server.expect()
    size, count, _, average, rate = result(client.expect())
    assert (size, count) == (8 if operation == "atomic" else 65536, ITERATIONS)
    # MB/s of 2**20 bytes, and millions of messages.
    assert 0 < average < 1e6
    assert average * 2**20 == pytest.approx(rate * 1e6 * size, rel=0.05, abs=8192)
