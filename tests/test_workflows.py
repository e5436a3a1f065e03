"""The workflows of GitHub do what .ci/run and the Makefile do; only GitHub can run them."""

from __future__ import annotations

import io
import os
import re
import subprocess
import tarfile
import textwrap
from pathlib import Path

import pytest

from tests.package import INTEGRATIONS, MINORS, PYPROJECT
from tests.processes import run

ROOT = Path(__file__).parents[1]
WORKFLOWS = {it.name: it.read_text() for it in (ROOT / ".github/workflows").glob("*.yml")}
STEPS = re.findall(r"^step (\S+) (.*)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
VERSIONS = [f"3.{minor}" for minor in MINORS]


def test_the_jobs_of_ci_are_the_steps() -> None:
    (listed,) = re.findall(r"^ +step:\n((?: +- \S+\n)+)", WORKFLOWS["ci.yml"], re.MULTILINE)
    assert re.findall(r"- (\S+)", listed) == [name for name, _ in STEPS if name != "packages"]
    assert ".ci/run ${{ matrix.step }}" in WORKFLOWS["ci.yml"]


def test_the_targets_are_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([\w-]+)", "".join(WORKFLOWS.values()))) <= targets


def test_actions_are_pinned_by_commit() -> None:
    """A tag or branch of an action can be moved, a commit cannot; one version of each is used."""
    used = re.findall(r"uses: *(.*)", "".join(WORKFLOWS.values()))
    assert used
    assert [it for it in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+(\.\d+)+", it)] == []
    assert len(set(used)) == len({it.partition("@")[0] for it in used})


def test_the_release_has_every_version_of_python_and_every_integration() -> None:
    text = WORKFLOWS["release.yml"]
    (installed,) = re.findall(r"python-version: \|\n((?: +[\d.]+\n)+)", text)
    (made,) = re.findall(r"make wheel .*ARGS='(.*)'", text)
    (tried,) = re.findall(r"python: \[(.*)\]", text)
    classifiers = re.findall(r":: (3\.\d+)\b", " ".join(PYPROJECT["project"]["classifiers"]))
    for named in (installed, made, tried, " ".join(classifiers)):
        assert re.findall(r"3\.\d+", named) == VERSIONS
    assert PYPROJECT["project"]["requires-python"] == f">={VERSIONS[0]}"
    (projects,) = re.findall(r"project: \[(.*)\]", text)
    first, *others = projects.replace("-", "_").split(", ")
    assert first == "aiordma"
    assert sorted(others) == sorted(INTEGRATIONS)
    assert "max-parallel: 1" in text


def test_only_a_tag_is_published_and_without_a_password() -> None:
    publish = WORKFLOWS["release.yml"].partition("\n  publish:\n")[2]
    assert "if: startsWith(github.ref, 'refs/tags/v')" in publish
    assert "id-token: write" in publish
    assert "secrets." not in "".join(WORKFLOWS.values())


MADE = [
    "aiordma-1.2.tar.gz",
    "aiordma-1.2-cp311-cp311-linux_x86_64.whl",
    "dask_aiordma-1.2.tar.gz",
    "dask_aiordma-1.2-py3-none-any.whl",
]


@pytest.mark.parametrize(
    ("tag", "url", "published"),
    [
        ("v1.2", "https://a-forge.example/us/aiordma", MADE[2:]),
        ("v1.3", "https://a-forge.example/us/aiordma", []),
        ("v1.2", "https://a-forge.example/us/aiordma-of-others", []),
    ],
)
def test_what_of_a_tag_is_published(
    tmp_path: Path, tag: str, url: str, published: list[str]
) -> None:
    """The files of the project, if they have the tag's version and the forge's address."""
    dist = tmp_path / "dist"
    dist.mkdir()
    for name in MADE:
        (dist / name).touch()
        if name.endswith(".tar.gz"):
            with tarfile.open(dist / name, "w:gz") as archive:
                text = f"Version: 1.2\nProject-URL: source, {url}\n".encode()
                info = tarfile.TarInfo(f"{name.removesuffix('.tar.gz')}/PKG-INFO")
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text))
    (step,) = re.findall(r"PROJECT: .*\n +run: \|\n((?: {10}.*\n)+)", WORKFLOWS["release.yml"])
    done = subprocess.run(
        ["bash", "-e", "-c", textwrap.dedent(step)],
        cwd=tmp_path,
        env={
            **os.environ,
            "PROJECT": "dask-aiordma",
            "GITHUB_REF_NAME": tag,
            "GITHUB_REPOSITORY": "us/aiordma",
        },
        capture_output=True,
        check=False,
    )
    assert (done.returncode == 0) == bool(published)
    assert sorted(it.name for it in tmp_path.glob("publish/*")) == sorted(published)


def test_a_step_that_is_not_there_is_refused() -> None:
    done = run(ROOT / ".ci/run", "no-such")
    assert (done.returncode, done.stderr) == (2, "there is no step no-such\n")
    assert "packages" not in done.stdout


@pytest.mark.parametrize(
    ("argument", "failed", "steps"),
    [("lint", "check", [name for name, _ in STEPS]), ("update", "packages", ["packages"])],
)
def test_one_run_says_all_that_is_wrong(
    tmp_path: Path, argument: str, failed: str, steps: list[str]
) -> None:
    """The steps after a failed one run too; without the packages none does."""
    for name in ("make", "apt-get"):
        program = tmp_path / name
        program.write_text(
            f'#!/bin/sh\nexec >&2\necho {name} "$*"\n'
            f'case "$* " in *"{argument} "*) echo "error: 3"; exit 1; esac\n'
        )
        program.chmod(0o755)
    done = run(ROOT / ".ci/run", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert re.search(f"==== the end of {failed}, .*\n.*{argument}", done.stdout)
    assert re.search(rf"\nFAILED .*  {failed}\n +error: 3\n", done.stdout)
    summary = re.findall(r"^(ok|FAILED) +\d+ s  (\S+)$", done.stdout, re.MULTILINE)
    assert summary == [("FAILED" if name == failed else "ok", name) for name in steps]
