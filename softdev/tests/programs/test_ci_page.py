"""Tests of ci-without-hardware.md, with its programs, container files and workflow.

The GitHub action in action.yml is tested, too. tests/network tests the commands that create network
namespaces.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.docs.page_commands import blocks, files, prints, run_commands

from .conftest import installed

# Time limit in seconds for a test's commands, including those of its fixtures. It is long, because
# they compile code, perhaps on a busy machine.
LIMIT = 1000.0
# One xdist worker runs all tests, because the fixtures compile code.
pytestmark = [pytest.mark.timeout(LIMIT + 100), pytest.mark.xdist_group("ci page")]

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "softdev" / "docs" / "ci-without-hardware.md"
FIRST = ["A first test", "Any test command"]
SECTIONS = ["Was the device used?", "Faults", "Traces of failed tests", "Sanitizers and valgrind"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a folder with the page's files, in which the first sections' commands have run."""
    for program in ("cmake", "c++", "valgrind"):
        installed(program)
    folder = tmp_path_factory.mktemp("project")
    for name, text in files(PAGE).items():
        (folder / name).write_text(text)
    # The distribution's pyverbs only works with the distribution's Python.
    (folder / "python3").symlink_to("/usr/bin/python3")
    # Let `python` run this test's interpreter, for which aiordma and pytest are installed.
    (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "python").chmod(0o755)
    for section in FIRST:
        run_section(section, folder)
    return folder


def run_section(section: str, project: Path) -> None:
    """Run the commands of a section, and check that they print the output shown on the page."""
    found = blocks(PAGE, section)
    assert found
    for block in found:
        prints(run(block.commands, project), block.output)


def run(commands: str, project: Path) -> str:
    """Run commands of the page. Return their standard output and standard error."""
    return run_commands("exec 2>&1\n" + commands, project, project, LIMIT)


@pytest.mark.parametrize("section", SECTIONS)
def test_commands_in_each_page_section_succeed(section: str, project: Path) -> None:
    run_section(section, project)


def test_documented_two_process_commands_exchange_pings(project: Path, port: int) -> None:
    installed("rping")
    block, _ = blocks(PAGE, "Several processes, two hosts")
    printed = run(block.commands.replace("7471", str(port)).replace("1D2F", f"{port:04X}"), project)
    assert printed.count("ping data: rdma-ping-4: ") == 2


# ---- the container and the workflow -------------------------------------------------------------


def commands_of(container_file: str) -> list[str]:
    return re.findall(r"^RUN (.*)$", container_file.replace("\\\n", ""), re.MULTILINE)


def test_container_files_install_a_working_aiordma(project: Path, tmp_path: Path) -> None:
    """All named packages exist, and the build command of the Containerfile installs `aiordma`."""
    text = (ROOT / "Containerfile").read_text()
    page = files(PAGE)["Containerfile"]
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"debian:12-slim"}
    assert page.startswith("FROM aiordma\n")
    first, build, second = commands_of(text)
    for packages in (first, second, *commands_of(page)):
        update, install, *_ = packages.split(" && ")
        assert update == "apt-get update"
        run(install.replace("install -y", "install --simulate"), project)

    clone = copy_of_the_clone(tmp_path / "aiordma")
    prefix = tmp_path / "installed"
    run(build.replace("/src", str(clone)).replace("/opt/aiordma", str(prefix)), project)
    (path,) = re.findall(r"^ENV PATH=/opt/aiordma/(.*):\$PATH$", text, re.MULTILINE)
    assert run(f"{prefix / path}/aiordma run ./write_to_self", project) == "embedded0: success\n"


