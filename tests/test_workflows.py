"""The workflows of GitHub do what .ci/run and the Makefile do; only GitHub can run them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.package import INTEGRATIONS, MINORS, PYPROJECT

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
    texts = [*WORKFLOWS.values(), (ROOT / "action.yml").read_text()]
    used = re.findall(r"uses: (?!\./\n)(.*)", "".join(texts))
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
