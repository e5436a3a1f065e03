"""The directives `public-names` and `public-module`, which document public names with autodoc.

tests/docs/names.py defines which names and members are public. The types of compiled classes come
from their stubs (tests/docs/compiled.py).
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.napoleon import Config as NapoleonConfig
from sphinx.ext.napoleon.docstring import GoogleDocstring
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import OptionSpec

from aiordma._native import handles
from tests.docs.compiled import is_compiled
from tests.docs.names import (
    Member,
    Name,
    attributes,
    is_described,
    members,
    own_doc,
    public,
    value_doc,
)

NAMES = public()
OFFERED = {name.value for name in NAMES if isinstance(name.value, type)}
MODULES = sorted({name.module for name in NAMES})

# Methods and constructors that take internal types are not for users.
_INTERNAL_METHOD = re.compile(r"\bh\.|\bSharing\b|: '?More\b")
_INTERNAL = re.compile(r"\bh\.|\bNode\[|Pointer\b|\bSharing\b|: '?(Block|MemoryRegion|Side|More)\b")
# Public spellings of internal type names.
_SPELLED = {
    "Remote": "RemoteRegion | RemoteSlice",
    "Progress": "Callable[[int], object]",
    "IPAddress": "ipaddress.IPv4Address | ipaddress.IPv6Address",
}
# A field that napoleon makes from a Google section, such as `:raises ValueError: If ...`.
_FIELD = re.compile(r":(?P<kind>\w+)(?: (?P<name>[^:]+))?:(?= |$)")
# Code in backticks, or an exception's name without them.
_NAMED = re.compile(
    r"(?::\w+:)?(?<!`)(?P<quote>`{1,2})(?P<short>~?)(?P<code>[^`\n]+)(?P=quote)(?!`)(?!_)"
    r"|(?<![\w.`])(?P<error>(?:asyncio\.)?[A-Z]\w*(?:Error|Exception))\b(?!`)"
)


def fields(cls: type) -> list[str]:
    """Return the members of an enumeration or the fields of a record."""
    if issubclass(cls, enum.Enum):
        return list(cls.__members__)
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls) if not field.name.startswith("_")]
    if issubclass(cls, tuple):
        return list(getattr(cls, "_fields", ()))
    return list(inspect.get_annotations(cls)) if hasattr(cls, "__total__") else []


def is_for_users(member: Member) -> bool:
    if not callable(member.function):
        return True
    return not _INTERNAL_METHOD.search(str(inspect.signature(member.function)))


MEMBERS = {
    name: [
        *fields(name.value),
        *(member.name for member in members(name.value, OFFERED) if is_for_users(member)),
    ]
    for name in NAMES
    if isinstance(name.value, type)
}
# Attributes without an entry, which the class docstring describes.
ATTRIBUTES = {
    name: [it for it in attributes(name.value) if it not in described]
    for name, described in MEMBERS.items()
}


def show_types() -> None:
    """Replace compiled functions and classes by those of the stubs, which have types.

    Hide the source of functions with generated options (`_options.shows`) from autodoc, which
    would look for argument defaults in it.
    """
    for name in NAMES:
        if hasattr(name.value, "__signature__"):
            name.value.__code__ = name.value.__code__.replace(co_filename="")
        if not isinstance(name.value, type):
            continue
        compiled = {
            member.name: member.value
            for member in members(name.value, OFFERED)
            if is_compiled(member.owner)
        }
        if is_compiled(name.value):
            head = {"__doc__": name.value.__doc__, "__module__": name.value.__module__}
            shown = type(name.name, (), compiled | head)
            setattr(importlib.import_module(name.module), name.name, shown)
        else:
            for key, value in compiled.items():
                setattr(name.value, key, value)


class PublicNames(SphinxDirective):
    """`public-names:: module` documents the listed names, or the whole module."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        (module,) = self.arguments
        listed = " ".join(self.content).split()
        lines = [f".. py:currentmodule:: {module}"] if listed else introduction(module)
        names = {name.name: name for name in NAMES if name.module == module}
        for name in listed or sorted(names):
            lines += ["", *self.entry(names[name])]
        return self.parse_text_to_nodes("\n".join(lines))

    def entry(self, name: Name) -> Iterator[str]:
        path = f"{name.module}.{name.name}"
        if not is_described(name.value):
            yield f".. autodata:: {path}"
        elif isinstance(name.value, type):
            yield (
                f".. autoclass:: {path}" if not name.is_exception else f".. autoexception:: {path}"
            )
            if OFFERED.intersection(name.value.__bases__):
                yield "   :show-inheritance:"
            if MEMBERS[name]:
                yield f"   :members: {', '.join(MEMBERS[name])}"
                yield "   :undoc-members:"
            for attribute in ATTRIBUTES[name]:
                yield from ("", f"   .. py:attribute:: {attribute}", "      :no-typesetting:")
        else:
            yield f".. autofunction:: {path}"


class PublicModule(SphinxDirective):
    """`public-module:: module` shows the module docstring, and with `table` a list of its names."""

    required_arguments = 1
    option_spec: ClassVar[OptionSpec] = {"table": directives.flag}

    def run(self) -> list[nodes.Node]:
        (module,) = self.arguments
        lines = introduction(module)
        if "table" in self.options:
            lines += ["", ".. list-table::", "   :class: names", ""]
            names = sorted((n for n in NAMES if n.module == module), key=lambda name: name.name)
            for name in names:
                doc = name.doc if is_described(name.value) else value_doc(name)
                first = re.split(r"\n\n|(?<=[.:])\s", doc)[0].rstrip(".:")
                lines += [
                    f"   * - :py:obj:`~{module}.{name.name}`",
                    f"     - {' '.join(_written(first, module))}",
                ]
        return self.parse_text_to_nodes("\n".join(lines))


