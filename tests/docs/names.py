"""Find every public name, for the reference and for the checks of its documentation.

The names of a public module are its ``__all__``, or else its definitions without a leading
underscore. The members of a class are its attributes without a leading underscore, including those
inherited from private classes of aiordma, and its special methods with a docstring. A docstring can
reserve a name for the package.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from .compiled import stand_ins

PACKAGE = Path(__file__).parents[2] / "aiordma"
REFERENCE = PACKAGE.parent / "docs" / "reference"

MODULES = (
    "aiordma",
    "aiordma.verbs",
    "aiordma.verbs.raw",
    "aiordma.verbs.experimental.efa",
    "aiordma.verbs.experimental.mlx5",
    "aiordma.cm",
    "aiordma.transport",
    "aiordma.streams",
    "aiordma.blocking",
    "aiordma.arrays",
    "aiordma.rpc",
    "aiordma.mr_pool",
    "aiordma.monitoring",
    "aiordma.prometheus",
    "aiordma.opentelemetry",
    "aiordma.testing",
    "aiordma.config",
    "aiordma.trace",
    "aiordma.errors",
)
"""The modules that users import from."""

# Matches the docstrings of names that are internal to the package.
_FOR_THE_PACKAGE = re.compile(r"internal to the library|for (the modules of )?this package", re.I)

_ASSIGNED = re.compile(r"\bself\.([a-z]\w*)(?:: [^=\n]+)? = ")
_CODE = re.compile(r"(?<!`)`{1,2}(\w+)`{1,2}(?!`)")

# All exceptions are documented on one page, even if other modules export them.
_OWN_PAGE = "aiordma.errors"


@dataclass(frozen=True)
class Member:
    """A method, property or class attribute of a public class."""

    name: str
    value: Any  # as stored in the class's __dict__
    owner: type  # the class whose __dict__ contains the value

    @property
    def function(self) -> Any:
        """The underlying function, or None for a value."""
        if isinstance(self.value, (classmethod, staticmethod)):
            return self.value.__func__
        if isinstance(self.value, property):
            return self.value.fget
        return self.value if inspect.isfunction(self.value) else None

    @property
    def key(self) -> str:
        """The qualified name of the definition, shared by all inheriting classes."""
        return f"{_short(self.owner.__module__)}.{self.owner.__qualname__}.{self.name}"


@dataclass(frozen=True)
class Name:
    """A public name with its value and the first public module that exports it."""

    module: str
    name: str
    value: Any = field(compare=False)  # may be unhashable

    @property
    def key(self) -> str:
        module = getattr(self.value, "__module__", self.module)
        return f"{_short(module)}.{getattr(self.value, '__qualname__', self.name)}"

    @property
    def is_exception(self) -> bool:
        return isinstance(self.value, type) and issubclass(self.value, BaseException)

    @property
    def doc(self) -> str:
        return own_doc(self.value)


def _short(module: str) -> str:
    return module.removeprefix("aiordma.")


def own_doc(value: Any) -> str:
    """Return the object's own docstring, neither inherited nor generated."""
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    doc = value.__dict__.get("__doc__") if isinstance(value, type) else value.__doc__
    doc = inspect.cleandoc(doc or "")
    made_up = isinstance(value, type) and doc.startswith(f"{value.__name__}(")
    return "" if made_up else doc


def member_doc(member: Member) -> str:
    """Return the docstring of the member or of the one it overrides."""
    doc = own_doc(member.value)
    if not doc and member.function is not None:
        doc = inspect.getdoc(getattr(member.owner, member.name)) or ""
    return doc


def value_doc(name: Name) -> str:
    """Return the docstring below the assignment that defines the name, or an empty string."""
    return _value_docs().get(name.name, "")


