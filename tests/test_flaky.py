"""`python -m tests.flaky` names the tests that failed in any run, and ends its load."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.flaky import ROOT

# What pytest and meson print of failures, and lines like it that name none.
OUTPUT = """\
FAILED tests/transport/test_fork.py::test_pools[uvloop - cm] - AssertionError: it - failed
ERROR tests/test_mr_pool.py::test_grows
ERROR tests/test_broken.py - SyntaxError
ERROR    aiordma:driver.py:17 a captured line of a log
XFAIL tests/test_mr_pool.py::test_known
 1/60 test_data                OK              0.13s
 2/60 test_cm_wire             FAIL            1.23s   exit status 1
10/60 soft / test_uc (tcp)     TIMEOUT       120.04s   killed by signal 15 SIGTERM
"""
NAMES = {
    "tests/transport/test_fork.py::test_pools[uvloop - cm]",
    "tests/test_mr_pool.py::test_grows",
    "tests/test_broken.py",
    "test_cm_wire",
    "soft / test_uc (tcp)",
    "no test is named, but the status is 2",
}

# Passes in its first run, fails with output in its second and without in its third.
FAILS = """
import pathlib, sys
runs = pathlib.Path(sys.argv[1])
number = len(runs.read_text()) if runs.exists() else 0
runs.write_text("x" * (number + 1))
if number == 1:
    print(sys.argv[2])
sys.exit(2 * (number > 0))
"""

# Names its process and stays until it is killed.
STAYS = """
import os, pathlib, signal, sys
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
signal.pause()
"""


def command(tmp_path: Path, runs: int, program: str, *arguments: str) -> list[str]:
    return [
        sys.executable, "-m", "tests.flaky", "--runs", str(runs), "--busy", "1",
        "--megabytes", "1", "--logs", str(tmp_path / "logs"),
        "--", sys.executable, "-c", program, *arguments,
    ]  # fmt: skip


def test_what_failed_is_named(tmp_path: Path) -> None:
    words = command(tmp_path, 3, FAILS, str(tmp_path / "runs"), OUTPUT)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert re.findall(r"^run \d: (\w+)", done.stdout, re.M) == ["passed", "failed", "failed"]
    last = done.stdout.partition("failed in 3 runs:\n")[2]
    assert set(re.findall(r"^   1x (.*) \(run [23]\)$", last, re.M)) == NAMES
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["01", "02", "03"]


def test_the_load_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with subprocess.Popen(
        command(tmp_path, 1, STAYS, str(path)), cwd=ROOT, stdout=subprocess.DEVNULL
    ) as process:
        while not (path.exists() and path.read_text()):
            assert process.poll() is None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        started = children.read_text().split()
        assert len(started) == 3  # a busy loop, the writer and the command
        assert path.read_text() in started
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
