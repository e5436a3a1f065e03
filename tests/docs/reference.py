"""docs/reference: every public name, from its docstring and its signature."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import GenericAlias
from typing import Any, ForwardRef

from .compiled import is_compiled, source
from .markdown import from_docstring
from .names import Member, Name, is_described, member_doc, members, own_doc, public, value_doc
from .promises import named_in

WIDTH = 96

# A constructor with arguments that only aiordma has is not for users.
_INTERNAL = re.compile(r"\bh\.|\bNode\[|Pointer\b|: (Block|MemoryRegion|Sharing|Side)\b")

HEAD = "<!-- written by `make docs` from the docstrings: change those -->\n\n"


def pages() -> dict[str, str]:
    """File name and text of each page."""
    return _Reference(public()).pages()


class _Reference:
    def __init__(self, names: list[Name]) -> None:
        self.names = names
        self.offered = {name.value for name in names if isinstance(name.value, type)}
        modules = {name.module for name in names}
        self.links = {module: self.links_from(module) for module in modules}

    def links_from(self, module: str) -> dict[str, str]:
        """The link of each name on the page of a module; two modules may have the same name."""
        links: dict[str, str] = {}
        for name in sorted(self.names, key=lambda name: name.module != module):
            place = _page(name.module)
            links.setdefault(name.name, f"{place}#{name.name}")
            if isinstance(name.value, type):
                for member in self.members(name):
                    path = f"{name.name}.{member.name}"
                    links.setdefault(path, f"{place}#{path}")
        return links

    def members(self, name: Name) -> list[Member]:
        return list(members(name.value, self.offered))

    def pages(self) -> dict[str, str]:
        modules: dict[str, list[Name]] = {}
        for name in self.names:
            modules.setdefault(name.module, []).append(name)
        result = {_page(path): self.page(path, names) for path, names in sorted(modules.items())}
        return {"README.md": self.index(modules), **result}

    def index(self, modules: Mapping[str, list[Name]]) -> str:
        lines = [HEAD, "# Reference\n\nEvery public name, by where it is imported from.\n"]
        for module, names in sorted(modules.items()):
            first = self.text(own_doc(importlib.import_module(module)).splitlines()[0], module)
            lines.append(f"\n## [{module}]({_page(module)})\n\n{first}\n\n")
            links = (
                f"[`{n.name}`]({self.links[module][n.name]})" for n in sorted(names, key=_by_name)
            )
            lines.append(",\n".join(links) + "\n")
        return "".join(lines)

    def page(self, path: str, names: list[Name]) -> str:
        module = importlib.import_module(path)
        parts = [f"{HEAD}# {path}", self.text(own_doc(module), path)]
        for name in sorted(names, key=_by_name):
            parts += self.entry(name)
        return "\n\n".join(part for part in parts if part) + "\n"

    def text(self, doc: str, module: str, here: str = "") -> str:
        links = {name: target for name, target in self.links[module].items() if name != here}
        return from_docstring(doc, links)

    # ---- one name -----------------------------------------------------------------------------

    def entry(self, name: Name) -> Iterator[str]:
        yield f'## <a id="{name.name}"></a>{name.name}'
        if not is_described(name.value):
            yield f"```python\n{name.name} = {_value(name.value)}\n```"
            yield self.text(value_doc(name), name.module, name.name)
            return
        if isinstance(name.value, type):
            yield from self.class_entry(name)
        else:
            yield f"```python\n{_signature(name.name, name.value)}\n```"
            yield self.text(name.doc, name.module, name.name)
            yield self.raises(named_in(name.doc), name.module)
        yield _source(name.value)

    def class_entry(self, name: Name) -> Iterator[str]:
        cls = name.value
        yield f"```python\n{_class_line(cls)}\n```"
        yield self.text(name.doc, name.module, name.name)
        if not name.is_exception:
            yield self.raises(named_in(name.doc), name.module)
        yield from _values(cls)
        for member in self.members(name):
            yield from self.member_entry(name, member)

    def member_entry(self, name: Name, member: Member) -> Iterator[str]:
        path = f"{name.name}.{member.name}"
        yield f'### <a id="{path}"></a>{_escaped(path)}'
        yield f"```python\n{_member_line(member)}\n```"
        doc = member_doc(member)
        yield self.text(doc, name.module, path)
        yield self.raises(named_in(doc), name.module)

    def raises(self, errors: list[type[BaseException]], module: str) -> str:
        names = (error.__name__ for error in errors)
        links = self.links[module]
        linked = (f"[`{n}`]({links[n]})" if n in links else f"`{n}`" for n in names)
        return f"Errors: {', '.join(linked)}." if errors else ""


def _by_name(name: Name) -> str:
    return name.name


def _page(module: str) -> str:
    return f"{module}.md"


def _escaped(text: str) -> str:
    return text.replace("__", r"\_\_")


def _source(value: Any) -> str:
    path = Path(*value.__module__.split("."))
    root = Path(__file__).parents[2]
    file = path / "__init__.py" if (root / path).is_dir() else path.with_suffix(".py")
    if isinstance(value, type) and is_compiled(value):
        file = source(value).relative_to(root)
    return f"Defined in [{file}](../../{file})."


# ---- values -----------------------------------------------------------------------------------


def _cell(code: str) -> str:
    """Escape bars, which end a cell of a table even in code."""
    return "`{}`".format(code.replace("|", r"\|"))


def _values(cls: type) -> Iterator[str]:
    """The members of an enumeration, the fields of a record."""
    if issubclass(cls, enum.Enum):
        flag = issubclass(cls, enum.Flag)
        rows = [
            f"| `{name}` | {hex(member.value) if flag else repr(member.value)} |"
            for name, member in cls.__members__.items()
        ]
        yield "| member | value |\n|---|---|\n" + "\n".join(rows)
    elif fields := _fields(cls):
        rows = [
            f"| `{name}` | {_cell(_annotation(kind))} | {_cell(_value(default)) if given else ''} |"
            for name, kind, given, default in fields
        ]
        yield "| field | type | default |\n|---|---|---|\n" + "\n".join(rows)


def _fields(cls: type) -> list[tuple[str, Any, bool, Any]]:
    if dataclasses.is_dataclass(cls):
        missing = dataclasses.MISSING
        return [
            (
                field.name,
                field.type,
                field.default is not missing or field.default_factory is not missing,
                field.default if field.default is not missing else field.default_factory,
            )
            for field in dataclasses.fields(cls)
            if not field.name.startswith("_")
        ]
    if _is_named_tuple(cls):
        defaults: dict[str, Any] = getattr(cls, "_field_defaults", {})
        return [
            (name, kind, name in defaults, defaults.get(name))
            for name, kind in cls.__annotations__.items()
        ]
    return []


def _value(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}" if value.name else str(int(value.value))
    if isinstance(value, GenericAlias):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 16:
        return hex(value)
    if isinstance(value, type):
        return f"{value.__name__}()"
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}()"
    return repr(value)


# ---- signatures -------------------------------------------------------------------------------


class _Written:
    """Represents source text in a signature."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _annotation(annotation: Any) -> str:
    if isinstance(annotation, ForwardRef):  # of a named tuple's field
        return annotation.__forward_arg__
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _class_line(cls: type) -> str:
    public_bases = [base.__name__ for base in cls.__bases__ if _worth_naming(base)]
    head = f"class {cls.__name__}" + (f"({', '.join(public_bases)})" if public_bases else "")
    maker = vars(cls).get("__new__" if _is_named_tuple(cls) else "__init__")
    if issubclass(cls, (enum.Enum, BaseException)) or maker is None:
        return head
    made = _signature(cls.__name__, maker, bound=True, returns=False)
    internal = _INTERNAL.search(made) or "Made by" in own_doc(cls)
    return head if internal else f"{head}\n{made}"


