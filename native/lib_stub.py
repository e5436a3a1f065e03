"""Write the type stub of `aiordma._native._lib` from the declarations parsed by cffi.

lib_source.py imports this module. In the stub, one class represents a C structure, pointers to the
structure, and arrays of the structure. At run time, all three are `ffi.CData` objects whose members
are accessed in the same way. For example, the class for `struct ibv_qp *` is `ibv_qp`. NULL is
accepted for every pointer.
"""

import re
from collections.abc import Iterator
from keyword import iskeyword

from cffi import FFI, model

# aiordma is not built yet and cannot be imported, so import its module `_native.conventions` alone.
from conventions import Convention, convention_of

HEAD = '''\
"""The compiled module as the type checker sees it. Written by native/lib_stub.py."""

from collections.abc import Callable
from typing import Any, Final, Generic, Literal, Self, TypeAlias, TypeVar, overload

from typing_extensions import Buffer

_Value = TypeVar("_Value")
_Accepted = TypeVar("_Accepted", contravariant=True)

class Null: ...

class VoidPointer:
    def __eq__(self, other: object) -> bool: ...

class Integer:
    def __int__(self) -> int: ...

class Pointer(Generic[_Value]):
    """A pointer to a pointer, or an array of pointers."""

    def __getitem__(self, index: int) -> _Value: ...

class IntegerPointer:
    """`int *`, `uint8_t *` ..., and arrays of them."""

    def __getitem__(self, index: int) -> int: ...

class Characters:
    """`char[]`; from `ffi.from_buffer` it holds the exporter's buffer until it is released."""

    def __len__(self) -> int: ...

class Text:
    """`const char *`, for `ffi.string`."""

class Bytes(Buffer):
    """`ffi.buffer`: the memory itself, not a copy; its slices are copies."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: slice) -> bytes: ...
    def __setitem__(self, index: slice, value: bytes) -> None: ...
    def __eq__(self, other: object) -> bool: ...

class Struct:
    def __getitem__(self, index: int) -> Self: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

class Member(Generic[_Value, _Accepted]):
    """A member of a structure that is read as one type, and set to values of more."""

    def __get__(self, instance: object, owner: type) -> _Value: ...
    def __set__(self, instance: object, value: _Accepted) -> None: ...

AnyPointer: TypeAlias = (
    Null | VoidPointer | Struct | Pointer[Any] | IntegerPointer | Characters | bytes
)

class CField:
    name: str
    type: CType

class CType:
    kind: str
    cname: str
    result: CType
    fields: list[tuple[str, CField]]
    elements: dict[int, str]
    relements: dict[str, int]

class FFI:
    NULL: Final[Null]
    errno: int
    class CData: ...

    def new_allocator(self, *, should_clear_after_alloc: bool) -> Callable[[str, int], Any]: ...
    def addressof(self, cdata: object, *fields: str) -> Any: ...
    def buffer(self, cdata: object, size: int = ...) -> Bytes: ...
    def from_buffer(self, python_buffer: Buffer) -> Characters: ...
    def release(self, cdata: object) -> None: ...
    def string(self, cdata: Text | Characters) -> bytes: ...
    def sizeof(self, cdecl: str | object) -> int: ...
    def typeof(self, cdecl: str | object) -> CType: ...
'''


