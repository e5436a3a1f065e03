"""Byte access to tensor memory using DLPack.

A tensor returns a capsule that describes its memory and keeps it alive. The view holds the capsule,
so the memory exists for as long as any view does, as with other buffers. A torch capsule only keeps
the tensor alive, and the tensor's memory can still be replaced. `torch_storage` therefore handles
torch tensors. See "Capsules" in the Python C API documentation, and the DLPack specification,
version 1.0 (dlpack.h).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any, cast

from aiordma.errors import UnsupportedError

from .buffers import addresses_error, not_contiguous_error, type_name
from .no_memory import unsupported_memory_error
from .torch_storage import torch_view

# The CPU can access memory with one of these DLDeviceType values: kDLCPU, kDLCUDAHost and
# kDLROCMHost. The last two denote host memory that a GPU library has allocated.
HOST_DEVICE_TYPES = frozenset({1, 3, 11})

# The latest DLPack version whose layout the structures below match.
VERSION = (1, 0)
READ_ONLY = 1 << 0  # DLPACK_FLAG_BITMASK_READ_ONLY

OPAQUE = 3  # kDLOpaqueHandle, the type code for pointers


class _Version(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32))


class Tensor(ctypes.Structure):
    """The C structure DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class VersionedTensor(ctypes.Structure):
    """The C structure DLManagedTensorVersioned.

    The older DLManagedTensor starts with a DLTensor, so it can be read as a `Tensor`.
    """

    _fields_ = (
        ("version", _Version),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


def _prototype(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    return cast(
        "Callable[..., Any]", ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))
    )


_is_capsule = _prototype("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_capsule_pointer = _prototype(
    "PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p
)


def dlpack_view(memory: object, will_receive: bool) -> memoryview:
    """Return a view of a tensor's bytes, which keeps the tensor's memory alive and in place."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(memory, torch.Tensor):
        if memory.device.type not in ("cpu", "meta"):
            raise _gpu_memory_error(f"torch device {memory.device}", will_receive)
        return torch_view(torch, memory, will_receive)
    _refuse_gpu(memory, will_receive)
    if not hasattr(memory, "__dlpack__"):
        raise unsupported_memory_error(memory, will_receive)
    capsule = _capsule(memory)
    try:
        return _capsule_view(memory, capsule, will_receive)
    except BaseException as error:
        del capsule  # the traceback's frames also refer to it and would keep the tensor alive
        raise error.with_traceback(None) from error.__cause__


def _capsule_view(memory: object, capsule: object, will_receive: bool) -> memoryview:
    """Return a view of the memory described by a DLPack capsule. The view holds the capsule."""
    tensor, read_only = _read_capsule(memory, capsule)
    if tensor.device_type not in HOST_DEVICE_TYPES:
        raise _gpu_memory_error(
            f"DLPack device {tensor.device_type}:{tensor.device_id}", will_receive
        )
    if tensor.code == OPAQUE:
        raise addresses_error(memory, "opaque handles", will_receive)
    shape, strides = tensor.shape[: tensor.ndim], None
    if tensor.strides:
        strides = tensor.strides[: tensor.ndim]
    if not _in_c_order(shape, strides):
        raise not_contiguous_error(memory, will_receive)
    bits = tensor.bits * tensor.lanes
    for length in shape:
        bits *= length
    if bits % 8:
        raise BufferError(
            f"{type_name(memory)} has {bits} bits, which is not a whole number of bytes"
        )
    if not bits:
        return memoryview(bytearray())
    # Keep the capsule's name. Renaming the capsule would mark it as consumed, and its destructor
    # would then not release the tensor.
    data = (ctypes.c_ubyte * (bits // 8)).from_address(tensor.data + tensor.byte_offset)
    data.capsule = capsule
    view = memoryview(data).cast("B")
    return view.toreadonly() if read_only else view


def _refuse_gpu(memory: object, will_receive: bool) -> None:
    """Reject GPU tensors without exporting them. An export could copy data or wait for the GPU."""
    if hasattr(memory, "__cuda_array_interface__"):
        raise _gpu_memory_error("__cuda_array_interface__", will_receive)
    get_device = getattr(memory, "__dlpack_device__", None)
    if get_device is not None:
        device_type, device_id = get_device()
        if int(device_type) not in HOST_DEVICE_TYPES:
            raise _gpu_memory_error(f"DLPack device {int(device_type)}:{device_id}", will_receive)


def _gpu_memory_error(device: str, will_receive: bool) -> UnsupportedError:
    advice = (
        "use host memory and copy the data from it" if will_receive else "copy it to host memory"
    )
    return UnsupportedError(
        f"GPU memory that is given by its address ({device}); export it as a dma-buf and register "
        f"that (Connection.register_dmabuf, ProtectionDomain.reg_dmabuf_mr), or {advice}",
        verb="ibv_reg_mr",
    )


def _capsule(memory: Any) -> object:
    """Ask a tensor for a DLPack capsule of its memory."""
    try:
        return memory.__dlpack__(max_version=VERSION)
    except TypeError:  # older producers do not accept max_version
        return memory.__dlpack__()


def _read_capsule(memory: object, capsule: object) -> tuple[Tensor, bool]:
    """Return the tensor described by the capsule, and whether the tensor is read-only."""
    if _is_capsule(capsule, b"dltensor_versioned"):
        versioned = VersionedTensor.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if versioned.version.major != VERSION[0]:
            raise BufferError(
                f"{type_name(memory)} uses DLPack version {versioned.version.major}, but only"
                f" version {VERSION[0]} is supported"
            )
        return versioned.tensor, bool(versioned.flags & READ_ONLY)
    if _is_capsule(capsule, b"dltensor"):
        return Tensor.from_address(_capsule_pointer(capsule, b"dltensor")), False
    raise BufferError(
        f"the __dlpack__() method of {type_name(memory)} must return a DLPack capsule, not"
        f" {capsule!r}"
    )


def _in_c_order(shape: list[int], strides: list[int] | None) -> bool:
    if strides is None or 0 in shape:
        return True
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
