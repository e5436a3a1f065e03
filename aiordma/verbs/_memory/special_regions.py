"""Regions of memory that no Python object holds: pointers, dma-bufs, device memory, all memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma._core.arguments import I32_MAX, U32_MAX, choice, integer
from aiordma._native import explained, ffi
from aiordma.errors import LocalRangeError, UnsupportedError, VerbsError

from .._device.enums import AccessFlags
from .._device.resource import Node, Resource
from .buffers import AnyMemory, bytes_of
from .memlock import shortage
from .memory_region import MemoryRegion, check_rights, pointer_to, reg_mr, require_on_demand

if TYPE_CHECKING:
    from aiordma._native import handles as h

    from .._device.context import Context
    from .._device.protection_domain import ProtectionDomain

ADDRESS_SPACE = (1 << 64) - 1  # SIZE_MAX


class DeviceMemory(Resource["h.ibv_dm"]):
    """``length`` bytes of the device's own memory, which the processor has no pointer to.

    :meth:`ProtectionDomain.reg_dm_mr` makes regions of it. The devices that have it copy whole
    words, and refuse offsets and lengths that are no multiples of 4 (EINVAL). Source:
    ibv_alloc_dm(3).
    """

    def __init__(self, context: Context, pointer: h.ibv_dm, length: int) -> None:
        self.context = context
        self.length = length
        destroy = context.library.calls.ibv_free_dm
        super().__init__(Node("DeviceMemory", pointer, destroy, [context.node]))

    def write(self, data: AnyMemory, offset: int = 0) -> None:
        """Copy ``data`` there (:func:`bytes_of`). LocalRangeError when it does not fit."""
        offset = integer("offset", offset, None)
        with bytes_of(data) as source:
            self.check(offset, len(source))
            self.context.library.calls.ibv_memcpy_to_dm(
                self.pointer, offset, pointer_to(source), len(source)
            )

    def read(self, length: int | None = None, offset: int = 0) -> bytes:
        """Copy bytes from there, all of them by default. LocalRangeError beyond the end."""
        offset = integer("offset", offset, None)
        length = self.length - offset if length is None else integer("length", length, None)
        self.check(offset, length)
        target = ffi.new("char[]", length)
        self.context.library.calls.ibv_memcpy_from_dm(target, self.pointer, offset, length)
        return bytes(ffi.buffer(target))

    def check(self, offset: int, length: int) -> None:
        """LocalRangeError for a range that is not inside."""
        if offset < 0 or length < 0 or offset + length > self.length:
            raise LocalRangeError(offset, length, self.length)

    def _details(self) -> str:
        return f"{self.length} bytes"


def alloc_dm(context: Context, length: int, log_align_req: int) -> DeviceMemory:
    """As :meth:`Context.alloc_dm`."""
    length = integer("length", length, None)
    log_align_req = integer("log_align_req", log_align_req, 0, U32_MAX)
    most = context.query_device_ex().max_dm_size
    capability = "memory of its own (device memory)"
    if not most:
        raise UnsupportedError(capability, device=context.name, verb="ibv_alloc_dm")
    if not 0 < length <= most:
        raise ValueError(f"{length} bytes of device memory; {context.name} has 1 to {most}")
    attr = ffi.new("struct ibv_alloc_dm_attr *")
    attr.length = length
    attr.log_align_req = log_align_req
    with context._offering(capability):
        pointer = context.library.calls.ibv_alloc_dm(context.pointer, attr)
    return DeviceMemory(context, pointer, length)


def reg_dm_mr(
    pd: ProtectionDomain, dm: DeviceMemory, access: AccessFlags, offset: int, length: int | None
) -> MemoryRegion:
    """As :meth:`ProtectionDomain.reg_dm_mr`."""
    offset, access = integer("offset", offset, None), choice("access", access, AccessFlags)
    length = dm.length - offset if length is None else integer("length", length, None)
    dm.check(offset, length)
    check_rights(access)
    access |= AccessFlags.ZERO_BASED  # there is no address that it could have: ibv_alloc_dm(3)
    pointer = pd.context.library.calls.ibv_reg_dm_mr(
        pd.pointer, dm.pointer, offset, length, int(access)
    )
    return MemoryRegion(pd, pointer, 0, length, access, parent=dm.node)


def alloc_null_mr(pd: ProtectionDomain) -> MemoryRegion:
    """As :meth:`ProtectionDomain.alloc_null_mr`."""
    with pd.context._offering("null memory regions"):
        pointer = pd.context.library.calls.ibv_alloc_null_mr(pd.pointer)
    return MemoryRegion(pd, pointer, 0, ADDRESS_SPACE, AccessFlags.LOCAL_WRITE)


def reg_dmabuf_mr(
    pd: ProtectionDomain, fd: int, length: int, access: AccessFlags, offset: int, iova: int | None
) -> MemoryRegion:
    """As :meth:`ProtectionDomain.reg_dmabuf_mr`."""
    fd, length = integer("fd", fd, 0, I32_MAX), integer("length", length)
    offset, access = integer("offset", offset), choice("access", access, AccessFlags)
    iova = None if iova is None else integer("iova", iova)
    check_rights(access)
    addr = offset if iova is None else iova
    try:
        with pd.context._offering("memory of other devices (dma-buf)"):
            pointer = pd.context.library.calls.ibv_reg_dmabuf_mr(
                pd.pointer, offset, length, addr, fd, int(access)
            )
    except UnsupportedError:
        raise
    except VerbsError as error:
        what = f"registering {length} bytes from {offset} of file {fd} at {addr:#x}"
        raise explained(error, what + shortage(error)) from None
    return MemoryRegion(pd, pointer, addr, length, access)


def reg_pointer(
    pd: ProtectionDomain, addr: int, length: int, access: AccessFlags, iova: int | None
) -> MemoryRegion:
    """As :meth:`ProtectionDomain.reg_pointer`."""
    addr, length = integer("addr", addr), integer("length", length, None)
    if length <= 0:
        raise ValueError(f"a memory region of {length} bytes: it needs at least one")
    access = choice("access", access, AccessFlags)
    iova = None if iova is None else integer("iova", iova)
    pointer, place = reg_mr(pd, ffi.cast("void *", addr), length, access, iova)
    return MemoryRegion(pd, pointer, place, length, access)


def reg_implicit(pd: ProtectionDomain, access: AccessFlags) -> MemoryRegion:
    """As :meth:`ProtectionDomain.reg_implicit`."""
    access = choice("access", access, AccessFlags) | AccessFlags.ON_DEMAND
    require_on_demand(pd.context, access, implicit=True)
    pointer, _ = reg_mr(pd, ffi.cast("void *", 0), ADDRESS_SPACE, access, None)
    return MemoryRegion(pd, pointer, 0, ADDRESS_SPACE, access)


def reg_local_dma(pd: ProtectionDomain) -> MemoryRegion | None:
    """Register all memory of this process for local use; None if the device pins what it uses.

    Nothing checks what is posted with its key: it is for the library's own requests, of bytes that
    it holds. An implicit region on demand would not do: a card brings in its pages one by one, and
    a copy is quicker.
    """
    register = pd.context.library.reg_local_dma
    if register is None:
        return None
    pointer = register(pd.pointer)
    return MemoryRegion(pd, pointer, 0, ADDRESS_SPACE, AccessFlags.LOCAL_WRITE)
