"""Print the stacks of processes, to show what a test that takes too long is waiting for.

    tests/stacks.py COMMAND ...

This runs a command. After LIMIT, it prints the stacks of the command and of all processes that it
has started, and ends them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LIMIT = 120
"""Time limit of a C test in seconds. That of the Python tests is in pyproject.toml."""

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
# The tracers: py-spy for Python processes, and gdb for all others. The first one that is installed
# and succeeds is used.
TRACERS = (
    ("py-spy", "dump", "--native", "--pid"),
    ("gdb", "-batch", "-nx", "-ex", "thread apply all backtrace", "-p"),
)


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield pid
    with suppress(OSError):  # the process may have ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from descendants(int(child))


def stacks(pid: int) -> str:
    """Return a process's command line and its threads' stacks, or else their wait channels."""
    folder = Path(f"/proc/{pid}")
    try:
        command = (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
        for tracer in TRACERS:
            if program := shutil.which(tracer[0], path=PATH):
                words = [program, *tracer[1:], str(pid)]
                done = subprocess.run(
                    words, check=False, capture_output=True, text=True, timeout=20
                )
                if done.returncode == 0:
                    return f"process {pid}: {command}\n{done.stdout}"
        waits = [
            f"    {(task / 'comm').read_text().strip()}: {(task / 'wchan').read_text()}\n"
            for task in (folder / "task").iterdir()
        ]
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"process {pid}: {error}\n"
    return f"process {pid}: {command}\n{''.join(waits)}"


def show(pid: int) -> list[int]:
    """Print the stacks of a process and its descendants, and return their PIDs."""
    every = [*descendants(pid)]
    for each in every:
        print(stacks(each), file=sys.stderr, flush=True)
    return every


def main(command: list[str]) -> int:
    with subprocess.Popen(command) as process:
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired as expired:
            print(expired, file=sys.stderr)
            for each in show(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
