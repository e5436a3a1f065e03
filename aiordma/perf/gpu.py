"""NVIDIA GPU memory for measuring writes and reads, allocated through the CUDA driver library.

Only the client can use GPU memory. The driver exports the memory as a dma-buf, which the RDMA
device accesses directly. The code follows "Memory Management" in the CUDA Driver API reference, and
uses only functions available in all drivers since version 11.7.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import aiordma

LIBRARY = "libcuda.so.1"

# CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
DMA_BUF = 1

# The driver exports only ranges that are aligned to host pages. Allocating multiples of its large
# page size ensures this alignment.
PAGE = 2 << 20


class GPUError(Exception):
    """Raised if a GPU driver call fails or no GPU is usable."""


class GPU:
    """The first GPU in this machine.

    Call `close` after releasing the memory allocated on it.

    Raises:
        GPUError: If no GPU can be used.
    """

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        try:
            self._library = load(LIBRARY)
        except OSError as error:
            raise GPUError(
                f"no GPU can be used: {LIBRARY} cannot be loaded ({error}); install the NVIDIA "
                "driver"
            ) from error
        self.device: ctypes.c_int = ctypes.c_int()
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: object) -> None:
        """Call a driver function, and raise GPUError if it fails."""
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            error_name = (text.value or b"an unknown error").decode()
            raise GPUError(f"GPU driver error: {name} failed with {error_name} ({code})")

    def close(self) -> None:
        self.call("cuDevicePrimaryCtxRelease_v2", self.device)


class GPUMemory:
    """GPU memory registered for one connection."""

    def __init__(self, gpu: GPU, conn: aiordma.Connection, size: int) -> None:
        self._gpu = gpu
        self._size = size
        self._pointer = ctypes.c_uint64()
        whole = -(-size // PAGE) * PAGE
        with ExitStack() as stack:
            gpu.call("cuMemAlloc_v2", ctypes.byref(self._pointer), ctypes.c_size_t(whole))
            stack.callback(gpu.call, "cuMemFree_v2", self._pointer)
            fd = ctypes.c_int(-1)
            gpu.call(
                "cuMemGetHandleForAddressRange",
                ctypes.byref(fd),
                self._pointer,
                ctypes.c_size_t(whole),
                DMA_BUF,
                ctypes.c_uint64(0),
            )
            try:
                self.local: aiordma.DmabufRegion = conn.register_dmabuf(fd.value, size)
            finally:
                os.close(fd.value)  # the region uses its own duplicate
            stack.callback(self.local.close)
            self._stack = stack.pop_all()

    def fill(self, data: bytes) -> None:
        self._gpu.call("cuMemcpyHtoD_v2", self._pointer, data, ctypes.c_size_t(self._size))

    def contents(self) -> bytes:
        data = ctypes.create_string_buffer(self._size)
        self._gpu.call("cuMemcpyDtoH_v2", data, self._pointer, ctypes.c_size_t(self._size))
        return data.raw

    def release(self) -> None:
        self._stack.close()
