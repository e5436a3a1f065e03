"""Public names are loaded when they are first used, and are what type checkers take them for."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest

import aiordma
from tests.processes import run_python
from tests.test_imports import is_type_checking

PACKAGES = ("aiordma", "aiordma.cm", "aiordma.streams", "aiordma.verbs")


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def halves(package: ModuleType) -> tuple[dict[str, str], dict[str, str]]:
    """Name -> module, for the type checker and when the program runs."""
    assert package.__file__ is not None
    tree = ast.parse(Path(package.__file__).read_text())
    (choice,) = (
        node for node in tree.body if isinstance(node, ast.If) and is_type_checking(node.test)
    )
    typed = {}
    for statement in choice.body:
        assert isinstance(statement, ast.ImportFrom)
        (alias,) = statement.names
        # "as" the same name is what makes it a name of this module for type checkers.
        assert alias.asname == alias.name
        typed[alias.name] = "." * statement.level + (statement.module or "")
    (assignment,) = choice.orelse
    assert isinstance(assignment, ast.Assign)
    assert isinstance(assignment.value, ast.Call)
    table: dict[str, str] = ast.literal_eval(assignment.value.args[1])
    run = {name: module for module, names in table.items() for name in names.split()}
    return typed, run


def test_both_halves_say_the_same(package: ModuleType) -> None:
    typed, run = halves(package)
    assert typed == run
    assert sorted(run) == package.__all__


def test_every_name_is_that_of_its_module(package: ModuleType) -> None:
    for name, module in halves(package)[1].items():
        value = getattr(package, name)
        assert value is getattr(importlib.import_module(module, package.__name__), name)
        assert vars(package)[name] is value, "the next use asks again"


def test_no_name_is_hidden_by_a_module(package: ModuleType) -> None:
    """Importing ``package.name`` by itself would put the module in the place of the name."""
    folder = Path(str(package.__file__)).parent
    modules = {entry.name.removesuffix(".py") for entry in folder.iterdir()}
    assert not modules & set(package.__all__)


def test_dir_knows_what_has_not_been_loaded(package: ModuleType) -> None:
    assert set(package.__all__) <= set(dir(package))
    assert "__all__" in dir(package)


def test_other_names_are_refused(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no .* 'conect'"):
        package.conect  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'conect'"):
        exec(f"from {package.__name__} import conect")


def test_modules_of_the_package_are_reached_by_name() -> None:
    code = (
        "import aiordma\n"
        "print(aiordma.errors.RDMAError is aiordma.RDMAError, aiordma.transport.Rights.__name__)"
    )
    done = run_python("-c", code, check=True)
    assert done.stdout.split() == ["True", "Rights"]


def test_any_name_may_be_the_first(package: ModuleType) -> None:
    """No module counts on another one having been loaded before it."""
    names = {module: name for name, module in halves(package)[1].items()}
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
