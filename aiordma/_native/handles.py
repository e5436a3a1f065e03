"""Names for the types of the boundary to C, for annotations.

Type checkers see the types of the compiled module's stub, which has a class for each C structure.
The class also stands for pointers to the structure. At run time, each of these names is
`ffi.CData`.
"""

# ruff: noqa: F403

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Buffer as Buffer  # noqa: PLC0414 - buffers.py names it

    from ._lib import *
else:
    from ._lib import ffi

    FFI = type(ffi)

    class Pointer:
        """A substitute for the generic type in the stubs. `Pointer[ibv_qp]` is `ffi.CData`."""

        def __class_getitem__(cls, target: object) -> type:
            return ffi.CData

    def __getattr__(name: str) -> type:
        """Return `ffi.CData` for the name of any C type."""
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return ffi.CData

    if sys.version_info >= (3, 12):
        from collections.abc import Buffer
    else:
        Buffer = bytes | bytearray | memoryview  # Python 3.11 has no common class for them


class SupportsDLPack(Protocol):
    """An object that supports DLPack, such as a tensor from torch, JAX, TensorFlow or CuPy."""

    def __dlpack__(self) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...


AnyMemory: TypeAlias = Buffer | SupportsDLPack
