"""The memory of any object as bytes: by the buffer protocol, or of a tensor (DLPack).

Source: the Python C API on buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, cast

from aiordma._native import handles as h

if TYPE_CHECKING:
    from typing_extensions import Buffer

AnyMemory: TypeAlias = h.AnyMemory


def bytes_of(memory: AnyMemory) -> memoryview:
    """The memory of an object as bytes, which stays as long as the view does; copies nothing.

    Anything with a buffer (bytearray, array, numpy array, mmap, memoryview, ctypes ...), and
    tensors in the memory of this machine that support DLPack (torch ...); of any type of elements.
    The view is read-only if the object says that it is.

    TypeError for what has no memory, BufferError for elements that do not lie one behind another in
    C order, UnsupportedError for memory of a GPU.
    """
    try:
        view = memoryview(cast("Buffer", memory))
    except TypeError:
        return _of_tensor(memory)
    except (ValueError, BufferError) as error:
        if not hasattr(memory, "__dlpack__"):
            raise
        try:  # the buffer protocol has no name for its elements
            return _of_tensor(memory)
        except BufferError:
            raise BufferError(f"{name(memory)}: {error}; take its bytes (view('u1'))") from error
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    if not view.c_contiguous:
        raise not_contiguous(memory)
    if not view.nbytes:
        return memoryview(bytearray())  # its shape could not be cast
    return view.cast("B")  # of records, too, and of the other byte order


def _of_tensor(memory: object) -> memoryview:
    from .dlpack import of_tensor  # noqa: PLC0415 - with ctypes: loaded where there are tensors

    return of_tensor(memory)


def name(memory: object) -> str:
    module = "" if type(memory).__module__ == "builtins" else f"{type(memory).__module__}."
    kind = f"{module}{type(memory).__qualname__}"
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def not_contiguous(memory: object) -> BufferError:
    return BufferError(
        f"{name(memory)} whose elements do not lie one behind another in C order; make a copy "
        f"that is contiguous (numpy.ascontiguousarray, Tensor.contiguous) or take its parts alone"
    )
