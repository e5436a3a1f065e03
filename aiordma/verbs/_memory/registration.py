"""All methods that make memory regions; a part of a protection domain."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiordma._core.arguments import choice
from aiordma._native import SGE, explained, ffi, lib
from aiordma.errors import UnsupportedError, VerbsError

from .._device.enums import AccessFlags, Advice
from .._device.resource import Resource
from .._qp.work_request import ScatterGatherElement
from .memlock import shortage
from .memory_region import MemoryRegion, register
from .special_regions import (
    DeviceMemory,
    alloc_null_mr,
    reg_dm_mr,
    reg_dmabuf_mr,
    reg_implicit,
    reg_pointer,
)

if TYPE_CHECKING:
    from aiordma._native import handles as h  # noqa: F401 - named in the base class below

    from .._device.context import Context
    from .._device.protection_domain import ProtectionDomain


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
        return reg_pointer(self._domain, addr, length, access, iova)

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
        return reg_dmabuf_mr(self._domain, fd, length, access, offset, iova)

    def reg_implicit(self, access: AccessFlags = AccessFlags.LOCAL_WRITE) -> MemoryRegion:
        """Register the whole address space of the process, on demand: "implicit ODP".

        One region for all local buffers; nothing is pinned. UnsupportedError where the device
        does not offer it. Think twice before giving remote rights: the key opens everything.
        """
        return reg_implicit(self._domain, access)

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
        return reg_dm_mr(self._domain, dm, access, offset, length)

    def alloc_null_mr(self) -> MemoryRegion:
        """A region of nothing: what is written to it is discarded: ibv_alloc_null_mr(3).

        Its lkey may stand in any scatter/gather entry, with any address; it has no rkey.
        UnsupportedError where the device has none.
        """
        return alloc_null_mr(self._domain)

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
        try:
            with self.context._offering("advice about memory regions (ibv_advise_mr)"):
                self.context.library.calls.ibv_advise_mr(
                    self.pointer, int(advice), flags, array, len(sges)
                )
        except UnsupportedError:
            raise
        except VerbsError as error:
            raise explained(error, f"{advice.name} for {list(sges)}{shortage(error)}") from None