class Stub:
    """The type stub. `seen` maps each structure added so far to its class name."""

    def __init__(self, ffi: FFI) -> None:
        self.declared = {name: kind for name, (kind, _) in ffi._parser._declarations.items()}
        self.constants = sorted(ffi._parser._int_constants)
        self.classes: list[str] = []
        self.seen: dict[object, str] = {}

    def name_of(self, struct: model.StructOrUnion, within: str) -> str:
        """Return a structure's class name, which is `within` for an anonymous structure."""
        if struct not in self.seen:
            self.seen[struct] = within if struct.name.startswith("$") else struct.name.lstrip("_")
            self.classes.append(self.class_of(struct, self.seen[struct]))
        return self.seen[struct]

    def class_of(self, struct: model.StructOrUnion, name: str) -> str:
        members = struct.enumfields() if struct.fldtypes is not None else ()
        lines = [self.member(name, *each) for each in members if not iskeyword(each[0])]
        return "\n".join([f"class {name}(Struct):", *(lines or ["    ..."])]) + "\n"

    def member(self, struct: str, name: str, kind: model.BaseTypeByIdentity, *_: object) -> str:
        """Return the declaration of a structure's member."""
        read = self.read(kind, f"{struct}_{name}")
        if isinstance(kind, model.StructOrUnion | model.ArrayType):
            return f"    @property\n    def {name}(self) -> {read}: ..."
        accepted = self.accept(kind)
        return f"    {name}: " + (read if read == accepted else f"Member[{read}, {accepted}]")

    def read(self, kind: model.BaseTypeByIdentity, within: str = "") -> str:
        """Map a C type to the Python type of function results and member values."""
        if isinstance(kind, model.StructOrUnion):
            return self.name_of(kind, within)
        if isinstance(kind, model.BaseFunctionType):
            return self.function(kind, self.read(kind.result))
        if isinstance(kind, model.VoidType):
            return "None"
        target = getattr(kind, "totype", getattr(kind, "item", None))
        if target is None:
            return "int"
        if isinstance(target, model.VoidType):
            return "VoidPointer"
        if isinstance(target, model.StructOrUnion | model.BaseFunctionType):
            return self.read(target, within)
        if isinstance(target, model.PointerType):
            return f"Pointer[{self.read(target, within)}]"
        return "Text" if target.get_c_name() == "char" else "IntegerPointer"

    def accept(self, kind: model.BaseTypeByIdentity) -> str:
        """Map a C type to the Python type accepted as a function argument or member value."""
        read = self.read(kind)
        if not isinstance(kind, model.PointerType | model.FunctionPtrType):
            return read
        # C calls return strings of unknown length, but strings passed to them are cffi arrays.
        if read == "Text":
            read = "Characters"
        if read in ("Characters", "IntegerPointer") and "const" in kind.get_c_name():
            read += " | bytes"
        return "AnyPointer" if read == "VoidPointer" else f"{read} | Null"

    def function(self, kind: model.BaseFunctionType, result: str) -> str:
        return f"Callable[[{', '.join(self.accept(each) for each in kind.args)}], {result}]"

    def checked(self, verb: str, kind: model.BaseFunctionType) -> str:
        """Return the signature of a call as wrapped by `aiordma._native.calls`."""
        convention = convention_of(verb, kind.result.get_c_name())
        result = {
            Convention.ERRNO: "None",
            Convention.MINUS_ONE: "None",
            Convention.EVENT: "bool",
        }.get(convention) or self.read(kind.result)
        return f"    {verb}: {self.function(kind, result)}"

    def table(self, name: str) -> Iterator[str]:
        for verb, kind, *_ in self.declared[f"struct {name}"].enumfields():
            if isinstance(kind, model.FunctionPtrType):
                yield self.checked(verb, kind)

    def overload(self, method: str, cdecl: str, argument: str, result: str) -> str:
        declared = f"def {method}(self, cdecl: Literal[{cdecl}], {argument}) -> {result}: ..."
        return f"    @overload\n    {declared}"

    def text(self) -> str:
        """Return the text of the stub."""
        new = [
            self.overload("new", '"char[]"', "init: int | bytes", "Characters"),
            self.overload(
                "new", '"int *", "int[2]", "int[8]"', "init: int = ...", "IntegerPointer"
            ),
            self.overload("new", '"void **"', "init: object = ...", "Pointer[VoidPointer]"),
        ]
        new += [
            self.overload("new", f'"uint{bits}_t *"', "init: int = ...", "IntegerPointer")
            for bits in (8, 16, 32, 64)
        ]
        cast = [
            self.overload("cast", '"uintptr_t"', "source: object", "Integer"),
            self.overload("cast", '"void *"', "source: object", "VoidPointer"),
        ]
        for kind in list(self.declared.values()):
            if isinstance(kind, model.StructOrUnion) and not kind.name.startswith("$"):
                name, c = self.name_of(kind, ""), kind.get_c_name()
                cast.append(self.overload("cast", f'"{c} *"', "source: object", name))
                new += [
                    self.overload("new", f'"{c} *", "{c}[]"', "init: object = ...", name),
                    self.overload("new", f'"{c} **"', "init: object = ...", f"Pointer[{name}]"),
                ]
        functions = {
            name.removeprefix("function "): kind
            for name, kind in self.declared.items()
            if name.startswith("function ")
        }
        checked = [*self.table("aiordma_calls")]
        checked += [
            self.checked(name.removeprefix("aiordma_"), kind)
            for name, kind in functions.items()
            if name.startswith("aiordma_ibv_")
        ]
        # Refer to types by their aliases, because methods of class Lib hide types of the same name.
        lib = [
            f"    {name}: "
            + re.sub(r"\baiordma_\w+", r"_\g<0>", self.function(kind, self.read(kind.result)))
            for name, kind in functions.items()
        ]
        own_types = [name for name in self.seen.values() if name.startswith("aiordma_")]
        return "\n".join(
            [
                HEAD + "\n".join(cast + new) + "\n",
                *self.classes,
                "class CheckedCalls:",
                *checked,
                "\nclass CheckedProviderCalls:",
                *self.table("aiordma_provider_calls"),
                *(f"_{name}: TypeAlias = {name}" for name in own_types),
                "\nclass Lib:",
                *lib,
                *(f"    {name}: Final[int]" for name in self.constants),
                "\nffi: Final[FFI]\nlib: Final[Lib]\n",
            ]
        )
