"""The check of a wheel by `make package` and `make wheel` finds what is wrong with one."""

from __future__ import annotations

import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.package import (
    INTEGRATIONS,
    MACHINES,
    NEEDED,
    PYPROJECT,
    ROOT,
    check,
    check_integration,
    shared_classifiers,
)

MODULE = "_datapath/frames.cpython-311-aarch64-linux-gnu.so"


def wheel(folder: Path, *names: str, elf: str = "aarch64") -> Path:
    """A wheel for aarch64 with these files of the package, compiled for the machine ``elf``."""
    path = folder / "aiordma-0.1.0-cp311-cp311-manylinux_2_28_aarch64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(f"aiordma/{name}", bytes(18) + MACHINES[elf].to_bytes(2, "little"))
    return path


def test_a_good_wheel(tmp_path: Path) -> None:
    check(wheel(tmp_path, *NEEDED, MODULE))


@pytest.mark.parametrize(
    ("names", "elf", "message"),
    [
        (NEEDED[1:], "aarch64", "lacks: py.typed"),
        ([*NEEDED, "_datapath/frames.pxd"], "aarch64", r"not need: aiordma/_datapath/frames\.pxd"),
        (NEEDED, "x86_64", r"not for aarch64: .*libibverbs\.so\.1"),
        ([*NEEDED, MODULE.replace("aarch64", "x86_64")], "aarch64", "not for aarch64: .*frames"),
    ],
)
def test_a_bad_wheel(tmp_path: Path, names: list[str], elf: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        check(wheel(tmp_path, *names, elf=elf))


METADATA = "".join(
    f"{field}: {value}\n"
    for field, value in [
        ("Metadata-Version", "2.4"),
        ("Version", PYPROJECT["project"]["version"]),
        ("License-Expression", PYPROJECT["project"]["license"]),
        ("Requires-Python", PYPROJECT["project"]["requires-python"]),
        ("Requires-Dist", f"aiordma>={PYPROJECT['project']['version']}"),
        ("Requires-Dist", "distributed"),
        ("Classifier", "Framework :: AsyncIO"),
        *(("Classifier", it) for it in shared_classifiers(PYPROJECT["project"]["classifiers"])),
    ]
)


VERSION = PYPROJECT["project"]["version"]
NAME = f"dask_aiordma-{VERSION}-py3-none-any.whl"
TOLD = f"dask_aiordma-{VERSION}.dist-info"


def integration(
    folder: Path,
    *,
    metadata: str = METADATA,
    name: str = NAME,
    changed: dict[str, bytes | None] | None = None,
) -> Path:
    """A wheel of dask-aiordma; of the files that change, one that is None is left out."""
    path = folder / name
    every: dict[str, bytes | None] = {
        "dask_aiordma/py.typed": b"",
        f"{TOLD}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
        f"{TOLD}/METADATA": metadata.encode(),
        **(changed or {}),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in every.items():
            if content is not None:
                archive.writestr(file, content)
    return path


def test_a_good_integration(tmp_path: Path) -> None:
    check_integration(integration(tmp_path))


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("Requires-Dist: aiordma", "does not depend on aiordma>="),
        ("License-Expression", "has another licence"),
        ("Requires-Python", "is for other versions of Python"),
        ("Classifier: Programming Language :: Python :: 3.12", "has other classifiers"),
    ],
)
def test_an_integration_with_wrong_metadata(tmp_path: Path, removed: str, message: str) -> None:
    lines = METADATA.splitlines(keepends=True)
    metadata = "".join(line for line in lines if not line.startswith(removed))
    with pytest.raises(SystemExit, match=message):
        check_integration(integration(tmp_path, metadata=metadata))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("dask_aiordma/py.typed", None, "lacks py.typed"),
        ("tests/conftest.py", b"", "has files of no package"),
        (f"{TOLD}/licenses/LICENSE", b"another", "lacks the text of the licence"),
        (f"{TOLD}/licenses/LICENSE", None, "lacks the text of the licence"),
    ],
)
def test_an_integration_with_wrong_files(
    tmp_path: Path, file: str, content: bytes | None, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        check_integration(integration(tmp_path, changed={file: content}))


@pytest.mark.parametrize("name", [NAME.replace("py3", "cp311"), NAME.replace("-", "-9", 1)])
def test_an_integration_for_another_python_or_release(tmp_path: Path, name: str) -> None:
    with pytest.raises(SystemExit, match="is not for every Python, or not version"):
        check_integration(integration(tmp_path, name=name))


def test_every_integration_is_in_the_release() -> None:
    """By the same build backend, in the version of aiordma."""
    folders = {it.name for it in (ROOT / "integrations").iterdir()}
    assert {folder for folder, _, _ in INTEGRATIONS.values()} == folders
    for package_name, (folder, _, _) in INTEGRATIONS.items():
        described = tomllib.loads((ROOT / "integrations" / folder / "pyproject.toml").read_text())
        assert described["build-system"] == {
            "requires": PYPROJECT["dependency-groups"]["package"],
            "build-backend": "hatchling.build",
        }
        assert described["project"]["name"].replace("-", "_") == package_name
        assert described["project"]["version"] == PYPROJECT["project"]["version"]
