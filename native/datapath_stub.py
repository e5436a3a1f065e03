"""Write type stubs for the data path's modules from their .pyx and .pxd files.

::

    python datapath_stub.py FOLDER MODULE.pyx ...

meson runs this program. The types of parameters and results come from annotations, which Cython
ignores, or from C types. The type of an attribute comes from its C type or a comment, such as
`cdef public object loop  # type: AbstractEventLoop; of the driver`. A comment can also specify a
base class that only type checkers see: `cdef class Operation:  # type: Coroutine[...]`.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

HEAD = '''\
"""Types of {name}.pyx. Written by native/datapath_stub.py."""

import asyncio
from asyncio import AbstractEventLoop
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Sized
from contextvars import Context
from types import TracebackType
from typing import Any, ClassVar, Self, final

from typing_extensions import Buffer

from .._core import protocol
from .._native.handles import AnyMemory
from ..verbs import AsyncEvent, EventType, MemoryRegion, MemoryWindow, QueuePair, WCStatus
from .protocols import (
    BlockSource, Config, Driver, Keys, Memory, Owner, Pool, Room, Sendable, Suite, Waiter,
)
from .results import Received, ReceivedMemory
'''
FROM_C = dict.fromkeys(("Py_ssize_t", "uint32_t", "uint64_t", "uintptr_t"), "int")
FROM_C |= {"bint": "bool", "double": "float", "list": "list[Any]"}
# The stubs omit these methods, because only C code or the Python interpreter calls them.
NOT_FOR_CALLERS = {"__dealloc__", "__releasebuffer__", "__repr__", "__class__"}
NOT_FOR_CALLERS.add("decode")  # `Message.decode` only raises a helpful error
CLASS = re.compile(
    r"((?:^@.*\n)*)^cdef class (\w+)(?:\((\w+)\))?:(?:  # type: (.*))?\n", re.MULTILINE
)
ATTRIBUTE = re.compile(
    r"^    cdef (public|readonly) (\w+) ([\w, ]+?) *(?:# type: (.+?)(?:;.*)?|#.*)?$", re.MULTILINE
)
DEF = re.compile(r"((?:^ *@(?!cython).*\n)?)^( *)(?:def|cpdef (.*)) (\w+)\(", re.MULTILINE)
QUOTED = ("(", '"')
PARAMETER = re.compile(r"(.*?) ?([\w*/]+)(?: not None)?(?:: (.*))?")
CONSTANT = re.compile(r"^([A-Z_]+)(?:: (.+?))? = (.*)", re.MULTILINE)


def split(text: str) -> Iterator[str]:
    """Split text at commas, except for commas inside brackets."""
    depth, part = 0, ""
    for character in text + ",":
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            if part.strip():
                yield " ".join(part.split())
            part = ""
        else:
            part += character


def end_of(text: str, start: int) -> int:
    """Return the index just past the closing bracket that matches `text[start - 1]`."""
    depth = 1
    while depth:
        depth += (text[start] in "([{") - (text[start] in ")]}")
        start += 1
    return start


def parameter(text: str) -> str:
    """Convert a parameter of a Cython function to its Python declaration."""
    declared, equals, default = text.partition("=")
    kind, name, annotation = PARAMETER.fullmatch(declared.strip()).groups()
    if name in ("self", "cls", "*", "/"):
        return name
    found = annotation or FROM_C.get(kind, kind) or "object"
    return f"{name}: {found}" + (f" = {default.strip()}" if equals else "")


def definition(source: str, match: re.Match[str]) -> Iterator[str]:
    """Yield the stub of the function whose beginning matches DEF, unless stubs omit it."""
    decorator, indent, kind, name = match.groups()
    end = end_of(source, match.end())
    parameters = [parameter(each) for each in split(source[match.end() : end - 1])]
    result = re.match(r" -> (.*?):\s*(?:#.*)?$", source[end:], re.MULTILINE)
    returned = result[1] if result else "None" if kind in (None, "int") else FROM_C.get(kind, kind)
    if name == "__cinit__":
        if len(parameters) == 1:
            return
        name, parameters[0], returned = "__new__", "cls", "Self"
    elif name == "__getbuffer__":
        name, parameters, returned = "__buffer__", ["self", "flags: int", "/"], "memoryview"
    if name not in NOT_FOR_CALLERS:
        yield f"{decorator}{indent}def {name}({', '.join(parameters)}) -> {returned}: ..."


def attributes(body: str) -> Iterator[str]:
    """Yield the stubs of the public and readonly attributes that a class body declares."""
    for access, kind, names, written in ATTRIBUTE.findall(body):
        for name in names.split(", "):
            found = written or FROM_C.get(kind, kind)
            if access == "public":
                yield f"    {name}: {found}"
            else:
                yield f"    @property\n    def {name}(self) -> {found}: ..."


def declared_in(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def body_of(text: str, start: int) -> str:
    """Return the indented and empty lines that begin at `start`."""
    return re.compile(r"(?:(?:[ \t].*)?\n)*").match(text, start)[0]


def stub(source: str, declared: str) -> Iterator[str]:
    """Yield the lines of a module's stub from its .pyx source and its .pxd file, `declared`."""
    declarations = {it[2]: body_of(declared, it.end()) for it in CLASS.finditer(declared)}
    for match in CLASS.finditer(source):
        decorators, name, base, more = match.groups()
        if "@cython.final" in decorators:
            yield "@final"
        body = body_of(source, match.end())
        members = [*attributes(declarations.get(name, "")), *attributes(body)]
        for each in DEF.finditer(body):
            if len(each[2]) == 4:  # indented like a method, and not nested in one
                members += definition(body, each)
        if any("def __eq__" in it for it in members):
            members.append("    __hash__: ClassVar[None]  # type: ignore[assignment]")
        yield f"class {name}({base or more or 'object'}):"
        yield "\n".join(members or ["    ..."]) + "\n"
    for name, annotation, value in CONSTANT.findall(source):
        yield f"{name}: {annotation or ('str' if value[0] in QUOTED else 'int')}"
    for each in DEF.finditer(source):
        if not each[2]:  # not indented: a function of the module
            yield from definition(source, each)


folder, modules = Path(sys.argv[1]), [Path(it) for it in sys.argv[2:]]
texts = {it: (it.read_text(), declared_in(it.with_suffix(".pxd"))) for it in modules}
classes = {it: [found[2] for found in CLASS.finditer(texts[it][0])] for it in modules}
for path in modules:
    others = [f"from .{it.stem} import {', '.join(classes[it])}" for it in modules if it != path]
    text = "\n".join([HEAD.format(name=path.stem), *others, "", *stub(*texts[path]), ""])
    (folder / f"{path.stem}.pyi").write_text(text)
    # In a checkout, type checkers look for stubs next to the sources, not in the build folder.
    if (path.resolve().parents[2] / ".git").exists():
        with suppress(OSError):  # the checkout may be read-only
            path.with_suffix(".pyi").write_text(text)
