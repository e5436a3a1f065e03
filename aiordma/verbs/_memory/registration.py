"""All methods that make memory regions; a part of a protection domain."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiordma._core.arguments import I32_MAX, choice, integer
from aiordma._native import SGE, ffi, lib

from .._device.enums import AccessFlags, Advice
from .._device.resource import Resource
from .._qp.work_request import ScatterGatherElement
from .device_memory import DeviceMemory
from .memlock import shortage
from .memory_region import (
    MemoryRegion,
    check_rights,
    part_of,
    reg_mr,
    register,
    require_on_demand,
)

if TYPE_CHECKING:
    from aiordma._native import handles as h  # noqa: F401 - named in the base class below

    from .._device.context import Context
    from .._device.protection_domain import ProtectionDomain

ADDRESS_SPACE = (1 << 64) - 1  # SIZE_MAX


class Registration(Resource["h.ibv_pd"]):
    """The part of :class:`ProtectionDomain` that registers memory."""

    context: Context

    @property
    @abstractmethod
    def _domain(self) -> ProtectionDomain:
        """Itself, by the name of its class."""

    def reg_mr(
        self,
        memory: object,
        access: AccessFlags | None = None,
        *,
        iova: int | None = None,
        huge_pages: bool = False,
    ) -> MemoryRegion:
        """Register memory with the device: ibv_reg_mr(3), ibv_reg_mr_iova2.

        ``memory`` is a number of bytes, for new memory of the region's own (page aligned, zeros),
        or any object with contiguous memory (bytearray, array, numpy array, mmap, torch tensor ...:
        :func:`bytes_of`), which stays pinned until the region is closed. Without ``access`` the
        region is for local use: LOCAL_WRITE, or reading alone when the object is read-only. Remote
        rights are never implied.

        With ``huge_pages`` memory of the region's own is on huge pages where enough are free;
        where not, a warning is logged, and ``page_size`` tells. ``iova`` is the address that work
        requests and peers use instead of the memory's own, at the same place within a page; with
        the right ZERO_BASED it is 0.
        With ON_DEMAND nothing is pinned in memory, pages come when they are needed.

        ValueError for rights that the memory cannot have, TypeError for an object without memory,
        or with Python objects or pointers there, BufferError for memory that is not contiguous;
        UnsupportedError for rights that the device does not offer, and for memory of a GPU;
        VerbsError from the device, with the limit on locked memory where that may be the reason
        (ENOMEM), and for more new memory than the kernel gives (ENOMEM).
        """
        return register(self._domain, memory, access, iova, huge_pages)

    def reg_pointer(
        self,
        addr: int,
        length: int,
        access: AccessFlags = AccessFlags.LOCAL_WRITE,
        *,
        iova: int | None = None,
    ) -> MemoryRegion:
        """Register ``length`` bytes at an address, as of memory that another library allocated.

        That may be memory of a GPU whose driver lets other devices reach it. The region holds
        nothing: the caller keeps the memory, at that address, until the region is closed. Errors
        as of :meth:`reg_mr`; VerbsError (EFAULT) where there is no memory.
        """
        addr, length = integer("addr", addr), integer("length", length, None)
        if length <= 0:
            raise ValueError(f"a memory region of {length} bytes: it needs at least one")
        access = choice("access", access, AccessFlags)
        iova = None if iova is None else integer("iova", iova)
        pointer, place = reg_mr(self._domain, ffi.cast("void *", addr), length, access, iova)
        return MemoryRegion(self._domain, pointer, place, length, access)

    def reg_dmabuf_mr(
        self,
        fd: int,
        length: int,
        access: AccessFlags = AccessFlags.LOCAL_WRITE,
        *,
        offset: int = 0,
        iova: int | None = None,
    ) -> MemoryRegion:
        """Register memory of another device, of which ``fd`` is a dma-buf: ibv_reg_dmabuf_mr(3).

        ``length`` bytes from ``offset`` of it, which work requests and peers find at ``iova``, at
        ``offset`` unless given; both must have the same place within a page. The fd may be closed
        afterwards. UnsupportedError where the device or its driver cannot.
        """
        fd, length = integer("fd", fd, 0, I32_MAX), integer("length", length)
        offset, access = integer("offset", offset), choice("access", access, AccessFlags)
        iova = None if iova is None else integer("iova", iova)
        check_rights(access)
        addr = offset if iova is None else iova
        what = f"registering {length} bytes from {offset} of file {fd} at {addr:#x}"
        with self.context._offering(
            "memory of other devices (dma-buf)", lambda error: what + shortage(error)
        ):
            pointer = self.context.library.calls.ibv_reg_dmabuf_mr(
                self.pointer, offset, length, addr, fd, int(access)
            )
        return MemoryRegion(self._domain, pointer, addr, length, access)

    def reg_implicit(self, access: AccessFlags = AccessFlags.LOCAL_WRITE) -> MemoryRegion:
        """Register the whole address space of the process, on demand: "implicit ODP".

        One region for all local buffers; nothing is pinned. UnsupportedError where the device
        does not offer it. Think twice before giving remote rights: the key opens everything.
        """
        access = choice("access", access, AccessFlags) | AccessFlags.ON_DEMAND
        require_on_demand(self.context, access, implicit=True)
        pointer, _ = reg_mr(self._domain, ffi.cast("void *", 0), ADDRESS_SPACE, access, None)
        return MemoryRegion(self._domain, pointer, 0, ADDRESS_SPACE, access)

    def reg_dm_mr(
        self,
        dm: DeviceMemory,
        access: AccessFlags = AccessFlags.LOCAL_WRITE,
        *,
        offset: int = 0,
        length: int | None = None,
    ) -> MemoryRegion:
        """Register memory of the device itself, from :meth:`Context.alloc_dm`: ibv_reg_dm_mr(3).

        All of it, or a range. The region's addresses begin at 0. LocalRangeError for a range that
        is not inside.
        """
        access = choice("access", access, AccessFlags)
        offset, length = part_of(dm.length, offset, length)
        check_rights(access)
        access |= AccessFlags.ZERO_BASED  # there is no address that it could have: ibv_alloc_dm(3)
        pointer = self.context.library.calls.ibv_reg_dm_mr(
            self.pointer, dm.pointer, offset, length, int(access)
        )
        return MemoryRegion(self._domain, pointer, 0, length, access, parent=dm.node)

    def alloc_null_mr(self) -> MemoryRegion:
        """A region of nothing: what is written to it is discarded: ibv_alloc_null_mr(3).

        Its lkey may stand in any scatter/gather entry, with any address; it has no rkey.
        UnsupportedError where the device has none.
        """
        with self.context._offering("null memory regions"):
            pointer = self.context.library.calls.ibv_alloc_null_mr(self.pointer)
        return MemoryRegion(self._domain, pointer, 0, ADDRESS_SPACE, AccessFlags.LOCAL_WRITE)

    def advise_mr(
        self, advice: Advice, sges: Sequence[ScatterGatherElement], *, flush: bool = False
    ) -> None:
        """Tell the device what ranges of regions on demand will be used: ibv_advise_mr(3).

        With ``flush`` it returns when the pages are there. Without, it is best effort.
        UnsupportedError where the device takes no advice; VerbsError: EFAULT for a range outside
        of its region, EPERM for another protection domain or a missing right, ENOENT for an unknown
        lkey. Of a region that is not on demand the pages are there already.
        """
        advice = choice("advice", advice, Advice)
        array = ffi.new("struct ibv_sge[]", max(1, len(sges)))
        ffi.buffer(array)[: SGE.size * len(sges)] = b"".join(SGE.pack(*sge) for sge in sges)
        flags = lib.IB_UVERBS_ADVISE_MR_FLAG_FLUSH if flush else 0
        with self.context._offering(
            "advice about memory regions (ibv_advise_mr)",
            lambda error: f"{advice.name} for {list(sges)}{shortage(error)}",
        ):
            self.context.library.calls.ibv_advise_mr(
                self.pointer, int(advice), flags, array, len(sges)
            )


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
