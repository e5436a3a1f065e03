"""The stubs of the compiled modules against the modules and their sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import GetSetDescriptorType, ModuleType
from typing import Any

import pytest

from aiordma._datapath.futures import OpFuture
from aiordma._datapath.work_queue import WorkRequestTable

FOLDER = Path(__file__).parents[2] / "aiordma" / "_datapath"
NAMES = sorted(path.stem for path in FOLDER.glob("*.pyx"))

# In the namespace of every compiled class, or of some versions of Python.
OF_ALL = {
    "__buffer__",
    "__class__",
    "__doc__",
    "__eq__",
    "__ge__",
    "__gt__",
    "__hash__",
    "__le__",
    "__lt__",
    "__ne__",
    "__new__",
    "__pyx_vtable__",
    "__reduce_cython__",
    "__release_buffer__",
    "__repr__",
    "__setstate_cython__",
    "decode",  # of a Message: only an error that says what to write
}
SUBCLASSABLE = 1 << 10  # Py_TPFLAGS_BASETYPE


def written(name: str) -> dict[str, ast.stmt]:
    """The names of a stub, without protocols, which exist for annotations only."""
    body = ast.parse((FOLDER / f"{name}.pyi").read_text()).body
    return {name: node for name, node in named(body) if not is_protocol(node)}


def named(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node


def base_names(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).partition("[")[0] for base in node.bases]


def is_protocol(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and "Protocol" in base_names(node)


def defined(module: ModuleType) -> set[str]:
    """The names of a module, without what it imports."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("__")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", module.__name__) in {module.__name__, None}
        and type(value).__module__ == "builtins"
    }


CLASSES = [
    (name, class_name)
    for name in NAMES
    for class_name, node in written(name).items()
    if isinstance(node, ast.ClassDef)
]


def has_setter(kind: Any, member: str) -> bool:
    """A read-only attribute of a compiled class refuses with AttributeError."""
    needs = (WorkRequestTable(),) if issubclass(kind, OpFuture) else ()
    instance = kind.__new__(kind, *needs)
    try:
        vars(kind)[member].__set__(instance, None)
    except AttributeError:
        return False
    except TypeError:
        pass  # it takes another type than None
    return True


def decorators(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    return {ast.unparse(each) for each in node.decorator_list}


def test_each_module_has_a_stub() -> None:
    assert NAMES
    assert {path.stem for path in FOLDER.glob("*.pyi")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_module(name: str) -> None:
    module = import_module(f"aiordma._datapath.{name}")
    assert set(written(name)) == defined(module)
    for found, node in written(name).items():
        assert isinstance(getattr(module, found), type) == isinstance(node, ast.ClassDef), found
        assert callable(getattr(module, found)) != isinstance(node, ast.AnnAssign), found


@pytest.mark.parametrize(("name", "class_name"), CLASSES)
def test_members_of_the_class(name: str, class_name: str) -> None:
    node = written(name)[class_name]
    assert isinstance(node, ast.ClassDef)
    kind: type = getattr(import_module(f"aiordma._datapath.{name}"), class_name)
    stub = {member: each for member, each in named(node.body) if member not in OF_ALL}
    assert set(stub) == set(vars(kind)) - OF_ALL
    for member, each in stub.items():
        is_method = isinstance(each, ast.FunctionDef) and "property" not in decorators(each)
        is_attribute = isinstance(vars(kind)[member], GetSetDescriptorType)
        assert is_method != is_attribute, member
        if is_attribute:
            assert has_setter(kind, member) == isinstance(each, ast.AnnAssign), member
    assert ("final" in decorators(node)) != bool(kind.__flags__ & SUBCLASSABLE)
    # Classes of the library alone: `Coroutine` is one for its methods, not by inheritance.
    real = [base.__name__ for base in kind.__bases__ if base is not object]
    assert [base for base in base_names(node) if base != "Coroutine"] == real


def parameters_of_stub(node: ast.FunctionDef) -> list[str]:
    every = node.args
    positional = [*every.posonlyargs, *every.args]
    required = len(positional) - len(every.defaults)
    found = [each.arg + "=" * (i >= required) for i, each in enumerate(positional)]
    if every.vararg is not None:
        found.append(f"*{every.vararg.arg}")
    elif every.kwonlyargs:
        found.append("*")
    pairs = zip(every.kwonlyargs, every.kw_defaults, strict=True)
    return found + [each.arg + "=" * (default is not None) for each, default in pairs]


def parameters_of_source(name: str) -> dict[tuple[str, str], list[str]]:
    """Of each `def`, by the class (or nothing) and its name."""
    found = {}
    class_name = ""
    source = (FOLDER / f"{name}.pyx").read_text()
    pattern = r"^(?:cdef class (\w+)|(    )?def (\w+)\((.*?)\):)"
    for match in re.finditer(pattern, source, re.MULTILINE | re.DOTALL):
        if match[1]:
            class_name = match[1]
        elif match[3]:
            parameters = [each.strip() for each in match[4].split(",") if each.strip()]
            names = [
                each.removesuffix(" not None").partition("=")[0].split()[-1] + "=" * ("=" in each)
                for each in parameters
            ]
            found[class_name if match[2] else "", match[3]] = names
    return found


@pytest.mark.parametrize("name", NAMES)
def test_parameters(name: str) -> None:
    source = parameters_of_source(name)
    stub: dict[tuple[str, str], ast.stmt] = {}
    for top, node in written(name).items():
        if isinstance(node, ast.ClassDef):
            stub |= {(top, inner): each for inner, each in named(node.body)}
        else:
            stub["", top] = node
    for (class_name, method), node in stub.items():
        if not isinstance(node, ast.FunctionDef) or "property" in decorators(node):
            continue
        if method == "__buffer__":
            continue
        parameters = parameters_of_stub(node)
        if method == "__new__":
            assert source[class_name, "__cinit__"] == ["self", *parameters[1:]], class_name
        else:
            assert source[class_name, method] == parameters, (class_name, method)
