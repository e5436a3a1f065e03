"""Runs the commands of docs/command-line.md with the `aiordma` under test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"

SECTION = re.compile(r"^## (\w+)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(section: str) -> str:
    """The shell commands of one section."""
    return "".join(BLOCK.findall(dict(SECTION.findall(PAGE.read_text()))[section]))


def run_section(section: str, folder: Path) -> str:
    """The output of its commands on the embedded device; all succeed. ``folder`` is temporary."""
    shim = folder / "aiordma"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m aiordma "$@"\n')
    shim.chmod(0o755)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", blocks(section)],
        env={
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "AIORDMA_DEVICE": "embedded0",
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
