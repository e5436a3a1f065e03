"""What was measured, and where."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import aiordma
from aiordma.perf.machine import processor

Facts = dict[str, str]


def said_by(*command: str) -> str:
    """Its first line, or why there is none."""
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


def facts() -> Facts:
    root = Path(__file__).parents[1]
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": said_by("git", "-C", str(root), "describe", "--always", "--dirty"),
        "processor": f"{processor()}, {len(os.sched_getaffinity(0))} cores used",
        "memory": f"{memory()}, transparent huge pages "
        + (huge.read_text().strip() if huge.exists() else "unknown"),
        "kernel": platform.release(),
        "load before": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "Python": f"{platform.python_implementation()} {sys.version.split()[0]}",
        "C compiler": said_by("cc", "--version"),
        "packages": ", ".join(f"{name} {package(name)}" for name in ("uvloop", "cffi", "msgpack")),
        "aiordma": aiordma.__version__,
    }
