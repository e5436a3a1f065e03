"""A tensor class that exports valid and invalid DLPack capsules of any kind.

Sources: the DLPack specification (dlpack.h), and the Python C API on capsules.
"""

from __future__ import annotations

import ctypes
from typing import Any

from aiordma.verbs._memory.dlpack import Tensor, VersionedTensor

CPU, CUDA, CUDA_HOST = 1, 2, 3
UINT, FLOAT, BFLOAT = 1, 2, 4

Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class ManagedTensor(ctypes.Structure):
    """The unversioned DLManagedTensor of DLPack."""

    _fields_ = (("tensor", Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class OwnTensor:
    """Exports `memory` as DLPack capsules. `out` counts the capsules not yet released."""

    def __init__(
        self,
        memory: bytearray,
        shape: tuple[int, ...],
        *,
        strides: tuple[int, ...] | None = None,
        code: int = UINT,
        bits: int = 8,
        byte_offset: int = 0,
        device: int = CPU,
        read_only: bool = False,
        version: tuple[int, int] | None = (1, 0),
    ) -> None:
        self._view = (ctypes.c_ubyte * len(memory)).from_buffer(memory)
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(shape))(*strides) if strides is not None else None
        self._device = device
        self._version = version
        self.out = 0
        self._tensor = Tensor(
            data=ctypes.addressof(self._view),
            device_type=device,
            ndim=len(shape),
            code=code,
            bits=bits,
            lanes=1,
            shape=self._shape,
            strides=self._strides,
            byte_offset=byte_offset,
        )
        self._managed: ctypes.Structure
        if version is None:
            self._managed = ManagedTensor(tensor=self._tensor)
        else:
            self._managed = VersionedTensor(
                version=version, flags=1 if read_only else 0, tensor=self._tensor
            )
        self._destroy = Deleter(self._given_back)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0

    def __dlpack__(self, **keywords: Any) -> object:
        if self._version is None and keywords:
            raise TypeError("max_version came later")
        self.out += 1
        name = b"dltensor" if self._version is None else b"dltensor_versioned"
        return _new(
            ctypes.addressof(self._managed), name, ctypes.cast(self._destroy, ctypes.c_void_p)
        )

    def _given_back(self, capsule: int) -> None:
        self.out -= 1
