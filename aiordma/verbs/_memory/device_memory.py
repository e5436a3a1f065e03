"""Memory of the device itself."""

from __future__ import annotations

from aiordma import verbs
from aiordma._native import ffi
from aiordma._native import handles as h

from .._device.resource import Node, Resource
from .buffers import AnyMemory, bytes_of
from .memory_region import part_of, pointer_to


class DeviceMemory(Resource[h.ibv_dm]):
    """``length`` bytes of the device's own memory, which the processor has no pointer to.

    :meth:`ProtectionDomain.reg_dm_mr` makes regions of it. The devices that have it copy whole
    words, and refuse offsets and lengths that are no multiples of 4 (EINVAL). Source:
    ibv_alloc_dm(3).
    """

    def __init__(self, context: verbs.Context, pointer: h.ibv_dm, length: int) -> None:
        self.context = context
        self.length = length
        destroy = context.library.calls.ibv_free_dm
        super().__init__(Node("DeviceMemory", pointer, destroy, [context.node]))

    def write(self, data: AnyMemory, offset: int = 0) -> None:
        """Copy ``data`` there (:func:`bytes_of`). LocalRangeError when it does not fit."""
        with bytes_of(data) as source:
            offset, length = part_of(self.length, offset, len(source))
            self.context.library.calls.ibv_memcpy_to_dm(
                self.pointer, offset, pointer_to(source), length
            )

    def read(self, length: int | None = None, offset: int = 0) -> bytes:
        """Copy bytes from there, all of them by default. LocalRangeError beyond the end."""
        offset, length = part_of(self.length, offset, length)
        target = ffi.new("char[]", length)
        self.context.library.calls.ibv_memcpy_from_dm(target, self.pointer, offset, length)
        return bytes(ffi.buffer(target))

    def check(self, offset: int, length: int) -> None:
        """LocalRangeError for a range that is not inside."""
        part_of(self.length, offset, length)

    def _details(self) -> str:
        return f"{self.length} bytes"
