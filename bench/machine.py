"""A description of the machine and the software used for the measurements."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import aiordma
from aiordma.perf.machine import processor

Facts = dict[str, str]


def command_output(*command: str) -> str:
    """Return the first line printed by a command, or the reason it printed nothing."""
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.STDOUT).splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        return f"unknown ({error})"


def package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def memory() -> str:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{pages / 2**30:.1f} GiB"


def cpu_seconds() -> dict[str, float]:
    """Return each process's CPU time, keyed by command and process ID."""
    found, tick = {}, os.sysconf("SC_CLK_TCK")
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has just ended
            command = (folder / "cmdline").read_text(errors="replace").split("\0")
            times = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[11:13]
            words = [Path(command[0]).name, *(word for word in command if word == "bench.worker")]
            found[f"{' '.join(words)} ({folder.name})"] = sum(map(int, times)) / tick
    return found


def busy_processes(seconds: float = 1.0) -> list[str]:
    """Return the processes that use at least 5% of a CPU, with their CPU usage."""
    before = cpu_seconds()
    time.sleep(seconds)
    shares = {one: (took - before.get(one, took)) / seconds for one, took in cpu_seconds().items()}
    return [f"{share:.0%} {one}" for one, share in shares.items() if share >= 0.05]


def facts() -> Facts:
    root = Path(__file__).parents[1]
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": command_output("git", "-C", str(root), "describe", "--always", "--dirty"),
        "processor": f"{processor()}, {len(os.sched_getaffinity(0))} cores used",
        "memory": f"{memory()}, transparent huge pages "
        + (huge.read_text().strip() if huge.exists() else "unknown"),
        "kernel": platform.release(),
        "load before": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "what else computed": ", ".join(busy_processes()) or "nothing",
        "Python": f"{platform.python_implementation()} {sys.version.split()[0]}",
        "C compiler": command_output("cc", "--version"),
        "packages": ", ".join(f"{name} {package(name)}" for name in ("uvloop", "cffi", "msgpack")),
        "aiordma": aiordma.__version__,
    }
