"""Memory of the device itself."""

from __future__ import annotations

from aiordma import verbs
from aiordma._native import ffi
from aiordma._native import handles as h

from .._device.resource import Node, Resource
from .buffers import AnyMemory, bytes_of
from .memory_region import part_of, pointer_to


class DeviceMemory(Resource[h.ibv_dm]):
    """``length`` bytes of the device's own memory, to which the processor has no pointer.

    Use :meth:`ProtectionDomain.reg_dm_mr` to create regions of it. Devices with such memory copy
    whole words, and refuse offsets and lengths that are not multiples of 4 (EINVAL). Source:
    ibv_alloc_dm(3).
    """

    def __init__(self, context: verbs.Context, pointer: h.ibv_dm, length: int) -> None:
        self.context = context
        self.length = length
        destroy = context.library.calls.ibv_free_dm
        super().__init__(Node("DeviceMemory", pointer, destroy, [context.node]))

    def write(self, data: AnyMemory, offset: int = 0) -> None:
        """Copy ``data`` to it (:func:`bytes_of`).

        Raises:
            LocalRangeError: If it does not fit.
        """
        with bytes_of(data) as source:
            offset, length = part_of(self.length, offset, len(source))
            self.context.library.calls.ibv_memcpy_to_dm(
                self.pointer, offset, pointer_to(source), length
            )

    def read(self, length: int | None = None, offset: int = 0) -> bytes:
        """Copy bytes from it, by default all of them.

        Raises:
            LocalRangeError: If the range exceeds the end.
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
