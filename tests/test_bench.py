"""The comparisons of bench/ run and print what they say they print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "bench", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_echo() -> None:
    done = bench("echo", "--repeats", "2", "--count", "2")
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.count(" x its speed (") == 4 * 2 * 2  # sizes, ways, event loops
    assert "medians of 2 turns" in done.stdout


# The address sanitizer's allocator takes as much again and more.
OWN = (64 << 10) * (4 if "ASAN_OPTIONS" in os.environ else 1)


def test_cost(tmp_path: Path) -> None:
    """And the costs are what they may be."""
    file = tmp_path / "cost.json"
    sizes = ("--count", "200", "--mib", "128", "--seconds", "2")
    done = bench("cost", *sizes, "--json", str(file))
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.count(" yes ") == 5
    assert "200 idle connections" in done.stdout
    data = json.loads(file.read_text())
    connections = data["connections"]
    assert all(0 < own <= OWN for own in connections["own"])
    # Only receives that have been used are in memory.
    assert all(pool < 16 << 10 for pool in connections["pool"])
    # Nobody has run at all: whatever it were, it would come again.
    assert connections["idle_runs"] == [0, 0]
    assert connections["files"] == [0, 0]
    assert all(ns > 0 for ns in data["keep_alive"]["ns_per_probe"])
    assert len(data["transfers"]["extra"]) == 3
    for extra in data["transfers"]["extra"].values():
        assert max(extra) < 8 << 20


def test_many() -> None:
    done = bench("many", "--count", "20")
    assert done.stderr == ""
    assert done.returncode == 0
    assert "20 connections, made in" in done.stdout
    own = re.search(r"memory of its own, KiB +(\d+) +(\d+)", done.stdout)
    assert own is not None
    assert all(0 < int(kib) < 256 for kib in own.groups())


def test_usage() -> None:
    done = bench("nonsense")
    assert done.returncode == 1
    assert done.stderr == "usage: python -m bench {cost,echo,many} [-h]\n"
