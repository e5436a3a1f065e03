"""Tests of the example programs of libibverbs, such as ibv_rc_pingpong(1)."""

from __future__ import annotations

import re

import pytest

from .conftest import run_pair

ITERATIONS = 200
SIZE = 3000  # less than the MTU, which bounds a datagram

# -e is not combined with -t: the program would treat an event without a completion as an error
# ("poll CQ failed 2"), although ibv_get_cq_event(3) tells applications to expect one. This happens
# when a completion arrives after the CQ is armed and is polled with the previous one. test_cq_ex.c
# tests events of extended CQs.


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("ibv_rc_pingpong", ""),
        ("ibv_rc_pingpong", "-e"),
        ("ibv_rc_pingpong", "-t"),
        ("ibv_rc_pingpong", "-N"),
        ("ibv_rc_pingpong", "-e -N"),
        ("ibv_rc_pingpong", "-t -N"),
        ("ibv_rc_pingpong", "-o"),
        ("ibv_rc_pingpong", "-o -P"),
        ("ibv_rc_pingpong", "-O"),
        ("ibv_rc_pingpong", "-e -O -P -N"),
        ("ibv_rc_pingpong", "-j"),
        ("ibv_rc_pingpong", "-e -N -j"),
        ("ibv_rc_pingpong", "-t -N -j"),
        ("ibv_uc_pingpong", ""),
        ("ibv_uc_pingpong", "-e"),
        ("ibv_ud_pingpong", ""),
        ("ibv_ud_pingpong", "-e"),
        ("ibv_srq_pingpong", ""),
        ("ibv_srq_pingpong", "-e"),
    ],
)
def test_pingpong_verifies_every_byte(program: str, options: str, port: int) -> None:
    """With -c, each side compares every byte that it receives."""
    words = [program, *options.split(), "-c", "-g", "0", "-p", str(port)]
    words += ["-n", str(ITERATIONS), "-s", str(SIZE)]
    server, client = run_pair(words, [*words, "127.0.0.1"], port)
    for text in (server.expect(), client.expect()):
        moved, seconds = re.findall(r"^(\d+) bytes in ([\d.]+) seconds = ", text, re.MULTILINE)[0]
        assert int(moved) == 2 * ITERATIONS * SIZE
        count, each = re.findall(
            r"^(\d+) iters in [\d.]+ seconds = ([\d.]+) usec/iter$", text, re.MULTILINE
        )[0]
        assert int(count) == ITERATIONS
        # The program prints seconds with two decimals. No transport takes less than a microsecond.
        assert float(each) > 1
        assert float(each) * ITERATIONS / 1e6 == pytest.approx(float(seconds), abs=0.006)
        assert "invalid data" not in text
        if "-t" in options:
            clocks = re.findall(r"^(\w+) receive completion clock cycles = ([\d.]+)$", text, re.M)
            most, least, average = (float(clock) for _, clock in clocks)
            assert 0 < least <= average <= most


@pytest.mark.parametrize("wire", ["shared", "tcp"])
@pytest.mark.parametrize("options", ["", "-e"])
def test_ibv_xsrq_pingpong_succeeds(
    options: str, wire: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each side addresses the other's shared receive queue by its number."""
    monkeypatch.setenv("AIORDMA_EMBEDDED_LINKS", wire)
    words = ["ibv_xsrq_pingpong", *options.split(), "-g", "0", "-p", str(port)]
    words += ["-n", str(ITERATIONS), "-s", str(SIZE)]
    server, client = run_pair([*words, "-c", "1"], [*words, "127.0.0.1"], port)
    for text in (server.expect(), client.expect()):
        assert text.splitlines()[-1] == "success"
