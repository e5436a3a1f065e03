"""`python -m tests.flaky` names the tests that failed in any run, and ends its load."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flaky import ROOT, failed_tests

PYTEST = """\
=========================== short test summary info ============================
FAILED tests/transport/test_fork.py::test_pools[uvloop - cm] - AssertionError: it - failed
ERROR tests/test_mr_pool.py::test_grows
ERROR tests/test_broken.py - SyntaxError
ERROR    aiordma:driver.py:17 a captured line of a log
XFAIL tests/test_mr_pool.py::test_known
"""

MESON = """\
 1/60 test_data                OK              0.13s
 2/60 test_cm_wire             FAIL            1.23s   exit status 1
10/60 soft / test_uc (tcp)     TIMEOUT       120.04s   killed by signal 15 SIGTERM

Summary of Failures:

 2/60 test_cm_wire             FAIL            1.23s   exit status 1
"""

# Fails in its second run, with the output of a failure of each kind.
FAILS_ONCE = """
import pathlib, sys
runs, output = map(pathlib.Path, sys.argv[1:])
number = len(runs.read_text()) if runs.exists() else 0
runs.write_text("x" * (number + 1))
if number == 1:
    print(output.read_text())
    sys.exit(2)
"""

# Names its process and stays until it is killed.
STAYS = """
import os, pathlib, signal, sys
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
signal.pause()
"""

# Ends when two of its threads have had both priorities.
IS_DISTURBED = """
import os, threading
def wait():
    seen = set()
    while not os.geteuid() and not {0, -19} <= seen:
        seen.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
threading.Thread(target=wait).start()
wait()
"""

# A signal comes when the command and the thread that changes its priorities have just begun.
IS_TOLD_EARLY = """
import pathlib, signal, subprocess, sys, threading
from tests import flaky
class Command(subprocess.Popen):
    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        print(self.pid, flush=True)
        signal.raise_signal(signal.SIGTERM)
class Thread(threading.Thread):
    def start(self):
        super().start()
        signal.raise_signal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
if sys.argv[2] == "command":
    subprocess.Popen = Command
else:
    threading.Thread = Thread
flaky.run(["sleep", "600"], pathlib.Path(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (
            PYTEST,
            [
                "tests/test_broken.py",
                "tests/test_mr_pool.py::test_grows",
                "tests/transport/test_fork.py::test_pools[uvloop - cm]",
            ],
        ),
        (MESON, ["soft / test_uc (tcp)", "test_cm_wire"]),
        ("1 passed in 0.1s", []),
    ],
)
def test_names(output: str, names: list[str]) -> None:
    assert failed_tests(output) == names


def command(tmp_path: Path, runs: int, program: str, *arguments: str) -> list[str]:
    return [
        sys.executable, "-m", "tests.flaky", "--runs", str(runs), "--busy", "1",
        "--megabytes", "1", "--logs", str(tmp_path / "logs"),
        "--", sys.executable, "-c", program, *arguments,
    ]  # fmt: skip


def finished(words: list[str], timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


def flaky(tmp_path: Path, runs: int, output: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "output").write_text(output)
    paths = [str(tmp_path / name) for name in ("runs", "output")]
    return finished(command(tmp_path, runs, FAILS_ONCE, *paths))


def test_what_failed_once_is_named(tmp_path: Path) -> None:
    done = flaky(tmp_path, 3, PYTEST + MESON)
    assert done.returncode == 1, done.stderr
    assert re.findall(r"^run \d: \w+", done.stdout, re.MULTILINE) == [
        "run 1: passed", "run 2: failed", "run 3: passed",
    ]  # fmt: skip
    for name in ("tests/test_mr_pool.py::test_grows", "test_cm_wire"):
        assert done.stdout.count(f"\n   1x {name} (run 2)\n") == 2  # after two and three runs
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["01", "02", "03"]
    assert "2/60 test_cm_wire" in (tmp_path / "logs/02").read_text()


def test_a_failure_without_a_name_is_one(tmp_path: Path) -> None:
    done = flaky(tmp_path, 2, "make: *** [all] Error 1")
    assert done.returncode == 1
    assert "no test is named, but the status is 2" in done.stdout


def test_all_runs_pass(tmp_path: Path) -> None:
    done = flaky(tmp_path, 1, "")
    assert done.returncode == 0, done.stderr
    assert "none failed in 1 runs" in done.stdout


def test_the_priorities_of_all_threads_change(tmp_path: Path) -> None:
    done = finished(command(tmp_path, 1, IS_DISTURBED))
    assert done.returncode == 0, done.stderr
    assert ("takes root" in done.stdout) == bool(os.geteuid())


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_load_ends_with_it(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "pid"
    with subprocess.Popen(
        command(tmp_path, 1, STAYS, str(path)), cwd=ROOT, stdout=subprocess.DEVNULL
    ) as process:
        while not (path.exists() and path.read_text()):
            assert process.poll() is None
        started = children(process.pid)
        assert len(started) == 3  # a busy loop, the writer and the command
        assert int(path.read_text()) in started
        process.send_signal(number)
        assert process.wait() == 128 + number
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("when", ["command", "thread"])
def test_a_signal_that_comes_early(tmp_path: Path, when: str) -> None:
    """No thread keeps the process, and no command is left."""
    if when == "thread" and os.geteuid():
        pytest.skip("only root has the thread")
    done = finished([sys.executable, "-c", IS_TOLD_EARLY, str(tmp_path / "log"), when], timeout=300)
    assert done.returncode == 3, done.stderr
    assert not any(Path(f"/proc/{pid}").exists() for pid in done.stdout.split())
