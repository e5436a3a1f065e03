"""ucxx and nixl, which are measured where they are installed.

    python -m bench peers        installs both into an environment of their own, under build/bench

They cannot be an extra of this package: each asks for other versions of the same packages of CUDA,
which nixl does not need here.  A lane of what is not installed says so in the results.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from .contender import Contender
from .device import BUILT
from .lanes import Contenders, Lane

FOLDER = BUILT / "peers"
PYTHON = FOLDER / "bin" / "python"
INSTALLED = [
    ["ucxx-cu12", "uvloop"],
    ["--no-deps", "nixl", "nixl-cu12"],  # numpy has come with the former
]


def python() -> str:
    """The Python that has them, or should."""
    return str(PYTHON) if PYTHON.exists() else sys.executable


@cache
def is_installed(name: str) -> bool:
    command = [python(), "-c", f"import {name}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def contender(contenders: Contenders, way: str) -> Contender | None:
    """None where the package is not installed, which is the way's first word."""
    package, *_ = way.split()
    return contenders.python(way, python=python()) if is_installed(package) else None


def lane(contenders: Contenders, way: str, work: str, who: str, kind: str, **numbers: Any) -> Lane:
    """A lane of the package, or one that says that it is not installed."""
    found = contender(contenders, way)
    if found is None:
        return Lane.missing(work, who)
    return Lane.of(found, work, who, kind, **numbers)


def main(arguments: Sequence[str]) -> None:
    argparse.ArgumentParser(prog="python -m bench peers", description=__doc__).parse_args(arguments)
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    for packages in INSTALLED:
        subprocess.run([str(PYTHON), "-m", "pip", "install", *packages], check=True)
