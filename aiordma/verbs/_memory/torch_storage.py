"""The memory of torch's tensors, as bytes.

A tensor refers to a storage, which has the memory. `tensor.data = other` and `set_` give the tensor
another storage, `resize_` gives the storage other memory. So the view keeps an array that torch
makes of a tensor of our own on the same storage: no other code can give that tensor another one,
and torch resizes no storage that it has made an array of, from then on.

What moves a storage to shared memory asks for no such array. So the storage object, which is one
and the same for all tensors that refer to it, gets attributes in the place of those methods.
Source: the documentation of torch.Tensor and torch.UntypedStorage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from .buffers import name, not_contiguous

# Methods that give a storage other memory; torch.multiprocessing calls the second and third.
_MOVES = ("share_memory_", "_share_fd_cpu_", "_share_filename_cpu_")


def of_torch(torch: Any, tensor: Any) -> memoryview:
    """The bytes of a tensor on the CPU; BufferError for those that its memory does not have."""
    if (problem := _problem(torch, tensor)) is not None:
        raise BufferError(f"{name(tensor)} {problem}")
    if not tensor.is_contiguous():
        raise not_contiguous(tensor)
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    start = tensor.storage_offset() * tensor.element_size()
    try:
        storage = tensor.untyped_storage()
        there = storage.nbytes() if storage.data_ptr() else 0
    except RuntimeError as error:  # NotImplementedError is one
        raise BufferError(f"{name(tensor)} has no memory of its own: {error}") from error
    if start + size > there:
        raise BufferError(
            f"{name(tensor)} of {size} bytes from {start} on, whose storage has {there}: "
            f"it has been resized, or its elements are elsewhere (to_local())"
        )
    own = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, start, (size,))
    try:
        array = own.numpy()
    except RuntimeError as error:
        raise BufferError(
            f"{name(tensor)}: torch keeps the memory of a tensor in its place by an array of "
            f"numpy, and made none ({error}); install numpy"
        ) from error
    _refuse_moves(storage, array)
    return memoryview(array)


def _refuse_moves(storage: Any, array: Any) -> None:
    """A method that moves the storage raises as long as there is the array."""
    own = vars(storage)
    if "_lent_to_aiordma" not in own:
        own["_lent_to_aiordma"] = weakref.WeakValueDictionary()
        for name in _MOVES:
            own[name] = partial(_move, weakref.ref(storage), name)
    own["_lent_to_aiordma"][id(array)] = array


def _move(reference: Callable[[], Any], name: str, *arguments: Any) -> object:
    storage = reference()
    if storage._lent_to_aiordma and not storage.is_shared():  # where it stays in its place
        raise RuntimeError(
            f"{name} would move the memory of a tensor that is registered, or that an operation of "
            f"aiordma uses: call share_memory_() before that, or use tensor.clone()"
        )
    return getattr(type(storage), name)(storage, *arguments)


def _problem(torch: Any, tensor: Any) -> str | None:
    """Why the memory of a tensor does not have its elements, and what to use instead."""
    if tensor.device.type == "meta":
        return 'has no memory: it is on the device "meta"'
    if tensor.layout is not torch.strided:
        return f"of the layout {tensor.layout}: use its parts (indices(), values() ...) one by one"
    if tensor.is_nested:
        return "is nested: use its parts (unbind()) one by one"
    if tensor.is_quantized:
        return "is quantized: use tensor.int_repr(), with its scale and zero point beside it"
    if tensor.requires_grad:
        return "needs a gradient, and its memory is used past autograd: use tensor.detach()"
    if tensor.is_conj() or tensor.is_neg():
        return (
            "is conjugated or negated when it is read, and its memory is not: use "
            "tensor.resolve_conj().resolve_neg()"
        )
    return None
