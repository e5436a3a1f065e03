"""Tests of the command line as a whole, with and without its extra installed."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

import aiordma
from aiordma.cli.app import app
from tests.processes import run_python

# Runs `aiordma --help` as if a module were missing: a None in sys.modules makes its import fail.
WITHOUT = """\
import runpy, sys
sys.modules[{module!r}] = None
sys.argv = ["aiordma", "--help"]
runpy.run_module("aiordma", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["click", "rich", "msgpack"])
def test_command_line_advises_installing_the_missing_extra(module: str) -> None:
    """The error of any other missing module is not hidden."""
    done = run_python("-c", WITHOUT.format(module=module))
    if module == "msgpack":
        assert (done.returncode, "ModuleNotFoundError" in done.stderr) == (1, True)
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            f"aiordma: the command line requires {module}, which is not installed: "
            "pip install 'aiordma[cli]'\n"
        )


@pytest.mark.parametrize("width", [30, 40, 80, 200])
@pytest.mark.parametrize(
    ("group", "names"),
    [
        ([], ["devinfo", "doctor", "echo", "perf", "port", "run", "top", "trace"]),
        (["perf"], ["client", "local", "plot", "server"]),
    ],
)
def test_help_lists_every_command_with_its_first_sentence(
    group: list[str], names: list[str], width: int
) -> None:
    """The sentence is not truncated, however narrow the terminal is."""

    def help_of(*words: str) -> str:
        done = CliRunner().invoke(app, [*group, *words, "--help"], terminal_width=width)
        assert done.exit_code == 0
        return done.output

    commands = help_of().partition("Commands:")[2]
    assert re.findall(r"^  (\w+)", commands, re.MULTILINE) == names
    for name in names:
        said = " ".join(help_of(name).partition("\n\n")[2].split())
        assert f"{name} {re.split(r'(?<=[.]) ', said)[0]}" in " ".join(commands.split())


def test_run_command_does_not_import_other_commands() -> None:
    """A program under `aiordma run` must not wait for imports that only `aiordma perf` needs."""
    program = (
        "import sys; from aiordma.cli.app import app;"
        "app(['run', '--help'], standalone_mode=False);"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = run_python("-c", program, check=True)
    loaded = done.stderr.split()
    assert "aiordma.cli.run" in loaded
    assert {"aiordma.cli.perf", "aiordma.transport", "rich", "asyncio"}.isdisjoint(loaded)


def test_python_m_aiordma_prints_the_same_help_as_aiordma() -> None:
    done = run_python("-m", "aiordma", "--help", check=True)
    assert done.stdout == CliRunner().invoke(app, ["--help"], prog_name="aiordma").output
    version = CliRunner().invoke(app, ["--version"]).output
    assert version == f"aiordma, version {aiordma.__version__}\n"
