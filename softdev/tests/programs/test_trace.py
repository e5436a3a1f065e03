"""Test that the trace of an unmodified program contains every message."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiordma import trace

from .conftest import run_pair

ITERATIONS = 100


# test_pingpong.py explains why -e is not combined with -t.
@pytest.mark.parametrize("options", ["", "-e -N", "-t -N"])
def test_pingpong_trace_contains_every_message(
    options: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIORDMA_TRACE", str(tmp_path / "%p"))
    words = ["ibv_rc_pingpong", *options.split(), "-g", "0", "-p", str(port)]
    words += ["-n", str(ITERATIONS), "-s", "3000"]
    server, client = run_pair(words, [*words, "127.0.0.1"], port)
    server.expect()
    client.expect()
    peers = set()
    for path in tmp_path.iterdir():
        (run,) = trace.read(path)
        assert run.end is not None
        found = trace.requests(run)
        sends = [it for it in found if not it.is_receive]
        received = [it for it in found if it.is_receive and it.completion]
        assert [it.bytes for it in sends] == [3000] * ITERATIONS
        assert [it.bytes for it in received] == [3000] * ITERATIONS
        assert all(it.status == "SUCCESS" for it in (*sends, *received))
        (ready,) = (
            it for it in run.records if isinstance(it, trace.QPStateChange) and it.qp_state == "RTR"
        )
        peers.add((ready.qp_num, ready.dest_qp_num))
    (first, second) = peers
    assert first == second[::-1]
