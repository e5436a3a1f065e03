"""The workflows of GitHub do what .ci/run and the Makefile do; only GitHub can run them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.package import MINORS, PYPROJECT

ROOT = Path(__file__).parents[1]
WORKFLOWS = {it.name: it.read_text() for it in (ROOT / ".github/workflows").glob("*.yml")}
STEPS = re.findall(r"^step (\S+) (.*)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
VERSIONS = [f"3.{minor}" for minor in MINORS]


def test_the_jobs_of_ci_are_the_steps() -> None:
    (listed,) = re.findall(r"^ +step:\n((?: +- \S+\n)+)", WORKFLOWS["ci.yml"], re.MULTILINE)
    assert re.findall(r"- (\S+)", listed) == [name for name, _ in STEPS if name != "packages"]
    assert ".ci/run ${{ matrix.step }}" in WORKFLOWS["ci.yml"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_the_targets_are_there(name: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([\w-]+)", WORKFLOWS[name])) <= targets


def test_actions_are_pinned_by_commit() -> None:
    """A tag or branch of an action can be moved, a commit cannot; one version of each is used."""
    used = re.findall(r"uses: *(.*)", "".join(WORKFLOWS.values()))
    assert used
    assert [it for it in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+(\.\d+)+", it)] == []
    assert len(set(used)) == len({it.partition("@")[0] for it in used})


def test_the_release_has_every_version_of_python() -> None:
    text = WORKFLOWS["release.yml"]
    (installed,) = re.findall(r"python-version: \|\n((?: +[\d.]+\n)+)", text)
    assert installed.split() == VERSIONS
    (made,) = re.findall(r"make wheel .*ARGS='(.*)'", text)
    assert made.split() == [f"python{it}" for it in VERSIONS]
    (tried,) = re.findall(r"python: \[(.*)\]", text)
    assert tried == ", ".join(f'"{it}"' for it in VERSIONS)


def test_the_classifiers_have_every_version_of_python() -> None:
    classifiers = PYPROJECT["project"]["classifiers"]
    named = [it.rpartition(" ")[2] for it in classifiers if re.search(r":: 3\.\d+$", it)]
    assert named == VERSIONS
    assert PYPROJECT["project"]["requires-python"] == f">={VERSIONS[0]}"


def test_only_a_tag_is_published_and_without_a_password() -> None:
    publish = WORKFLOWS["release.yml"].partition("\n  publish:\n")[2]
    assert "if: startsWith(github.ref, 'refs/tags/v')" in publish
    assert "id-token: write" in publish
    assert "secrets." not in "".join(WORKFLOWS.values())


def test_a_step_that_is_not_there_is_refused() -> None:
    done = subprocess.run(
        [ROOT / ".ci/run", "no-such"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "there is no step no-such\n")
    assert "packages" not in done.stdout
