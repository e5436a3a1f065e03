"""Tests that public names are loaded at their first use, with the types that checkers see."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest

import aiordma
from tests.processes import run_python

PACKAGES = ("aiordma", "aiordma.cm", "aiordma.streams", "aiordma.verbs")


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def exports(package: ModuleType) -> dict[str, str]:
    """Map each export to its module, as listed in the stub generated at build time."""
    name = package.__name__.split(".")[-1]
    stub = Path(str(aiordma.__file__)).parent / "_exports" / f"{name}.pyi"
    lines = (line.split() for line in stub.read_text().splitlines() if line.startswith("from"))
    return {name: module for _, module, _, name, *_ in lines}


def test_lazy_exports_resolve_to_module_attributes(package: ModuleType) -> None:
    assert sorted(exports(package)) == package.__all__
    for name, module in exports(package).items():
        value = getattr(package, name)
        assert value is getattr(importlib.import_module(module), name)
        assert vars(package)[name] is value, "the next use asks again"


def test_exports_do_not_share_names_with_modules(package: ModuleType) -> None:
    """Importing the module ``package.name`` would replace the export of the same name."""
    folder = Path(str(package.__file__)).parent
    modules = {entry.name.removesuffix(".py") for entry in folder.iterdir()}
    assert not modules & set(package.__all__)


def test_dir_lists_exports_before_they_are_loaded(package: ModuleType) -> None:
    assert set(package.__all__) <= set(dir(package))
    assert "__all__" in dir(package)


def test_unknown_export_raises_attribute_and_import_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no .* 'conect'"):
        package.conect  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'conect'"):
        exec(f"from {package.__name__} import conect")


def test_modules_of_the_package_are_attributes() -> None:
    code = (
        "import aiordma\n"
        "print(aiordma.errors.RDMAError is aiordma.RDMAError, aiordma.transport.Rights.__name__)"
    )
    done = run_python("-c", code, check=True)
    assert done.stdout.split() == ["True", "Rights"]


def test_every_module_can_be_imported_on_its_own(package: ModuleType) -> None:
    """No module depends on another one having been loaded before it."""
    names = {module: name for name, module in exports(package).items()}
    code = f"""
import os, sys, traceback
import asyncio, cffi, msgpack  # what does not differ is loaded once
for module, name in {names!r}.items():
    child = os.fork()
    if not child:
        try:
            exec(f"from {package.__name__} import {{name}}")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{{module}} cannot be loaded first")
"""
    root = os.path.dirname(os.path.dirname(str(aiordma.__file__)))
    done = run_python("-c", code, cwd=root)
    assert done.returncode == 0, done.stderr