@functools.cache
def _value_docs() -> dict[str, str]:
    """Map each module-level name in the package to the docstring below its assignment."""
    found: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for statement, following in itertools.pairwise(ast.parse(path.read_text()).body):
            if isinstance(statement, ast.Assign):
                targets = statement.targets
            elif isinstance(statement, ast.AnnAssign):
                targets = [statement.target]
            else:
                continue
            if (
                isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
            ):
                for target in targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, inspect.cleandoc(following.value.value))
    return found


def names_in(module: ModuleType) -> list[str]:
    """Return the names that a module exports."""
    listed: list[str] | None = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", module.__name__) == module.__name__
        and not isinstance(value, ModuleType)
        and is_described(value)
        and not is_for_the_package(own_doc(value))
    ]


def is_for_the_package(doc: str) -> bool:
    """Return whether a docstring marks a name as internal to the package."""
    return bool(_FOR_THE_PACKAGE.search(doc))


def is_described(value: Any) -> bool:
    return inspect.isclass(value) or inspect.isfunction(value)


def public() -> list[Name]:
    """Return each public name once, in its first module. Exceptions are in ``aiordma.errors``."""
    found: dict[object, Name] = {}
    for path in (_OWN_PAGE, *MODULES):
        module = importlib.import_module(path)
        for name in names_in(module):
            value = getattr(module, name)
            exception = isinstance(value, type) and issubclass(value, BaseException)
            if path == _OWN_PAGE and not exception:
                continue  # added later by its own module
            if is_described(value):
                found.setdefault(id(value), Name(path, name, value))
            else:
                found.setdefault(name, Name(path, name, value))
    return list(found.values())


def is_written(member: Member) -> bool:
    """Return whether the member is defined in the package rather than generated by Python."""
    code = getattr(member.function, "__code__", None)
    return code is not None and Path(code.co_filename).is_relative_to(PACKAGE)


def members(cls: type, offered: set[type]) -> Iterator[Member]:
    """Yield a class's public members. Members of compiled classes precede all others."""
    values = set(cls.__members__) if issubclass(cls, enum.Enum) else set()
    seen: set[str] = set()
    for owner in sorted(cls.__mro__, key=lambda owner: not stand_ins(owner)):
        if not owner.__module__.startswith("aiordma") or (owner is not cls and owner in offered):
            continue
        for name, value in (stand_ins(owner) or vars(owner)).items():
            if name in seen or name in values or (owner is not cls and name in vars(cls)):
                continue
            seen.add(name)
            member = Member(name, value, owner)
            special = name.startswith("__") and name.endswith("__")
            if special and (name == "__init__" or not own_doc(value) or not is_written(member)):
                continue
            if member.function is None or (name.startswith("_") and not special):
                continue
            if not is_for_the_package(member_doc(member)):
                yield member


def attributes(cls: type) -> list[str]:
    """Return the instance attributes that the class docstring mentions as ``name``."""
    found: set[str] = set()
    for owner in cls.__mro__:
        if owner.__module__.startswith("aiordma"):
            found.update(inspect.get_annotations(owner))
            try:
                found.update(_ASSIGNED.findall(inspect.getsource(owner)))
            except (OSError, TypeError):
                continue  # a compiled class
    described = dict.fromkeys(_CODE.findall(own_doc(cls)))
    return [name for name in described if name in found and not hasattr(cls, name)]


_DIRECTIVE = re.compile(r"^\.\. public-(names|module):: (\S+)\n((?:\n? {3}.+\n)*)", re.MULTILINE)


def on_pages() -> tuple[list[tuple[str, Path]], list[str]]:
    """Return the (module, page) pairs of the reference, and the qualified names on its pages.

    The directives are defined in docs/_extensions/public_names.py.
    """
    modules, names = [], []
    for page in sorted(REFERENCE.glob("*.rst")):
        for kind, module, content in _DIRECTIVE.findall(page.read_text()):
            listed = content.split()
            if kind == "module" or not listed:
                modules.append((module, page))
            if kind == "names":
                everything = [name.name for name in public() if name.module == module]
                names += [f"{module}.{name}" for name in listed or everything]
    return modules, names
