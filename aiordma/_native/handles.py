"""Names for what crosses the boundary, for annotations only; import them under ``TYPE_CHECKING``.

They are those of the stub of the compiled module: a C structure has a class of its name, which
stands for pointers to it as well. At run time all of them are `ffi.CData`.
"""

# ruff: noqa: F403

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ._lib import *


class SupportsDLPack(Protocol):
    """A tensor: torch, JAX, TensorFlow, CuPy ... (the Python Array API's `__dlpack__`)."""

    def __dlpack__(self) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...


AnyMemory: TypeAlias = "Buffer | SupportsDLPack"
