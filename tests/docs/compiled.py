"""Replacements for members of compiled classes, with the types from the stubs.

Cython keeps docstrings but not types, which are in the `.pyi` file.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "aiordma"
# Maps names of types in the stubs to the public types.
PUBLIC = {"Local": "LocalMemory", "Sendable": "Message | LocalMemory | AnyMemory"}


def is_compiled(cls: type) -> bool:
    return source(cls).suffix == ".pyx"


@functools.cache
def source(cls: type) -> Path:
    """Return the file that defines the class."""
    path = PACKAGE.parent.joinpath(*cls.__module__.split(".")).with_suffix(".pyx")
    return path if path.exists() else path.with_suffix(".py")


@functools.cache
def stand_ins(cls: type) -> dict[str, Any]:
    """Build a Python function or property for each documented member of a compiled class."""
    if not is_compiled(cls):
        return {}
    stub = source(cls).with_suffix(".pyi")
    (body,) = (
        node.body
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__
    )
    made = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            doc = getattr(vars(cls).get(node.name), "__doc__", None) or ""
            first = inspect.cleandoc(doc).partition("\n")[0]
            if first and first in source(cls).read_text():
                made[node.name] = _made(node, doc, stub)
    return made


def _made(node: ast.FunctionDef, doc: str, stub: Path) -> Any:
    """Build a function from a stub. One that returns a coroutine becomes an async function."""
    returned = ast.unparse(node.returns) if node.returns else "None"
    awaited = re.fullmatch(r"Coroutine\[Any, Any, (.*)\]", returned)
    head = f"def {node.name}({ast.unparse(node.args)}) -> {awaited[1] if awaited else returned}"
    decorators = "".join(f"@{ast.unparse(each)}\n" for each in node.decorator_list)
    code = f"{decorators}{'async ' if awaited else ''}{head}:\n    {doc!r}\n"
    names: dict[str, Any] = {}
    exec(compile(code, str(stub), "exec", annotations.compiler_flag, dont_inherit=True), names)
    value = names[node.name]
    written = (value.fget if isinstance(value, property) else value).__annotations__
    for name, annotation in written.items():
        written[name] = re.sub(r"\w+", lambda word: PUBLIC.get(word[0], word[0]), annotation)
    return value
