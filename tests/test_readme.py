"""Tests of README.md and CONTRIBUTING.md: programs run, and names exist."""

from __future__ import annotations

import pkgutil
import re
from itertools import takewhile
from pathlib import Path

import click
import pytest

from aiordma.cli.app import app
from tests.package import README_PROGRAM
from tests.processes import run_python

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md")
README = (ROOT / "README.md").read_text()
FOR_CARDS = [
    str(page.relative_to(ROOT))
    for page in (*ROOT.glob("*.md"), *ROOT.glob("[dis]*/**/*.md"))
    if re.search("RDMA cards|RoCE v2 cards?", page.read_text())
]

PROGRAMS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
OUTPUTS = ["b'hello, RDMA'\n"]

CODE = re.compile(r"^```sh\n(.*?)^```$|`([^`\n]+)`", re.DOTALL | re.MULTILINE)


def commands(page: str, program: str) -> list[list[str]]:
    """Return the arguments of each call of `program` in a page's code, without comments."""
    found = []
    for block, inline in CODE.findall((ROOT / page).read_text()):
        for line in (block or inline).splitlines():
            for part in line.partition("#")[0].split("&&"):
                words = part.split()
                while words and "=" in words[0]:  # variables
                    words.pop(0)
                if words and words[0] == program:
                    found.append(words[1:])
    return found


# ---- programs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("program", "output"), list(zip(PROGRAMS, OUTPUTS, strict=True)))
def test_readme_programs_print_the_shown_output(program: str, output: str) -> None:
    """The programs run on the embedded device, without hardware."""
    done = run_python("-W", "error", "-c", program, AIORDMA_DEVICE="embedded0")
    assert (done.stdout, done.stderr, done.returncode) == (output, "", 0)
    assert output.strip() in README.replace(program, "") + program.partition("#")[2]


def test_readme_starts_with_installation_and_echo_example() -> None:
    """The program has ten lines besides the import of asyncio.

    The landing page of the site begins with it, and `make wheel` runs it from each wheel.
    """
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    (shell, first), program = blocks[:2]
    assert [shell, program] == ["sh", ("python", PROGRAMS[0])]
    assert re.findall("^(.*?)  ", first, re.M) == ["make echo", "make test", "pip install '.[cli]'"]
    assert PROGRAMS[0] in (ROOT / "docs" / "index.md").read_text()
    assert len([line for line in PROGRAMS[0].splitlines() if line.strip()]) == 11
    assert README_PROGRAM.search(README)
    assert commands("README.md", "make")[:2] == [["echo"], ["test"]]


@pytest.mark.parametrize("page", FOR_CARDS)
def test_hardware_pages_state_that_cards_are_untested(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert re.search(r"not (been )?tested (on one )?yet", text)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_landing_pages_distinguish_rdma_cards_from_embedded_device(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert "card moves data between the memories of two programs without the kernel" in text
    assert re.search(r"The (embedded )?software device does copy: ", text)
    assert "zero-copy" not in text


def test_readme_figures_match_the_measurements() -> None:
    measured = (ROOT / "bench" / "RESULTS.md").read_text()
    rows = re.findall(r"^\| (\d.*|the same.*) \| (.*) \| (.*) \| ([\d.]+) \|$", README, re.M)
    assert len(rows) == 6
    for row in rows:
        assert f"| {' | '.join(row)} (" in measured


def test_readme_simulation_note_matches_the_testing_page() -> None:
    notes = re.findall(r"^```text\n(simulate\(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert len(notes) == 1
    assert notes[0] in (ROOT / "docs" / "testing.md").read_text()


# ---- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_in_documentation_exist(page: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[0] for words in commands(page, "make")}
    assert named
    assert named <= targets


@pytest.mark.parametrize("page", [*PAGES, "docs/command-line.md"])
def test_commands_and_options_in_documentation_exist(page: str) -> None:
    context = click.Context(app)
    for name, *words in commands(page, "aiordma"):
        command = app.get_command(context, name)
        assert command is not None, f"{page} names the command {name}"
        if isinstance(command, click.Group) and words:
            # `--local` looks like an option, but selects a command.
            inner = command.get_command(context, words.pop(0).removeprefix("--"))
            assert inner is not None, f"{page} names a command that {name} has not"
            command = inner
        if not command.context_settings.get("allow_interspersed_args", True):
            # From the first non-option on, all words belong to another program.
            named = set(takewhile(lambda word: word.startswith("-"), words))
        else:
            named = {word for word in words if word.startswith("-")}
        known = {option for parameter in command.params for option in parameter.opts}
        assert named <= known | {"--", "--help"}


@pytest.mark.parametrize("page", PAGES)
def test_public_names_in_documentation_exist(page: str) -> None:
    for name in re.findall(r"`(aiordma\.[\w.]+)`", (ROOT / page).read_text()):
        pkgutil.resolve_name(name)  # also imports modules such as aiordma.blocking
