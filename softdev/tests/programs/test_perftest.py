"""Tests of perftest: latency and bandwidth of every operation and transport."""

from __future__ import annotations

import time

import pytest

from .conftest import NO_CLOCK, Ended, run_pair

ITERATIONS = 100


def figures_of(server: Ended, client: Ended) -> list[float]:
    """Return the client's figures. Skip the test if the CPU frequency could not be measured."""
    if any(NO_CLOCK in ended.errors for ended in (server, client)):
        pytest.skip(f"perftest was preempted while it measured the CPU frequency: {NO_CLOCK}")
    server.expect()
    return result(client.expect())


def result(text: str) -> list[float]:
    """Return the numbers in the line below the headings."""
    lines = text.splitlines()
    heading = next(at for at, line in enumerate(lines) if line.lstrip().startswith("#bytes"))
    return [float(word) for word in lines[heading + 1].split()]


# All operations of each transport. Only reliable transports have reads and atomics (IBTA 9.8.3).
# With -R, the connection manager connects the queue pairs. Without it, the programs exchange QP
# numbers over TCP. With -e, the programs sleep until a completion arrives.
OPERATIONS = [
    ("send", "-c RC"), ("write", "-c RC"), ("read", "-c RC"), ("atomic", ""),
    ("send", "-R"), ("write", "-R"), ("read", "-R"), ("atomic", "-R"),
    ("send", "-e"), ("read", "-e"), ("atomic", "-e"),
    ("send", "-c XRC"), ("write", "-c XRC"), ("read", "-c XRC"), ("atomic", "-c XRC"),
    ("send", "-c UC"), ("write", "-c UC"), ("send", "-c UD"), ("send", "-c UD -R"),
]  # fmt: skip


# Message sizes in bytes. "lat" and "bw" are perftest's defaults for latency and bandwidth tests. UD
# has no flow control, so its messages are small enough for all datagrams of a run to fit into a
# socket's buffer.
SIZES = {"atomic": 8, "lat": 2, "bw": 65536, "UD": 1024}


def pair(kind: str, operation: str, options: str, port: int) -> tuple[list[float], float]:
    """Run a perftest server and client. Return the client's figures and the elapsed seconds."""
    words = [f"ib_{operation}_{kind}", "-p", str(port), "-n", str(ITERATIONS), "-d", "embedded0"]
    words += options.split()
    words += ["-s", str(SIZES["UD"])] if "UD" in options else []
    start = time.monotonic()
    figures = figures_of(*run_pair(words, [*words, "127.0.0.1"], port))
    return figures, time.monotonic() - start


@pytest.mark.parametrize(("operation", "options"), OPERATIONS)
def test_perftest_reports_consistent_latencies(operation: str, options: str, port: int) -> None:
    figures, took = pair("lat", operation, options, port)
    size, count, least, most, typical, average, *_ = figures
    assert size == SIZES.get("UD" if "UD" in options else operation, SIZES["lat"])
    assert count == ITERATIONS
    # Over shared memory, a latency may be below half a microsecond, but it is never 0. No latency
    # exceeds the programs' run time.
    assert 0 < least <= typical <= most < took * 1e6
    assert least <= average <= most
    assert ITERATIONS * average < took * 1e6


@pytest.mark.parametrize(("operation", "options"), OPERATIONS)
def test_perftest_reports_consistent_bandwidth_and_message_rate(
    operation: str, options: str, port: int
) -> None:
    figures, took = pair("bw", operation, options, port)
    size, count, _, average, rate = figures
    assert size == SIZES.get("UD" if "UD" in options else operation, SIZES["bw"])
    assert count == ITERATIONS
    # perftest prints MB/s (of 2**20 bytes) with two decimals, and millions of messages per second
    # with six. Both figures may be 0 on a slow machine.
    assert average < 1e6
    rounded = 0.005 * 2**20 + 0.5 * size
    assert average * 2**20 == pytest.approx(rate * 1e6 * size, rel=0.05, abs=rounded)
    # The programs run at least as long as the messages take, which limits the rate from below.
    assert rate * 1e6 + 0.5 > ITERATIONS / took


def test_perftest_completes_all_iterations_with_a_shared_receive_queue(port: int) -> None:
    words = ["ib_send_bw", "--use-srq", "-q", "4", "-p", str(port), "-n", str(ITERATIONS)]
    figures = figures_of(*run_pair(words, [*words, "127.0.0.1"], port))
    assert figures[:2] == [65536, 4 * ITERATIONS]


def test_perftest_measures_multicast_latency(port: int) -> None:
    """Each side sends to the other side's group. Both groups are derived from the port.

    perftest compares the peer's GID, which is the group's, with its own GID. Either both or neither
    must represent an IPv4 address.
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
