"""Byte access to the memory of torch tensors.

A tensor's memory is owned by its storage. Assigning to `tensor.data` or calling `tensor.set_` gives
the tensor a different storage, and `resize_` gives the storage different memory. To keep the memory
in place, the view holds a numpy array, which torch creates from a private tensor on the same
storage. No other code can change this tensor's storage, and torch never resizes a storage from
which it has created an array.

The functions that move a storage to shared memory do not check for such arrays. All tensors on a
storage share one storage object. While the array exists, attributes of this object override these
functions. See the documentation of torch.Tensor and torch.UntypedStorage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from .buffers import not_contiguous_error, type_name

# The methods that move a storage to other memory. torch.multiprocessing calls the last two.
_MOVING_METHODS = ("share_memory_", "_share_fd_cpu_", "_share_filename_cpu_")

_COPY_FROM = "another tensor and copy the data from it"


def torch_view(torch: Any, tensor: Any, will_receive: bool) -> memoryview:
    """Return a view of a CPU tensor's bytes, or raise BufferError if this is not possible."""
    if (problem := _unusable_reason(torch, tensor, will_receive)) is not None:
        raise BufferError(f"{type_name(tensor)} {problem}")
    if not tensor.is_contiguous():
        raise not_contiguous_error(tensor, will_receive)
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    start = tensor.storage_offset() * tensor.element_size()
    try:
        storage = tensor.untyped_storage()
        storage_size = storage.nbytes() if storage.data_ptr() else 0
    except RuntimeError as error:  # includes NotImplementedError, which is a subclass
        raise BufferError(f"{type_name(tensor)} has no memory of its own: {error}") from error
    if start + size > storage_size:
        raise BufferError(
            f"{type_name(tensor)} needs {size} bytes at offset {start}, but its storage has only"
            f" {storage_size}; use to_local() if the elements are stored in another tensor"
        )
    private_tensor = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, start, (size,))
    try:
        array = private_tensor.numpy()
    except RuntimeError as error:
        raise BufferError(
            f"cannot pin the memory of {type_name(tensor)}, because torch cannot create a numpy "
            f"array that shares this memory ({error}); install numpy"
        ) from error
    _refuse_moves(storage, array)
    return memoryview(array)


def _refuse_moves(storage: Any, array: Any) -> None:
    """Make the methods that move the storage raise RuntimeError while the array exists."""
    attributes = vars(storage)
    if "_lent_to_aiordma" not in attributes:
        attributes["_lent_to_aiordma"] = weakref.WeakValueDictionary()
        for name in _MOVING_METHODS:
            attributes[name] = partial(_move_unless_lent, weakref.ref(storage), name)
    attributes["_lent_to_aiordma"][id(array)] = array


def _move_unless_lent(reference: Callable[[], Any], name: str, *arguments: Any) -> object:
    """Call the storage's own method ``name``, unless a view needs the memory to stay in place."""
    storage = reference()
    if storage._lent_to_aiordma and not storage.is_shared():  # shared storage does not move
        raise RuntimeError(
            f"{name} would move the memory of a tensor that is registered or in use by aiordma; "
            f"call share_memory_() before registering or sending the tensor, or use tensor.clone()"
        )
    return getattr(type(storage), name)(storage, *arguments)


def _unusable_reason(torch: Any, tensor: Any, will_receive: bool) -> str | None:
    """Return why a tensor's memory is unusable and what to use instead, or None if it is usable."""
    if tensor.device.type == "meta":
        return 'has no memory, because it is on the device "meta"'
    if tensor.layout is not torch.strided:
        return (
            f"has the layout {tensor.layout}; pass its parts (indices(), values() ...) one by one"
        )
    if tensor.is_nested:
        return "is nested; pass its parts (unbind()) one by one"
    if tensor.is_quantized:
        alternative = (
            _COPY_FROM
            if will_receive
            else "tensor.int_repr(), and send the scale and zero point separately"
        )
        return f"is quantized; use {alternative}"
    if tensor.requires_grad:
        return "requires a gradient, but aiordma bypasses autograd; use tensor.detach()"
    if tensor.is_conj() or tensor.is_neg():
        alternative = _COPY_FROM if will_receive else "tensor.resolve_conj().resolve_neg()"
        return f"is conjugated or negated, but its memory is not; use {alternative}"
    return None