def copy_of_the_clone(folder: Path) -> Path:
    """Copy all files that git tracks, as they are in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.rstrip("\0").split("\0"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


class Job:
    """A GitHub job that runs the scripts in action.yml as a runner would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = (ROOT / "action.yml").read_text()
        self.variables = {
            "RUNNER_TEMP": str(folder),
            "GITHUB_ACTION_PATH": str(copy_of_the_clone(folder / "action")),
            "GITHUB_PATH": str(folder / "path"),
            "GITHUB_OUTPUT": str(folder / "output"),
        }
        for name in ("path", "output"):
            (folder / name).touch()

    def step(self, number: int, cwd: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
        """Run a step of the action in `cwd`. Hyphens in input names are spelled as underscores."""
        step = self.text.partition("\n  steps:\n")[2].split("\n    - ")[number]
        script = textwrap.dedent(re.split(r"      run: \|.*\n", step)[1])
        defaults = re.findall(
            r"^  ([\w-]+):\n    description: .*\n    default: (.*)$", self.text, re.M
        )
        found = {f"inputs.{name}": value.strip('"') for name, value in defaults}
        found |= {f"inputs.{name.replace('_', '-')}": value for name, value in inputs.items()}
        for name, value in re.findall("^(.*?)=(.*)$", (self.folder / "output").read_text(), re.M):
            found[f"steps.install.outputs.{name}"] = value
        named = {
            name: found[value] for name, value in re.findall(r" +(\w+): \${{ (.*) }}$", step, re.M)
        }
        paths = [*reversed((self.folder / "path").read_text().splitlines()), os.environ["PATH"]]
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
            cwd=cwd,
            env={**os.environ, **self.variables, **named, "PATH": ":".join(paths)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
            check=False,
        )


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Provide a job in which the action has installed aiordma."""
    job = Job(tmp_path_factory.mktemp("job"))
    done = job.step(0, job.folder)
    assert done.returncode == 0, done.stdout
    return job


def test_documented_workflow_commands_succeed(project: Path, job: Job) -> None:
    """Run the commands of the workflow's last step, which uses the action."""
    (workflow,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    commands = textwrap.dedent(workflow.partition("run: |\n")[2])
    shutil.rmtree(project / "build", ignore_errors=True)
    done = job.step(1, project, run=commands)
    assert done.returncode == 0, done.stdout
    assert "100% tests passed, 0 tests failed out of 2" in done.stdout
    assert not any((job.folder / "rdma-traces").iterdir())


def test_action_saves_traces_when_a_command_fails(project: Path, job: Job) -> None:
    done = job.step(1, project, run="./write_to_self\necho not reached", faults="loss=1")
    assert done.returncode == 1
    assert "embedded0: transport retries exceeded" in done.stdout
    assert "not reached" not in done.stdout
    listed = done.stdout.partition("::group::")[2].partition("::endgroup::")[0]
    assert "fault=LOSS" in listed
    # The next step of the action uploads these traces.
    assert re.search(r"outputs\.traces }}\n", job.text)
    assert len([*(job.folder / "rdma-traces").glob("*/*.jsonl")]) == 1


def test_action_fails_when_no_command_uses_the_device(project: Path, job: Job) -> None:
    assert job.step(1, project, run="true").returncode == 125
    assert job.step(1, project, run="true", must_use="false").returncode == 0


def test_action_rejects_invalid_and_unused_inputs(project: Path, job: Job) -> None:
    for value in "yes", "True", "":
        done = job.step(1, project, run="true", must_use=value)
        assert done.stdout == f"::error::must-use is true or false, not '{value}'\n"
        assert done.returncode == 1
    done = job.step(0, project, faults="loss=1")
    assert done.stdout == "::error::faults: loss=1 has no effect without run\n"
    assert done.returncode == 1


def test_action_adds_only_the_aiordma_command_to_path(project: Path, job: Job) -> None:
    """Later steps get the `aiordma` command on their PATH, but not the rest of the environment."""
    done = job.step(0, project, python=str(job.folder / "aiordma/bin/python"), version="0.0.0")
    assert done.returncode != 0
    assert "aiordma[cli]==0.0.0" in done.stdout
    command = (job.folder / "path").read_text().splitlines()[0]
    assert [it.name for it in Path(command).iterdir()] == ["aiordma"]
