"""docs/ci-without-hardware.md: its programs and commands, its container file, its workflow.

The commands that make network namespaces are in tests/network.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.page_commands import blocks, files, prints, run_commands

from .conftest import installed

# Seconds for the commands of a test, which compile the package, and for a test with those of its
# project, however busy the machine is.
LIMIT = 1000.0
pytestmark = pytest.mark.timeout(LIMIT + 100)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "ci-without-hardware.md"
FIRST = ["A first test", "Any test command"]
SECTIONS = [
    "Was the device used?",
    "Faults",
    "Traces of failed tests",
    "Sanitizers and valgrind",
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the page, where the commands of its first sections have run."""
    for program in ("cmake", "c++", "valgrind"):
        installed(program)
    folder = tmp_path_factory.mktemp("project")
    for name, text in files(PAGE).items():
        (folder / name).write_text(text)
    # The interpreter that the distribution's pyverbs is for.
    (folder / "python3").symlink_to("/usr/bin/python3")
    for section in FIRST:
        run_section(section, folder)
    return folder


def run_section(section: str, project: Path) -> None:
    """Run its commands; they print what the page says, on standard output and error."""
    found = blocks(PAGE, section)
    assert found
    for block in found:
        prints(run(block.commands, project), block.output)


def run(commands: str, project: Path) -> str:
    """Standard output and error of commands of the page."""
    return run_commands("exec 2>&1\n" + commands, project, project, LIMIT)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_commands(section: str, project: Path) -> None:
    run_section(section, project)


def test_two_processes(project: Path, port: int) -> None:
    installed("rping")
    block, _ = blocks(PAGE, "Several processes, two hosts")
    printed = run(block.commands.replace("7471", str(port)).replace("1D2F", f"{port:04X}"), project)
    assert printed.count("ping data: rdma-ping-4: ") == 2


# ---- the container and the workflow -------------------------------------------------------------


def commands_of(container_file: str) -> list[str]:
    return re.findall(r"^RUN (.*)$", container_file.replace("\\\n", ""), re.MULTILINE)


def test_the_container_files(project: Path, tmp_path: Path) -> None:
    """Their packages exist; the command of that of the clone makes a working `aiordma`."""
    text = (ROOT / "Containerfile").read_text()
    page = files(PAGE)["Containerfile"]
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"debian:12-slim"}
    assert page.startswith("FROM aiordma\n")
    first, build, second = commands_of(text)
    for packages in (first, second, *commands_of(page)):
        update, install, *_ = packages.split(" && ")
        assert update == "apt-get update"
        run(install.replace("install -y", "install --simulate"), project)

    clone = tmp_path / "aiordma"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.rstrip("\0").split("\0"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    prefix = tmp_path / "installed"
    run(build.replace("/src", str(clone)).replace("/opt/aiordma", str(prefix)), project)
    (path,) = re.findall(r"^ENV PATH=/opt/aiordma/(.*):\$PATH$", text, re.MULTILINE)
    assert run(f"{prefix / path}/aiordma run ./write_to_self", project) == "embedded0: success\n"


def test_the_workflow(project: Path) -> None:
    """The commands in its container, in a folder of their own."""
    (workflow,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (commands,) = re.findall(r"rdma sh -euc\n +'(.*?)'", workflow, re.DOTALL)
    shutil.rmtree(project / "build", ignore_errors=True)
    printed = run(commands, project)
    assert "100% tests passed, 0 tests failed out of 2" in printed
