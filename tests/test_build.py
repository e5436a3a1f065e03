"""Tests of the build: its sources, its symbols, and what a change recompiles.

A source that meson.build does not name would be neither compiled nor tested.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from aiordma._datapath import work_queue
from aiordma._native import _lib
from tests.processes import run

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "native/verbs",
    "softdev/src",
    *(f"softdev/tests/{it}" for it in ("soft", "fuzz", "pair")),
)
DATAPATH = "aiordma/_datapath"


@pytest.mark.parametrize("folder", FOLDERS)
def test_meson_build_lists_every_c_source(folder: str) -> None:
    described = (ROOT / folder / "meson.build").read_text()
    every = folder == "softdev/src"  # its subfolders have no meson.build
    sources = list((ROOT / folder).glob("**/*.c" if every else "*.c"))
    assert sources
    names = [it.relative_to(ROOT / folder).with_suffix("") for it in sources]
    left_out = [name for name in names if f"'{name}'" not in described.replace(".c'", "'")]
    assert not left_out


@pytest.mark.parametrize("module", [_lib, work_queue], ids=lambda it: it.__name__)
def test_extension_modules_export_only_their_init_function(module: ModuleType) -> None:
    """Both are linked with a static library, whose names could meet those of libibverbs."""
    assert module.__file__
    options = ("--dynamic", "--defined-only", "--format=just-symbols")
    done = run("nm", *options, module.__file__, check=True)
    assert done.stdout.split() == ["PyInit_" + module.__name__.rpartition(".")[2]]


@pytest.mark.parametrize(
    ("target", "package"),
    [
        ("site", "graphviz"),
        ("software", "redis-server"),
        ("network", "iproute2"),
        ("instructions", "valgrind"),
        ("fuzz", "clang"),
        ("programs", "ibverbs-utils"),
    ],
)
def test_make_reports_a_missing_package_before_setup(
    target: str, package: str, tmp_path: Path
) -> None:
    """Setting up the environment first would take minutes."""
    make, bash = shutil.which("make"), shutil.which("bash")
    assert make
    assert bash
    (tmp_path / "bash").symlink_to(bash)
    # The tests may have been started by make. Hide this, because a recursive make prints the
    # directory that it enters.
    done = run(make, target, "PYTHON=none", PATH=str(tmp_path), MAKEFLAGS="", MAKELEVEL="0")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"is missing: on Debian and Ubuntu, apt-get install {package}\n" in done.stderr


def test_change_recompiles_only_dependent_modules(tmp_path: Path) -> None:
    """An import compiles the modules, even if `cython` is not on the PATH."""
    source, folder = tmp_path / "source", tmp_path / "build"
    # Skip .pyc files, because other processes may replace them during the copy.
    compiled = shutil.ignore_patterns("*.pyc*")
    for name in ("aiordma", "native", "softdev"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=compiled)
    for name in ("meson.build", "meson.options"):
        shutil.copy(ROOT / name, source)
    programs = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    ninja = shutil.which("ninja", path=programs)
    assert ninja

    def build(*command: str | Path) -> str:
        return run(*command, PATH="/usr/local/bin:/usr/bin:/bin", check=True).stdout

    modules = [f"{DATAPATH}/{name}.c" for name in ("frames", "memory", "outbox")]
    build(sys.executable, "-m", "mesonbuild.mesonmain", "setup", folder, source)
    build(ninja, "-C", folder, *modules)
    assert "no work to do" in build(ninja, "-C", folder, "-n", *modules)
    (source / DATAPATH / "frames.pxd").touch()
    again = build(ninja, "-C", folder, "-n", "--verbose", *modules)
    assert f"{DATAPATH}/frames.c" in again
    assert f"{DATAPATH}/outbox.c" in again  # contains `from .frames cimport`
    assert f"{DATAPATH}/memory.c" not in again