def introduction(module: str) -> list[str]:
    doc = own_doc(importlib.import_module(module))
    return [f".. py:module:: {module}", "", *_written(doc, module)]


# ---- docstrings ---------------------------------------------------------------------------------


def _targets(module: str) -> dict[str, str]:
    """Map each name and member to its full name, preferring those of ``module``."""
    found: dict[str, str] = {}
    for name in sorted(NAMES, key=lambda name: name.module != module):
        inside = (*MEMBERS.get(name, ()), *ATTRIBUTES.get(name, ()))
        paths = [name.name, *(f"{name.name}.{member}" for member in inside)]
        for path in paths:
            found.setdefault(path, f"{name.module}.{path}")
            found.setdefault(f"{name.module}.{path}", f"{name.module}.{path}")
            found.setdefault(f"{name.module.rpartition('.')[2]}.{path}", f"{name.module}.{path}")
    return found


TARGETS = {module: _targets(module) for module in MODULES}


def _written(doc: str, module: str) -> list[str]:
    """Convert a docstring to reStructuredText, linking public names in backticks and exceptions."""
    targets = TARGETS[module]

    def named(match: re.Match[str]) -> str:
        text = match["code"] or match["error"]
        target = targets.get(text.removesuffix("()"))
        if target is None:
            return match["error"] or f"``{text}``"
        shown = text.rpartition(".")[2] if match["short"] else text
        return f"\\ :py:{'obj' if match['code'] else 'exc'}:`{shown} <{target}>`"

    def linked(line: str) -> str:
        if line.startswith("    "):
            return line
        if not (field := _FIELD.match(line)):
            return _NAMED.sub(named, line)
        name = field["name"]
        if field["kind"] == "raises" and name in targets:  # Sphinx makes it a link
            name = f"~{targets[name]}"
        text = _NAMED.sub(named, line[field.end() :])
        return f":{field['kind']}{' ' + name if name else ''}:{text}"

    return [linked(line) for line in doc.expandtabs().splitlines()]


_GOOGLE: Any = NapoleonConfig(napoleon_use_rtype=False)  # stands in for the whole configuration


def _with_fields(doc: str) -> str:
    """Convert the Google sections of a docstring to fields, with each field on one line.

    The docstrings of attributes are converted like those of methods: napoleon would read the text
    before a colon in the first line of an attribute as its type.
    """
    text = str(GoogleDocstring(doc, _GOOGLE, what="method"))
    joined: list[str] = []
    for line in text.splitlines():
        if joined and _FIELD.match(joined[-1]) and line.startswith(" ") and line.strip():
            joined[-1] += f" {line.strip()}"
        else:
            joined.append(line)
    return "\n".join(joined)


def process_docstring(
    app: Sphinx, what: str, path: str, value: Any, options: Any, lines: list[str]
) -> None:
    module = max((m for m in MODULES if path.startswith(f"{m}.")), key=len)
    doc = "\n".join(lines)
    if what == "data":
        doc = next(value_doc(name) for name in NAMES if f"{name.module}.{name.name}" == path)
    lines[:] = [*_written(_with_fields(doc), module), ""]


def process_signature(
    app: Sphinx, what: str, path: str, value: Any, options: Any, given: str | None, result: str
) -> tuple[str, str] | None:
    if given is None:  # an attribute
        return None
    signature = given
    internal = _INTERNAL.search(signature) or "Made by" in (value.__doc__ or "")
    if what == "exception" or (what == "class" and (internal or issubclass(value, enum.Enum))):
        return "", ""
    # Sphinx splits a signature into its parameters only if it is valid Python.
    signature = re.sub(r"<function ([\w.]+)>", r"\1", signature)
    signature, result = (
        re.sub(r"(?<![\w.])\w+", lambda word: _SPELLED.get(word[0], word[0]), text or "")
        for text in (signature, result)
    )
    return signature, result


def process_bases(app: Sphinx, path: str, value: Any, options: Any, bases: list[type]) -> None:
    bases[:] = [base for base in bases if base in OFFERED]


# ---- names in signatures without a page ---------------------------------------------------------


def elsewhere(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Node | None:
    """Return names of Python's library without a link. For others return None, which warns."""
    if node.get("refdomain") != "py":
        return None
    if node["reftarget"] == "AnyMemory":
        where = app.builder.get_relative_uri(node["refdoc"], "memory")
        return nodes.reference("", "", content, refuri=f"{where}#what-counts-as-memory")
    module, _, name = node["reftarget"].rpartition(".")
    try:
        return content if hasattr(importlib.import_module(module), name) else None
    except (ImportError, ValueError):
        return None


def leave_builtins(app: Sphinx, document: nodes.document) -> None:
    """Resolve names such as `bytes` to builtins even in classes with an attribute of that name."""
    for node in list(document.findall(pending_xref)):
        if node.get("refdomain") == "py" and hasattr(builtins, node["reftarget"]):
            for scope in ("refspecific", "py:module", "py:class"):
                node.attributes.pop(scope, None)


def setup(app: Sphinx) -> dict[str, bool]:
    # autodoc shows annotations that it cannot evaluate as written. This keeps the names of C
    # structures, which are all one class at run time.
    vars(handles).pop("__getattr__", None)
    show_types()
    app.add_directive("public-names", PublicNames)
    app.add_directive("public-module", PublicModule)
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("autodoc-process-signature", process_signature)
    app.connect("autodoc-process-bases", process_bases)
    app.connect("doctree-read", leave_builtins)
    app.connect("missing-reference", elsewhere)
    return {"parallel_read_safe": True}
