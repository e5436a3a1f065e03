"""Repeat a command under load, and name every test that ever failed.

    python -m tests.flaky 25 make test

The load is a busy loop on every core (at least two), and a writer that waits for the disk. As root,
it also changes the priorities of the command's threads at random, so that one thread of a test
waits while another one runs. This is rare on a machine that is merely busy. The output of each run
is in build/logs/flaky. The exit status is 1 if a run failed.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.stacks import descendants

LOGS = Path(__file__).parents[1] / "build/logs/flaky"

# PR_SET_PDEATHSIG ends a load process with its parent, even if the parent is killed.
ENDS_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9)\n"
BUSY = ENDS_WITH_PARENT + "while True: pass\n"
WRITER = ENDS_WITH_PARENT + (
    'with open(sys.argv[1], "wb", buffering=0) as file:\n'
    "    while True:\n"
    "        file.seek(0)\n"
    "        file.write(bytes(256 << 20))\n"
    "        os.fsync(file.fileno())\n"
)

# The lines in which pytest and meson report a failed test.
FAILED = re.compile(
    r"^(?:(?:FAILED|ERROR) (\S+\.py(?:::[^\[]+?(?:\[.*?\])?)?)(?: - .*)?"
    r"| *\d+/\d+ (\S.*?) +(?:FAIL|TIMEOUT|ERROR|UNEXPECTEDPASS) +\d.*)$",
    re.MULTILINE,
)


@contextmanager
def load() -> Iterator[None]:
    """Keep the processors and the disk busy inside ``with``."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        busy = [[BUSY]] * max(2, os.cpu_count() or 2)
        for command in [*busy, [WRITER, f"{folder}/rewritten"]]:
            process = subprocess.Popen([sys.executable, "-S", "-c", *command])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def threads_below(pid: int) -> Iterator[int]:
    """Yield the thread IDs of a process and its descendants."""
    for process in descendants(pid):
        with suppress(OSError):  # the process has ended
            yield from map(int, os.listdir(f"/proc/{process}/task"))


def run(command: list[str], log: Path) -> int:
    """Run a command with random thread priorities. Log its output and return its status."""
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as it:
        while it.poll() is None:
            time.sleep(random.choice((0.002, 0.01, 0.05)))
            for thread in threads_below(it.pid) if os.geteuid() == 0 else ():
                if random.random() < 0.3:
                    with suppress(OSError):
                        # Never use a priority below the load's, or the thread would hardly run.
                        os.setpriority(os.PRIO_PROCESS, thread, random.choice((0, 0, -19)))
        return it.returncode


def main(runs: int, command: list[str]) -> int:
    LOGS.mkdir(parents=True, exist_ok=True)
    failures: Counter[str] = Counter()
    with load():
        for number in range(1, runs + 1):
            log = LOGS / f"{number:02}"
            status = run(command, log)
            names = {a or b for a, b in FAILED.findall(log.read_text(errors="replace"))}
            failures.update(names or ([f"status {status}, no test is named"] if status else []))
            print(f"run {number}: status {status}, {log}", *sorted(names), sep="\n    ", flush=True)
    for name, count in failures.most_common():
        print(f"{count:4}x of {runs}: {name}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
