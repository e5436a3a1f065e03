"""The build: meson.build names every source, and a change compiles what depends on it.

A source that is left out would be neither compiled nor tested.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from aiordma._datapath import work_queue
from aiordma._native import _lib

ROOT = Path(__file__).parents[1]
FOLDERS = ("native/verbs", "native/softdev", "tests/soft", "tests/fuzz")
DATAPATH = "aiordma/_datapath"


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_source_is_built(folder: str) -> None:
    described = (ROOT / folder / "meson.build").read_text()
    every = folder == "native/softdev"  # its folders have no meson.build of their own
    sources = list((ROOT / folder).glob("**/*.c" if every else "*.c"))
    assert sources
    names = [it.relative_to(ROOT / folder).with_suffix("") for it in sources]
    left_out = [name for name in names if f"'{name}'" not in described.replace(".c'", "'")]
    assert not left_out


@pytest.mark.parametrize("module", [_lib, work_queue], ids=lambda it: it.__name__)
def test_a_module_exports_only_what_python_calls(module: ModuleType) -> None:
    """Both are linked with a static library, whose names could meet those of libibverbs."""
    assert module.__file__
    command = ("nm", "--dynamic", "--defined-only", "--format=just-symbols", module.__file__)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["PyInit_" + module.__name__.rpartition(".")[2]]


class Build:
    """A copy of the sources, built with nothing of the virtual environment on the PATH."""

    def __init__(self, top: Path, *options: str) -> None:
        self.source, self.folder = top / "source", top / "build"
        # Other processes write and replace compiled files meanwhile; their folders stay.
        compiled = shutil.ignore_patterns("*.pyc*")
        for name in ("aiordma", "native", "tests/soft", "tests/fuzz"):
            shutil.copytree(ROOT / name, self.source / name, symlinks=True, ignore=compiled)
        for name in ("meson.build", "meson.options"):
            shutil.copy(ROOT / name, self.source)
        meson = (sys.executable, "-m", "mesonbuild.mesonmain")
        self.run(*meson, "setup", *options, self.folder, self.source)

    def run(self, *command: str | Path) -> str:
        done = subprocess.run(
            command,
            env={**os.environ, "PATH": "/usr/local/bin:/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stdout

    def ninja(self, *arguments: str) -> str:
        ninja = shutil.which(
            "ninja", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
        )
        assert ninja
        return self.run(ninja, "-C", self.folder, *arguments)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return Build(tmp_path_factory.mktemp("build"))


def test_modules_of_the_data_path_are_built_and_their_sources_not_installed(build: Build) -> None:
    plan = json.loads((build.folder / "meson-info/intro-install_plan.json").read_text())
    built = {Path(it).name.partition(".")[0] for it in plan["targets"] if DATAPATH in it}
    assert built == {it.stem for it in (ROOT / DATAPATH).glob("*.pyx")}
    (package,) = plan["install_subdirs"].values()
    # The stubs come from the build, which writes them beside the sources too.
    suffixes = (".pyx", ".pxd", ".pyi")
    sources = {
        f"_datapath/{it.stem}{end}" for it in (ROOT / DATAPATH).glob("*.pyx") for end in suffixes
    }
    others = {"_datapath/meson.build", "_native/_lib.pyi"}
    assert sources | others == set(package["exclude_files"])
    top = build.source / "aiordma"
    caches = {str(it.relative_to(top)) for it in top.rglob("__pycache__")}
    assert caches == set(package["exclude_dirs"])


def test_a_change_compiles_what_depends_on_it(build: Build) -> None:
    """Also where the PATH has no program `cython`: an import compiles, whatever started it."""
    modules = [f"{DATAPATH}/{name}.c" for name in ("frames", "memory", "sends")]
    build.ninja(*modules)
    assert "no work to do" in build.ninja("-n", *modules)
    (build.source / DATAPATH / "frames.pxd").touch()
    again = build.ninja("-n", "--verbose", *modules)
    assert f"{DATAPATH}/frames.c" in again
    assert f"{DATAPATH}/sends.c" in again  # it says `from .frames cimport`
    assert f"{DATAPATH}/memory.c" not in again


def test_other_builds_check_and_trace(build: Build, tmp_path: Path) -> None:
    """Under a sanitizer an attribute of None raises; with coverage each line is told."""
    other = Build(tmp_path, "-Db_sanitize=address", "-Db_coverage=true")
    c = f"{DATAPATH}/frames.c"
    for one in build, other:
        one.ninja(c)
        for text in "\\047NoneType\\047 object has no attribute", "__Pyx_TraceLine(":
            assert (text in (one.folder / c).read_text()) == (one is other)
