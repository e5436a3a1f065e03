"""perftest: latency and bandwidth of every operation of every transport."""

from __future__ import annotations

import time

import pytest

from .conftest import NO_CLOCK, Ended, run_pair

ITERATIONS = 100


def figures_of(server: Ended, client: Ended) -> list[float]:
    """The figures that the client prints; none where one of the two has no clock."""
    if any(NO_CLOCK in ended.errors for ended in (server, client)):
        return []
    server.expect()
    return result(client.expect())


def result(text: str) -> list[float]:
    """The numbers of the one line below the headings."""
    lines = text.splitlines()
    heading = next(at for at, line in enumerate(lines) if line.lstrip().startswith("#bytes"))
    return [float(word) for word in lines[heading + 1].split()]


# Every operation that a transport has: IBTA 9.8.3 leaves reads and atomics to the reliable ones.
# -R: the connection manager brings the queue pairs up. Without: numbers exchanged over TCP. -e: the
# programs sleep until there is a completion.
OPERATIONS = [
    ("send", "-c RC"), ("write", "-c RC"), ("read", "-c RC"), ("atomic", ""),
    ("send", "-R"), ("write", "-R"), ("read", "-R"), ("atomic", "-R"),
    ("send", "-e"), ("read", "-e"), ("atomic", "-e"),
    ("send", "-c XRC"), ("write", "-c XRC"), ("read", "-c XRC"), ("atomic", "-c XRC"),
    ("send", "-c UC"), ("write", "-c UC"), ("send", "-c UD"), ("send", "-c UD -R"),
]  # fmt: skip


# 8 for atomics and 2 for the other latencies is what the programs choose. All of a run's datagrams
# fit into a socket's buffer, so that none is lost: nothing else would hold their sender back.
SIZES = {"atomic": 8, "lat": 2, "bw": 65536, "UD": 1024}


def pair(kind: str, operation: str, options: str, port: int) -> tuple[list[float], float]:
    """The client's figures, and the seconds that both programs took."""
    words = [f"ib_{operation}_{kind}", "-p", str(port), "-n", str(ITERATIONS), "-d", "embedded0"]
    words += options.split()
    words += ["-s", str(SIZES["UD"])] if "UD" in options else []
    start = time.monotonic()
    figures = figures_of(*run_pair(words, [*words, "127.0.0.1"], port))
    return figures, time.monotonic() - start


@pytest.mark.parametrize(("operation", "options"), OPERATIONS)
def test_perftest_latency_is_plausible(operation: str, options: str, port: int) -> None:
    figures, took = pair("lat", operation, options, port)
    if not figures:
        return
    size, count, least, most, typical, average, *_ = figures
    assert size == SIZES.get("UD" if "UD" in options else operation, SIZES["lat"])
    assert count == ITERATIONS
    # Two processors of one memory answer in less than half a microsecond, but in no time they
    # cannot; and nothing took longer than the programs.
    assert 0 < least <= typical <= most < took * 1e6
    assert least <= average <= most
    assert ITERATIONS * average < took * 1e6


@pytest.mark.parametrize(("operation", "options"), OPERATIONS)
def test_perftest_bandwidth_is_plausible(operation: str, options: str, port: int) -> None:
    figures, took = pair("bw", operation, options, port)
    if not figures:
        return
    size, count, _, average, rate = figures
    assert size == SIZES.get("UD" if "UD" in options else operation, SIZES["bw"])
    assert count == ITERATIONS
    # MB/s of 2**20 bytes, and millions of messages, printed with two and with six decimals: the
    # figures of a slow machine are 0.
    assert average < 1e6
    rounded = 0.005 * 2**20 + 0.5 * size
    assert average * 2**20 == pytest.approx(rate * 1e6 * size, rel=0.05, abs=rounded)
    # The messages took no longer than the programs.
    assert rate * 1e6 + 0.5 > ITERATIONS / took


def test_perftest_works_with_a_shared_receive_queue(port: int) -> None:
    words = ["ib_send_bw", "--use-srq", "-q", "4", "-p", str(port), "-n", str(ITERATIONS)]
    figures = figures_of(*run_pair(words, [*words, "127.0.0.1"], port))
    assert figures[:2] in ([], [65536, 4 * ITERATIONS])


def test_perftest_measures_multicast_latency(port: int) -> None:
    """Each side sends to the other one's group; both are this test's as the port is.

    perftest compares the peer's GID, which is the group's, with its own: both must stand for IPv4
    addresses, or neither.
    """
    words = ["ib_send_lat", "-c", "UD", "-g", "-p", str(port), "-n", str(ITERATIONS), "-x", "0"]
    prefix = "0:0:0:0:0:0:0:0:0:0:255:255:239:"
    groups = [f"{prefix}{own}:{port >> 8}:{port & 255}" for own in (71, 72)]
    server, client = run_pair(
        [*words, "-M", groups[0]], [*words, "-M", groups[1], "127.0.0.1"], port
    )
    shown = ":".join(f"{int(number):02}" for number in groups[0].split(":"))
    for done in (server, client):
        assert f" MGID: {shown}\n" in done.expect()
        assert result(done.text)[:2] == [2, ITERATIONS]
