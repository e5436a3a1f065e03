"""The check of a wheel by `make package` and `make wheel` finds what is wrong with one."""

from __future__ import annotations

import tomllib
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("names", "elf", "message"),
    [
        ([*NEEDED, MODULE], "aarch64", ""),
        (NEEDED[1:], "aarch64", "lacks: py.typed"),
        ([*NEEDED, "_datapath/frames.pxd"], "aarch64", r"not need: aiordma/_datapath/frames\.pxd"),
        (NEEDED, "x86_64", r"not for aarch64: .*libibverbs\.so\.1"),
        ([*NEEDED, MODULE.replace("aarch64", "x86_64")], "aarch64", "not for aarch64: .*frames"),
    ],
)
def test_a_wheel(tmp_path: Path, names: list[str], elf: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message) if message else nullcontext():
        check(wheel(tmp_path, *names, elf=elf))


METADATA = [
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
]


VERSION = PYPROJECT["project"]["version"]
NAME = f"dask_aiordma-{VERSION}-py3-none-any.whl"
TOLD = f"dask_aiordma-{VERSION}.dist-info"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, ""),
        ({"name": NAME.replace("py3", "cp311")}, "is not for every Python, or not version"),
        ({"name": NAME.replace("-", "-9", 1)}, "is not for every Python, or not version"),
        ({"metadata": "Requires-Dist: aiordma"}, "does not depend on aiordma>="),
        ({"metadata": "License-Expression"}, "has another licence"),
        ({"metadata": "Requires-Python"}, "is for other versions of Python"),
        ({"metadata": "Classifier: Programming Language"}, "has other classifiers"),
        ({"dask_aiordma/py.typed": None}, "lacks py.typed"),
        ({"tests/conftest.py": b""}, "has files of no package"),
        ({f"{TOLD}/licenses/LICENSE": b"another"}, "lacks the text of the licence"),
        ({f"{TOLD}/licenses/LICENSE": None}, "lacks the text of the licence"),
    ],
)
def test_an_integration(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    """A wheel of dask-aiordma with another name, without some metadata, or with other files."""
    changed = changed.copy()
    path = tmp_path / changed.pop("name", NAME)
    without = changed.pop("metadata", "nothing")
    metadata = [line for line in METADATA if not line.startswith(without)]
    files = {
        "dask_aiordma/py.typed": b"",
        f"{TOLD}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
        f"{TOLD}/METADATA": "".join(metadata).encode(),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in (files | changed).items():
            if content is not None:
                archive.writestr(file, content)
    with pytest.raises(SystemExit, match=message) if message else nullcontext():
        check_integration(path)


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
