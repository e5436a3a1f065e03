"""The packages ucxx and nixl, which are measured if they are installed.

    python -m bench peers        install both into a virtual environment below build/bench

They cannot be an extra of this package, because they need different versions of CUDA packages. The
benchmarks do not need the CUDA packages of nixl. If a package is not installed, its lanes are
marked in the results.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from .device import BUILT
from .lanes import Contenders, Lane

FOLDER = BUILT / "peers"
PYTHON = FOLDER / "bin" / "python"
INSTALLED = [
    ["ucxx-cu12", "uvloop"],
    ["--no-deps", "nixl", "nixl-cu12"],  # ucxx has installed numpy
]


def python() -> str:
    """Return the path of the Python interpreter in the virtual environment for ucxx and nixl.

    If the environment does not exist, return the current interpreter's path.
    """
    return str(PYTHON) if PYTHON.exists() else sys.executable


@cache
def is_installed(name: str) -> bool:
    command = [python(), "-c", f"import {name}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def lane(contenders: Contenders, way: str, work: str, who: str, kind: str, **numbers: Any) -> Lane:
    """Return a lane for the package named by the first word of `way`.

    If the package is not installed, the lane has no results.
    """
    if not is_installed(way.split(maxsplit=1)[0]):
        return Lane.missing(work, who)
    return Lane.of(contenders.python(way, python=python()), work, who, kind, **numbers)


def main(arguments: Sequence[str]) -> None:
    argparse.ArgumentParser(prog="python -m bench peers", description=__doc__).parse_args(arguments)
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    for packages in INSTALLED:
        subprocess.run([str(PYTHON), "-m", "pip", "install", *packages], check=True)
