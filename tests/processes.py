"""Run programs in tests and wait for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run(
    *command: str | Path,
    cwd: Path = ROOT,
    timeout: float = 300,
    check: bool = False,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its result. `environment` is added to the current environment."""
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=check,
    )


def run_python(*arguments: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the current Python interpreter with these arguments."""
    return run(sys.executable, *arguments, **more)
