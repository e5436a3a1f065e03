"""The commands and programs of the README."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from aiordma_kv import cli

from conftest import HOST, Process

README = (Path(__file__).parents[1] / "README.md").read_text()
PORT = "7480"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def serve_commands() -> list[list[str]]:
    """Return the arguments of each `aiordma-kv serve` in the README's shell blocks."""
    lines = "".join(blocks("sh")).replace("\\\n", "").splitlines()
    commands = [line for line in lines if line.startswith("aiordma-kv serve ")]
    return [shlex.split(command.rstrip("& "), comments=True)[2:] for command in commands]


def test_readme_program_prints_the_documented_output(start_process: Callable[..., Process]) -> None:
    host, port, *options = serve_commands()[0]
    assert (host, port, options) == (HOST, PORT, ["--size", "8G"])
    server = start_process("--size", "64M")  # a test machine may have less than 8 GiB
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", blocks("python")[0].replace(PORT, str(server.port))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == (blocks("text")[0], "", 0)


def test_readme_serve_commands_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.key").touch()
    for words in serve_commands():
        cli.serve.make_context("serve", list(words))


def test_readme_lists_every_server_option() -> None:
    listed = re.findall(r"^\| `(--[\w-]+)[ `]", README, re.MULTILINE)
    assert listed == [option.opts[0] for option in cli.serve.params if option.opts[0][:2] == "--"]
