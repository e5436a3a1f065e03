"""Byte access to an object's memory, through the buffer protocol or DLPack.

See "Buffer Protocol" in the Python C API documentation.
"""

from __future__ import annotations

import mmap
import re
import sys
import weakref
from array import array
from typing import TypeAlias, TypeVar, cast

from aiordma._native import handles as h

AnyMemory: TypeAlias = h.AnyMemory
T = TypeVar("T")


# Objects of these types never contain addresses, even if a memoryview of one has been cast to a
# pointer format.
_ADDRESS_FREE_TYPES = frozenset({bytes, bytearray, array, mmap.mmap})
# Matches the codes for objects (O) and pointers (P, &, X{}) in a buffer format without field names.
# ctypes uses "z" and "Z" for string pointers, but "Z" before f, d or g marks a complex number.
_ADDRESS_CODES = re.compile(r"[OP&z]|X\{|Z(?![fdg])")


def bytes_of(memory: AnyMemory, target: bool = False) -> memoryview:
    """Return a view of an object's memory as bytes, without copying it.

    The object may support the buffer protocol (bytearray, array, numpy array, mmap, memoryview,
    ctypes ...), or be a tensor in main memory that supports DLPack (torch ...). Its elements may
    have any type except Python objects and pointers. The view keeps the memory alive, and is
    read-only if the object is read-only.

    Args:
        memory: The object.
        target: Whether the memory will receive data. This only affects the advice in error
            messages.

    Raises:
        TypeError: If the object does not provide access to its memory, or if its elements are
            Python objects or pointers. Pointers are meaningless to a peer, and using pointers sent
            by a peer is unsafe.
        BufferError: If the elements are not contiguous in C order, if a tensor's memory does not
            contain its elements, or if a tensor requires a gradient.
        UnsupportedError: If the memory is on a GPU.
    """
    try:
        view = memoryview(cast("h.Buffer", memory))
    except TypeError:
        return _tensor_view(memory, target)
    except (ValueError, BufferError) as error:
        _refuse_objects(memory, memory, target)
        if not hasattr(memory, "__dlpack__"):
            raise
        try:  # the buffer protocol cannot describe this element type
            return _tensor_view(memory, target)
        except BufferError:
            raise BufferError(
                f"cannot view {type_name(memory)} as bytes: {error}; pass array.view('u1') instead"
            ) from error
    try:
        if type(view.obj) not in _ADDRESS_FREE_TYPES:
            _refuse_addresses(memory, view, target)
        if not view.c_contiguous:
            raise not_contiguous_error(memory, target)
    except BaseException:
        view.release()  # the traceback would keep the view alive
        raise
    if view.format == "B" and view.ndim == 1 and view.itemsize == 1:
        return view
    if not view.nbytes:
        return memoryview(bytearray())  # a shape that contains 0 cannot be cast
    return view.cast("B")  # also works for records and non-native byte order


def require_data(memory: T) -> T:
    """Return ``memory`` unchanged after checking that it contains no addresses.

    Unlike `bytes_of`, this function accepts memory that is not contiguous. Use it for memory that
    will be copied.

    Raises:
        TypeError: If the elements are Python objects or pointers, which `bytes_of` also rejects.
    """
    if type(memory) not in _ADDRESS_FREE_TYPES:
        with memoryview(cast("h.Buffer", memory)) as view:
            if type(view.obj) not in _ADDRESS_FREE_TYPES:
                _refuse_addresses(memory, view)
    return memory


def _refuse_addresses(memory: object, view: memoryview, will_receive: bool = False) -> None:
    """Raise TypeError if the elements of ``memory``, which ``view`` shows, contain addresses."""
    owner = view.obj
    _refuse_objects(memory, owner, will_receive)
    root_class = type(owner).__mro__[-2]  # the base class directly below `object`
    if root_class.__module__ == "_ctypes":
        from .ctypes_types import has_addresses  # noqa: PLC0415 - imports ctypes

        if has_addresses(type(owner)):
            raise addresses_error(memory, "pointers or Python objects", will_receive)
        return
    item_format = view.format
    if type(memory) is memoryview:  # a cast may have changed the format
        try:
            with memoryview(owner) as original:
                item_format = original.format
        except (TypeError, ValueError, BufferError):
            pass  # the exporter does not provide a second view
    codes = "".join(item_format.split(":")[::2])  # without field names, which are ":name:"
    if item_format != "B" and _ADDRESS_CODES.search(codes):
        description = f"elements of the format {item_format!r}"
        raise addresses_error(memory, description, will_receive)


def _refuse_objects(memory: object, owner: object, will_receive: bool) -> None:
    """Raise TypeError for arrays of Python objects, including numpy's variable-width strings."""
    if getattr(getattr(owner, "dtype", None), "hasobject", False) is True:
        raise addresses_error(memory, "Python objects", will_receive)


def addresses_error(memory: object, what: str, will_receive: bool) -> TypeError:
    """Return the exception for memory that contains addresses, such as pointers."""
    advice = (
        "an array of numbers, or receive a serialized copy into a bytearray: json.loads(data)"
        if will_receive
        else "an array of numbers (array.astype(float)), or send a serialized copy: "
        "json.dumps(array.tolist()).encode()"
    )
    return TypeError(
        f"{type_name(memory)} contains {what}, which are addresses in this process and cannot be "
        f"sent or received; use {advice}"
    )


def keeper_of(view: memoryview) -> object:
    """Return an object that must be kept with the view, or None if the view is sufficient.

    A view alone does not prevent ``array.resize(..., refcheck=False)`` from freeing a numpy array's
    memory. A weak reference to the array does, so this function returns one for such an array.
    """
    owner = view.obj
    if type(owner) in _ADDRESS_FREE_TYPES or (numpy := sys.modules.get("numpy")) is None:
        return None
    while True:
        if type(owner) is memoryview:
            owner = owner.obj
        elif isinstance(owner, numpy.ndarray):
            if owner.base is None:
                return weakref.ref(owner)
            owner = owner.base
        else:
            return None


def _tensor_view(memory: object, will_receive: bool) -> memoryview:
    from .dlpack import dlpack_view  # noqa: PLC0415 - imports ctypes

    return dlpack_view(memory, will_receive)


def type_name(memory: object) -> str:
    module = "" if type(memory).__module__ == "builtins" else f"{type(memory).__module__}."
    kind = f"{module}{type(memory).__qualname__}"
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def not_contiguous_error(memory: object, will_receive: bool) -> BufferError:
    """Return the exception for memory whose elements are not contiguous in C order."""
    advice = (
        "use contiguous memory and copy the data from it (array[...] = data)"
        if will_receive
        else "make a contiguous copy (numpy.ascontiguousarray, Tensor.contiguous)"
    )
    return BufferError(
        f"{type_name(memory)} must be contiguous in C order; {advice}, or pass its parts one by one"
    )
