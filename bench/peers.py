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


def lane(contenders: Contenders, way: str, work: str, who: str, kind: str, **numbers: Any) -> Lane:
    """A lane of the package, the way's first word, or one that says that it is not installed."""
    if not is_installed(way.split(maxsplit=1)[0]):
        return Lane.missing(work, who)
    return Lane.of(contenders.python(way, python=python()), work, who, kind, **numbers)


def main(arguments: Sequence[str]) -> None:
    argparse.ArgumentParser(prog="python -m bench peers", description=__doc__).parse_args(arguments)
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    for packages in INSTALLED:
        subprocess.run([str(PYTHON), "-m", "pip", "install", *packages], check=True)
