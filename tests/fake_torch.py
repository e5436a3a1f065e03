"""A substitute for the parts of torch that aiordma uses: tensors and their storages.

`make test` does not need torch, which takes hundreds of megabytes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


class Storage:
    def __init__(self, memory: bytearray) -> None:
        self.memory = memory
        self.resizable = True
        self.shared = False

    def nbytes(self) -> int:
        return len(self.memory)

    def data_ptr(self) -> int:
        return np.frombuffer(self.memory, np.uint8).ctypes.data if self.memory else 0

    def resize_(self, size: int) -> None:
        if not self.resizable:
            raise RuntimeError("Trying to resize storage that is not resizable")
        self.memory = bytearray(size)

    def is_shared(self) -> bool:
        return self.shared

    def share_memory_(self) -> None:
        if not self.shared:
            self.memory, self.shared = bytearray(self.memory), True


class Tensor:
    """A one-dimensional tensor of bytes. Keyword arguments replace attributes and methods."""

    def __init__(self, memory: bytes | bytearray = b"", **different: Any) -> None:
        self._storage, self._start, self._size = Storage(bytearray(memory)), 0, len(memory)
        self.device = SimpleNamespace(type="cpu")
        self.layout = "strided"
        self.is_nested = self.is_quantized = self.requires_grad = False
        self.is_conj = self.is_neg = lambda: False
        self.is_contiguous = lambda: True
        vars(self).update(different)

    def set_(self, storage: Storage, start: int, shape: tuple[int]) -> Tensor:
        self._storage, self._start, (self._size,) = storage, start, shape
        return self

    def numel(self) -> int:
        return self._size

    def element_size(self) -> int:
        return 1

    def storage_offset(self) -> int:
        return self._start

    def untyped_storage(self) -> Storage:
        return self._storage

    def __dlpack__(self) -> object:
        raise AssertionError("a capsule of torch does not hold the storage")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def numpy(self) -> np.ndarray[Any, Any]:
        self._storage.resizable = False
        return np.frombuffer(self._storage.memory, np.uint8, self._size, self._start)


def empty(size: int, *, dtype: str, device: str) -> Tensor:
    assert (size, dtype, device) == (0, "uint8", "cpu")
    return Tensor()


module = SimpleNamespace(Tensor=Tensor, strided="strided", uint8="uint8", empty=empty)
