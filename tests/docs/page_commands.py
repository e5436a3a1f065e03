"""Extract the files, shell commands and expected output from the sections of a page."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
# Matches shell commands, and their output if a text block follows directly.
BLOCK = re.compile(
    r"^```sh\n(?P<commands>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```$)?", re.DOTALL | re.MULTILINE
)
# Matches a file's name in a paragraph of its own, and the file's text in the code block below.
FILE = re.compile(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# Matches the path of a file included from the repository.
INCLUDED = re.compile(r"^```\{literalinclude\} (\S+)$", re.MULTILINE)

# Matches text that varies between runs: times, process IDs, addresses, paths.
VARIABLE = re.compile(r"/[^\s:]+|0x[0-9a-f]+|\d[\d.,]*")


@dataclass(frozen=True)
class Block:
    """Shell commands, and their output if the page shows it."""

    commands: str
    output: str


def files(page: Path) -> dict[str, str]:
    """Return the files on a page by name."""
    text = page.read_text()
    included = [page.parent / path for path in INCLUDED.findall(text)]
    return dict(FILE.findall(text)) | {path.name: path.read_text() for path in included}


def blocks(page: Path, section: str) -> list[Block]:
    """Return the shell commands in one section."""
    text = dict(SECTION.findall(page.read_text()))[section]
    return [Block(it["commands"], it["output"] or "") for it in BLOCK.finditer(text)]


def run_commands(commands: str, folder: Path, cwd: Path | None = None, limit: float = 550.0) -> str:
    """Run commands on the embedded device and return their output. All must succeed.

    The shell is killed after `limit` seconds. ``folder`` is temporary.
    """
    shim = folder / "aiordma"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m aiordma "$@"\n')
    shim.chmod(0o755)
    output = folder / "output"
    with (
        output.open("wb") as file,
        subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", commands],
            env={
                **os.environ,
                "PATH": f"{folder}:{os.environ['PATH']}",
                "AIORDMA_DEVICE": "embedded0",
            },
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as shell,
    ):
        try:
            status = shell.wait(limit)
        finally:  # also end its background processes
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    text = output.read_text()
    assert status == 0, text
    return text


def prints(output: str, expected: str) -> None:
    """Check that the lines on a page occur in the output in order. "..." matches any text."""
    printed = iter([shape(line) for line in output.splitlines()])
    for line in expected.splitlines():
        wanted = shape(line.removesuffix("..."))
        found = not wanted or any(it.startswith(wanted) for it in printed)
        assert found, f"{line!r} is not in:\n{output}"


def shape(line: str) -> str:
    """Return a line with the parts that vary between runs masked."""
    return " ".join(VARIABLE.sub("#", line).split())
