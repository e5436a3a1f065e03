"""The command line as a whole, and its error when its extra is not installed."""

from __future__ import annotations

import subprocess

import pytest
from click.testing import CliRunner

import aiordma
from aiordma.cli.app import app
from tests.processes import run_python

# `aiordma` where a module is not installed: None in sys.modules makes its import fail so.
WITHOUT = """\
import runpy, sys
sys.modules[{module!r}] = None
sys.argv = ["aiordma", "--help"]
runpy.run_module("aiordma", run_name="__main__")
"""


def run_without(module: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", WITHOUT.format(module=module))


@pytest.mark.parametrize("module", ["click", "rich"])
def test_without_the_extra_it_says_what_to_install(module: str) -> None:
    done = run_without(module)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"aiordma: the command line needs {module}, which is not installed: "
        "pip install 'aiordma[cli]'\n"
    )


def test_another_missing_module_is_not_hidden() -> None:
    done = run_without("msgpack")
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr


def test_help_lists_the_commands_for_people() -> None:
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    commands = done.output.partition("Commands:")[2]
    assert [line.split()[0] for line in commands.splitlines() if line.strip()] == [
        "devinfo",
        "doctor",
        "echo",
        "perf",
        "run",
        "top",
        "trace",
    ]


def test_a_command_is_imported_without_the_others() -> None:
    """A program under `aiordma run` starts without waiting for what `aiordma perf` needs."""
    program = (
        "import sys; from aiordma.cli.app import app;"
        "app(['run', '--help'], standalone_mode=False);"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = run_python("-c", program, check=True)
    loaded = done.stderr.split()
    assert "aiordma.cli.run" in loaded
    assert {"aiordma.cli.perf", "aiordma.transport", "rich", "asyncio"}.isdisjoint(loaded)


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.output == f"aiordma, version {aiordma.__version__}\n"


def test_as_a_module_and_as_a_program_it_is_the_same() -> None:
    done = run_python("-m", "aiordma", "--help", check=True)
    assert done.stdout == CliRunner().invoke(app, ["--help"], prog_name="aiordma").output
