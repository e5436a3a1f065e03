"""Tests of the comparisons of bench/, and of the page of results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import __main__ as command
from bench import contender, instructions
from bench.__main__ import COMPARISONS
from bench.lanes import Contenders, Lane, Options, take_turns

ROOT = Path(__file__).parents[1]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "bench", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def state(pid: str) -> str:
    """Return a process's state (proc_pid_stat(5)). Processes that have exited count as zombies."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def until_all_are(expected: str, pids: list[str]) -> None:
    until = time.monotonic() + 10
    while {*map(state, pids)} != {expected} and time.monotonic() < until:
        time.sleep(0.01)  # signals are delivered asynchronously
    assert {*map(state, pids)} == {expected}


def test_contender_processes_are_suspended_between_turns(tmp_path: Path) -> None:
    """The contender's processes end with the process that started them.

    A Python with another path counts as another environment.
    """
    program = (
        "import os, sys; from bench.contender import InPython, two_cores;"
        "folder, name = os.path.split(sys.executable);"
        "one = InPython('TCP protocol', 'asyncio', two_cores(), os.path.join(folder, '.', name));"
        "[one.do('echo', size=64, count=1) for _ in range(2)];"
        "print(*open(f'/proc/self/task/{os.getpid()}/children').read().split(), flush=True);"
        "input(); os._exit(0)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # the program leaves a folder behind
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        pids = process.stdout.readline().split()
        assert len(pids) == 2
        until_all_are("T", pids)
        process.communicate("\n")
    until_all_are("Z", pids)


def test_measure_exits_when_another_run_is_active() -> None:
    """A leftover process that computes would slow down the programs being measured."""
    left = [sys.executable, "-c", "while True: pass", "bench.worker"]
    with subprocess.Popen(left) as process:
        try:
            with pytest.raises(SystemExit, match="another run"):
                command.measure([], Options())
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("rest", "said"), [("sys.exit(3)", "ended with 3"), ("signal.pause()", "hung")]
)
def test_bench_continues_after_a_contender_fails_or_hangs(
    rest: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other contenders continue."""
    monkeypatch.setattr(contender, "LIMIT", 0.5 if said == "hung" else 60.0)

    class Failing(contender.Contender):
        def do(self, kind: str, **numbers: int) -> float:
            program = f"import signal, sys; {rest}"
            process = self._start([sys.executable, "-c", program], 0)
            return float(contender.read_line(process))

    with Contenders() as contenders:
        failing = contenders.other(Failing)
        lanes = [Lane.of(failing, "work", "other", "kind"), Lane("work", "aiordma", lambda: 1.0)]
        data = take_turns(lanes, Options(turns=2))
    assert [one["seconds"] for one in data] == [[], [1.0, 1.0]]
    assert data[0].get("failed") == said


COMMITTED = command.HERE / command.SAVED


def test_results_page_matches_the_committed_measurements() -> None:
    """The page is generated. Each missed goal has a note, and each note is about a requirement."""
    results = json.loads(COMMITTED.read_text())
    text = (command.HERE / "RESULTS.md").read_text()
    assert text == command.text(results)
    assert "not investigated" not in text
    asked = {
        requirement.what
        for name, data in results["data"].items()
        for requirement in COMPARISONS[name].requirements(data)
    }
    assert command.NOTES.keys() <= asked


def test_bench_command_prints_the_requested_comparison() -> None:
    done = bench("imports", "--quick")
    assert done.returncode == 0
    assert done.stderr.endswith("measuring: Import\n")
    assert "| import aiordma | " in done.stdout
    assert "| kernel | " in done.stdout


# AddressSanitizer at least doubles memory usage, so a connection misses the benchmark's goal.
SANITIZED = "ASAN_OPTIONS" in os.environ
OWN = (64 << 10) * (4 if SANITIZED else 1)
REACHED = 4 if SANITIZED else 5


def test_connection_and_transfer_costs_stay_within_limits(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    sizes = ("--count", "60", "--mib", "64", "--seconds", "0.5")
    done = bench("cost", *sizes, "--json", str(file))
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.count("; reached\n") == REACHED
    assert "60 idle connections" in done.stdout
    data = json.loads(file.read_text())
    connections = data["connections"]
    assert all(0 < own <= OWN for own in connections["own"])
    # The memory of a receive becomes resident only when the receive is first used.
    assert all(pool < 16 << 10 for pool in connections["pool"])
    # The kernel must never schedule an idle end. If it does, the benchmark measures again a few
    # times, in case of unrelated activity.
    assert connections["idle_runs"] == [0, 0]
    assert connections["files"] == [0, 0]
    assert len(data["transfers"]["extra"]) == 3
    for extra in data["transfers"]["extra"].values():
        assert max(extra) < 8 << 20


RECORDED = {instructions.CALIBRATION: 1000.0, "an echo": 50_000.0}


@pytest.mark.parametrize(
    ("counts", "where", "said", "good"),
    [
        ((1000, 52_000), "here", "+4.0%  an echo\n", True),
        ((1000, 53_000), "here", "+6.0%  an echo  MORE than it may be\n", False),
        ((1000, 40_000), "here", "-20.0%  an echo  less: record it", True),
        # Nothing is recorded for this Python. The record of another one is used instead, scaled by
        # the number of instructions that asyncio needs.
        ((2000, 120_000), "elsewhere", "compared with here, 2.00 times as much", True),
        ((2000, 130_000), "elsewhere", "Nothing is recorded for elsewhere", False),
        ((1000, 50_000, 7), "here", "another: not recorded", False),
    ],
)
def test_instruction_growth_beyond_the_limit_is_reported(
    counts: tuple[float, ...], where: str, said: str, good: bool
) -> None:
    names = (*RECORDED, "another")
    lines, found = instructions.compare(
        dict(zip(names, counts, strict=False)), {"here": RECORDED}, where
    )
    assert said in "\n".join(lines)
    assert found is good
