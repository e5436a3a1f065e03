"""Memory that is located on the device itself."""

from __future__ import annotations

from aiordma import verbs
from aiordma._native import ffi
from aiordma._native import handles as h

from .._device.resource import Node, Resource
from .buffers import AnyMemory, bytes_of
from .memory_region import check_range, pointer_to


class DeviceMemory(Resource[h.ibv_dm]):
    """Memory on the device, which the CPU cannot access directly.

    ``length`` is its size in bytes. To use it in work requests, register it with
    :meth:`ProtectionDomain.reg_dm_mr`. Copying fails with EINVAL if the offset or the length is not
    a multiple of 4. See ibv_alloc_dm(3).
    """

    def __init__(self, context: verbs.Context, pointer: h.ibv_dm, length: int) -> None:
        self.context = context
        self.length = length
        destroy = context.library.calls.ibv_free_dm
        super().__init__(Node("DeviceMemory", pointer, destroy, [context.node]))

    def write(self, data: AnyMemory, offset: int = 0) -> None:
        """Copy data into the device memory.

        Args:
            data: Any object accepted by :func:`bytes_of`.
            offset: The offset in the device memory to write to.

        Raises:
            LocalRangeError: If the data does not fit.
        """
        with bytes_of(data) as source:
            offset, length = check_range(self.length, offset, len(source))
            self.context.library.calls.ibv_memcpy_to_dm(
                self.pointer, offset, pointer_to(source), length
            )

    def read(self, length: int | None = None, offset: int = 0) -> bytes:
        """Return a copy of bytes from the device memory.

        Args:
            length: The number of bytes. By default, everything from ``offset`` to the end is read.
            offset: The offset in the device memory to read from.

        Raises:
            LocalRangeError: If the range is not within the device memory.
        """
        offset, length = check_range(self.length, offset, length)
        target = ffi.new("char[]", length)
        self.context.library.calls.ibv_memcpy_from_dm(target, self.pointer, offset, length)
        return bytes(ffi.buffer(target))

    def check(self, offset: int, length: int) -> None:
        """Raise LocalRangeError if a range is not within the device memory."""
        check_range(self.length, offset, length)

    def _details(self) -> str:
        return f"{self.length} bytes"
