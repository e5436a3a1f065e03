"""Run the tests of a newer rdma-core than Debian's: `make upstream`.

PyPI has source releases of pyverbs, each with its rdma-core and the tests. Compiling one takes
minutes, so `make programs` leaves this file out. Only modules for all devices are compiled. Vendor
modules, which the tests always import, are replaced by empty ones, and the tests of these cards are
left out.

The build needs CMake, ninja, pkg-config and libnl's headers from Debian (`PACKAGES`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from .test_upstream import adapt, judge, run_suite

PACKAGES = "cmake ninja-build pkg-config libnl-3-dev libnl-route-3-dev"

# Compiled modules are kept in this folder and reused by later runs.
BUILDS = Path(__file__).parents[3] / "build" / "upstream"

# The rdma-core versions to test, each with the minimum number of tests that must pass.
PASSING = {"59.0": 150, "57.0": 145}

# Cython 3.1 and later omit the constants of an older rdma-core from pyverbs.enums.
CYTHON = {"57.0": "cython<3.1"}

# A package that has every possible submodule, each of which has every possible class.
EMPTY_PROVIDERS = """
import importlib.abc
import importlib.machinery
import sys
import types


class Empty(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Providers(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.startswith(__name__ + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Providers())
"""


def call(*words: str | Path) -> None:
    """Run a program. If it fails, fail the test with the end of the program's output."""
    done = subprocess.run(
        words, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        pytest.fail(f"{' '.join(map(str, words))}:\n{done.stdout[-4000:]}", pytrace=False)


def fetch(version: str, python: Path, folder: Path) -> Path:
    """Download pyverbs from PyPI. Return the folder with the rdma-core sources that it contains."""
    pip = [str(python), "-m", "pip", "download", "--quiet", "--no-deps"]
    call(*pip, "--no-binary=pyverbs", "--dest", folder, f"pyverbs=={version}")
    call("tar", "-xf", folder / f"pyverbs-{version}.tar.gz", "-C", folder)
    return folder / f"pyverbs-{version}" / "rdma-core"


def compile_modules(source: Path, python: Path, folder: Path, cython: str) -> None:
    """Compile pyverbs without its providers, and the libraries that it is linked with."""
    for program in ("cmake", "ninja", "pkg-config"):
        if shutil.which(program) is None:
            pytest.fail(f"{program} is not there: apt-get install {PACKAGES}", pytrace=False)
    call(python, "-m", "pip", "install", "--quiet", cython)
    options = {
        "NO_MAN_PAGES": "1",
        "NO_PYVERBS": "0",
        "IN_PLACE": "1",
        "CMAKE_BUILD_TYPE": "Debug",
        "CMAKE_C_FLAGS": "-O0 -g0 -Wno-error",
        "PYTHON_EXECUTABLE": str(python),
    }
    defines = [f"-D{name}={value}" for name, value in options.items()]
    call("cmake", "-S", source, "-B", folder / "out", "-GNinja", *defines)
    listed = subprocess.check_output(
        ["ninja", "-C", folder / "out", "-t", "targets", "all"], text=True
    )
    suffix = re.escape(sysconfig.get_config_var("EXT_SUFFIX"))
    modules = re.findall(rf"^(python/pyverbs/\w+{suffix}):", listed, re.MULTILINE)
    call("ninja", "-C", folder / "out", *modules)
    providers = folder / "out" / "python" / "pyverbs" / "providers"
    shutil.rmtree(providers, ignore_errors=True)
    providers.mkdir()
    (providers / "__init__.py").write_text(EMPTY_PROVIDERS)


def built(version: str, folder: Path) -> None:
    """Compile pyverbs and copy its tests to `folder`, unless an earlier run has done so."""
    if (folder / "tests").is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    source = fetch(version, python, folder)
    compile_modules(source, python, folder, CYTHON.get(version, "cython"))
    shutil.copytree(source / "tests", folder / "unpacked", dirs_exist_ok=True)
    for one in [*folder.glob("unpacked/test_mlx5*"), *folder.glob("unpacked/test_efa*")]:
        one.unlink()
    (folder / "unpacked").rename(folder / "tests")  # last, to mark the folder as complete


@pytest.mark.timeout(3600)  # for the compiler, on a machine with two busy cores
@pytest.mark.parametrize("version", PASSING)
def test_newer_rdma_core_tests_pass_on_the_embedded_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, port: int
) -> None:
    folder = BUILDS / version
    programs = folder / "venv" / "bin"
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    built(version, folder)
    monkeypatch.setenv("PYTHONPATH", str(folder / "out" / "python"))
    shutil.copytree(folder / "tests", tmp_path / "tests")
    adapt(tmp_path / "tests", port)
    judge(run_suite(tmp_path / "tests", str(programs / "python")), PASSING[version])
