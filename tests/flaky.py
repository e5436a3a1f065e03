"""Repeats a command beside a load, and names every test that ever failed.

    python -m tests.flaky --runs 25 -- make test

The load is a busy loop on every core, of which there are at least two, and a writer that rewrites a
file and waits for the disk. As root, the priorities of the command's threads change at random too:
so one thread of a test waits while another one runs, which is rare on a machine that is merely
busy. The output of each run is in build/logs/flaky. Names of tests are taken from what pytest and
meson print of a failure. The exit status is 1 when a run failed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

ROOT = Path(__file__).parents[1]

# The load ends with the process that started it, even if that is killed: prctl(PR_SET_PDEATHSIG).
_ENDS_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9)\n"
_BUSY = _ENDS_WITH_PARENT + "while True: pass\n"
_WRITER = (
    _ENDS_WITH_PARENT
    + """
block = os.urandom(1 << 20)
with open(sys.argv[1], "wb", buffering=0) as file:
    while True:
        file.seek(0)
        for _ in range(int(sys.argv[2])):
            file.write(block)
        os.fsync(file.fileno())
"""
)

_FAILED = (
    re.compile(r"^(?:FAILED|ERROR) (\S+\.py(?:::[^\[]+?(?:\[.*?\])?)?)(?: - .*)?$", re.MULTILINE),
    re.compile(r"^ *\d+/\d+ (\S.*?) +(?:FAIL|TIMEOUT|ERROR|UNEXPECTEDPASS) +\d", re.MULTILINE),
)


@contextmanager
def load(busy: int, megabytes: int) -> Iterator[None]:
    """Keeps the processors and the disk busy inside ``with``."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        commands = [[_BUSY]] * busy + [[_WRITER, f"{folder}/rewritten", str(megabytes)]]
        for command in commands:
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", *command], start_new_session=True
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def threads_below(pid: int) -> Iterator[int]:
    """The threads of a process and of its descendants."""
    with suppress(OSError):  # it has ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield int(task.name)
            for child in (task / "children").read_text().split():
                yield from threads_below(int(child))


@contextmanager
def changing_priorities(pid: int) -> Iterator[None]:
    """Gives the threads below a process another nice value again and again, chosen at random.

    None is worse than the load's, beside which the threads would hardly run at all.
    """
    done = threading.Event()

    def change() -> None:
        while not done.wait(random.choice((0.002, 0.01, 0.05))):
            for thread in threads_below(pid):
                if random.random() < 0.3:
                    with suppress(OSError):
                        os.setpriority(os.PRIO_PROCESS, thread, random.choice((0, 0, -19)))

    changer = threading.Thread(target=change, daemon=True)
    changer.start()
    try:
        yield
    finally:
        done.set()
        changer.join()


def run(command: Sequence[str], log: Path) -> int:
    """Runs a command, whose output goes to a file; returns its status. No process is left."""
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as process,
    ):
        try:
            # A lower nice value takes a privilege.
            with nullcontext() if os.geteuid() else changing_priorities(process.pid):
                return process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise


def failed_tests(output: str) -> list[str]:
    """The tests that failed, as the output of a run names them."""
    return sorted({name for pattern in _FAILED for name in pattern.findall(output)})


def summary(failures: dict[str, list[int]], runs: int) -> str:
    """How often each test failed, and in which runs; those that failed most come first."""
    if not failures:
        return f"none failed in {runs} runs"
    lines = [f"failed in {runs} runs:"]
    for name, numbers in sorted(failures.items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"{len(numbers):4}x {name} (run {', '.join(map(str, numbers))})")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.flaky", description=__doc__)
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("--busy", type=int, default=max(2, os.cpu_count() or 2), help="busy loops")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the rewritten file")
    parser.add_argument("--logs", type=Path, default=ROOT / "build/logs/flaky")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    given.logs.mkdir(parents=True, exist_ok=True)
    for old in given.logs.glob("[0-9]*"):
        old.unlink()

    failures: dict[str, list[int]] = {}
    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with load(given.busy, given.megabytes), Progress(*columns) as progress:

        def say(text: str) -> None:
            progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

        say(f"{shlex.join(given.command)}, beside {given.busy} busy loops and a writer")
        if os.geteuid():
            say("The priorities of its threads stay as they are: changing them takes root.")
        for number in progress.track(range(1, given.runs + 1), description="runs"):
            log, start = given.logs / f"{number:02}", time.monotonic()
            status = run(given.command, log)
            names = failed_tests(log.read_text(errors="replace"))
            if status and not names:
                names = [f"no test is named, but the status is {status}"]
            for name in names:
                failures.setdefault(name, []).append(number)
            result = "failed" if names else "passed"
            say(f"run {number}: {result} after {time.monotonic() - start:.0f} s, {log}")
            if failures or number == given.runs:
                say(summary(failures, number))
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
