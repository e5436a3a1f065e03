"""Memory of the device itself."""

from __future__ import annotations

from aiordma import verbs
from aiordma._native import ffi
from aiordma._native import handles as h

from .._device.resource import Node, Resource
from .buffers import AnyMemory, bytes_of
from .memory_region import part_of, pointer_to


class DeviceMemory(Resource[h.ibv_dm]):
    """``length`` bytes of memory on the device, which the processor cannot address directly.

    Use :meth:`ProtectionDomain.reg_dm_mr` to create regions of this memory. Offsets and lengths of
    copies must be multiples of 4, or devices fail with EINVAL. Source: ibv_alloc_dm(3).
    """

    def __init__(self, context: verbs.Context, pointer: h.ibv_dm, length: int) -> None:
        self.context = context
        self.length = length
        destroy = context.library.calls.ibv_free_dm
        super().__init__(Node("DeviceMemory", pointer, destroy, [context.node]))

    def write(self, data: AnyMemory, offset: int = 0) -> None:
        """Copy ``data`` into the device memory.

        Args:
            data: Any memory that :func:`bytes_of` accepts.
            offset: The first byte to overwrite.

        Raises:
            LocalRangeError: If the data does not fit.
        """
        with bytes_of(data) as source:
            offset, length = part_of(self.length, offset, len(source))
            self.context.library.calls.ibv_memcpy_to_dm(
                self.pointer, offset, pointer_to(source), length
            )

    def read(self, length: int | None = None, offset: int = 0) -> bytes:
        """Copy bytes from the device memory.

        Args:
            length: The number of bytes; by default up to the end of the memory.
            offset: The first byte.

        Raises:
            LocalRangeError: If the range is not within the memory.
        """
        offset, length = part_of(self.length, offset, length)
        target = ffi.new("char[]", length)
        self.context.library.calls.ibv_memcpy_from_dm(target, self.pointer, offset, length)
        return bytes(ffi.buffer(target))

    def check(self, offset: int, length: int) -> None:
        """Raise LocalRangeError if a range is not within the memory."""
        part_of(self.length, offset, length)

    def _details(self) -> str:
        return f"{self.length} bytes"
