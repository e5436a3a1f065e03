"""The comparisons of bench/ run and print what they say they print."""

from __future__ import annotations

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
    assert done.stderr == "usage: python -m bench {echo,many} [-h]\n"
