"""The C programs beside, compiled when they are first needed: they run on the very library that
`aiordma run` puts under programs, the embedded device."""

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
    """`name`.c of this folder as a program that is newer than all that it is made of."""
    source, device, built = HERE / f"{name}.c", library(), BUILT / name
    parts = [source, device, *sorted((HERE.parent / "native").rglob("*.h"))]
    if not built.exists() or any(p.stat().st_mtime > built.stat().st_mtime for p in parts):
        BUILT.mkdir(parents=True, exist_ok=True)
        compiler = shlex.split(os.environ.get("CC", "cc"))
        include = f"-I{HERE.parent / 'native'}"
        command = [*compiler, *FLAGS, include, "-o", str(built), str(source), str(device)]
        subprocess.run([*command, f"-Wl,-rpath,{device.parent}"], check=True)
    return built