def _is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _worth_naming(base: type) -> bool:
    internal = base.__name__.startswith("_") or is_compiled(base)
    return base is not object and not internal and base.__name__ != "Generic"


def _member_line(member: Member) -> str:
    function = member.function
    if isinstance(member.value, property):
        returns = inspect.signature(function).return_annotation
        return f"{member.name}: {_annotation(returns)}"
    prefix = {classmethod: "@classmethod\n", staticmethod: "@staticmethod\n"}
    bound = not isinstance(member.value, staticmethod)
    return prefix.get(type(member.value), "") + _signature(member.name, function, bound=bound)


def _signature(name: str, function: Any, *, bound: bool = False, returns: bool = True) -> str:
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(
            annotation=_written(parameter.annotation, _annotation),
            default=_written(parameter.default, _value),
        )
        for parameter in itertools.islice(signature.parameters.values(), int(bound), None)
    ]
    result = _written(signature.return_annotation, _annotation) if returns else _NOTHING
    head = "async def " if inspect.iscoroutinefunction(function) else "def "
    head = (head if returns else "") + name
    line = head + str(signature.replace(parameters=parameters, return_annotation=result))
    if len(line) <= WIDTH:
        return line
    inside = "".join(f"    {text},\n" for text in _split(parameters))
    tail = f" -> {result!r}" if result is not _NOTHING else ""
    return f"{head}(\n{inside}){tail}"


_NOTHING = inspect.Signature.empty


def _written(value: Any, write: Any) -> Any:
    return value if value is _NOTHING else _Written(write(value))


def _split(parameters: list[inspect.Parameter]) -> Iterator[str]:
    starred = False
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            starred = True
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield str(parameter)
