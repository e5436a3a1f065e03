"""The compiler for the benchmarks' C programs.

The programs are linked with the library that `aiordma run` preloads, so they use the embedded
device.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from aiordma.cli.run import library

HERE = Path(__file__).parent
BUILT = HERE.parent / "build" / "bench"
FLAGS = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]


def program(name: str) -> Path:
    """Compile `name`.c for the embedded device, and return the program's path."""
    device = library()
    include = ["-I", str(HERE.parent / "softdev")]
    return compiled(f"{name}.c", name, [*include, f"-Wl,-rpath,{device.parent}"], [device])


def compiled(source: str, target: str, flags: list[str], libraries: list[Path]) -> Path:
    """Compile `source` unless `target` is up to date, and return the target's path."""
    built = BUILT / target
    parts = [HERE / source, *libraries, *(HERE.parent / "softdev").rglob("*.h")]
    if not built.exists() or any(p.stat().st_mtime > built.stat().st_mtime for p in parts):
        BUILT.mkdir(parents=True, exist_ok=True)
        compiler = shlex.split(os.environ.get("CC", "cc"))
        made = built.with_suffix(f".{os.getpid()}")  # safe when two processes do this at once
        command = [*compiler, *FLAGS, *flags, "-o", str(made), str(HERE / source)]
        subprocess.run([*command, *map(str, libraries)], check=True)
        made.rename(built)
    return built
