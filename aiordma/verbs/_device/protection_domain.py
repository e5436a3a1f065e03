"""Protection domains: memory and queue pairs that may be used together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from aiordma import verbs
from aiordma._core.arguments import I32_MAX, choice, integer
from aiordma._native import SGE, explained, ffi, lib
from aiordma._native import handles as h
from aiordma.errors import VerbsError

from .._cq.completion import CompletionQueue
from .._cq.work_completion import WorkCompletion
from .._memory.device_memory import DeviceMemory
from .._memory.memlock import shortage
from .._memory.memory_region import (
    ADDRESS_SPACE,
    MemoryRegion,
    check_rights,
    part_of,
    reg_mr,
    register,
    require_on_demand,
)
from .._memory.memory_window import MemoryWindow, offers_windows
from .._qp.qp_attributes import QPCapabilities
from .._qp.qp_creation import QPOptions, create_qp
from .._qp.queue_pair import QueuePair
from .._qp.shared_receive_queue import SharedReceiveQueue
from .._qp.shared_receive_queue import create_srq as create_srq_in
from .._qp.transport_rules import SendOps
from .._qp.work_request import ScatterGatherElement
from .address import AddressVector, vector_fields
from .address_handle import AddressHandle, vector_from_wc
from .enums import AccessFlags, Advice, MWType, QPCreateFlags, QPType
from .resource import Node, Resource
from .route_lookup import describe


class ProtectionDomain(Resource[h.ibv_pd]):
    """Memory regions and queue pairs made here may be used together, and with no others.

    Making children may be done from any thread.
    """

    def __init__(
        self, context: verbs.Context, pointer: h.ibv_pd, parents: Sequence[Node[Any]] = ()
    ) -> None:
        self.context = context
        destroy = context.library.calls.ibv_dealloc_pd
        super().__init__(Node("ProtectionDomain", pointer, destroy, [*parents] or [context.node]))

    # --- memory ----------------------------------------------------------------------------

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
        return register(self, memory, access, iova, huge_pages)

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
        pointer, place = reg_mr(self, ffi.cast("void *", addr), length, access, iova)
        return MemoryRegion(self, pointer, place, length, access)

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
        return MemoryRegion(self, pointer, addr, length, access)

    def reg_implicit(self, access: AccessFlags = AccessFlags.LOCAL_WRITE) -> MemoryRegion:
        """Register the whole address space of the process, on demand: "implicit ODP".

        One region for all local buffers; nothing is pinned. UnsupportedError where the device
        does not offer it. Think twice before giving remote rights: the key opens everything.
        """
        access = choice("access", access, AccessFlags) | AccessFlags.ON_DEMAND
        require_on_demand(self.context, access, implicit=True)
        pointer, _ = reg_mr(self, ffi.cast("void *", 0), ADDRESS_SPACE, access, None)
        return MemoryRegion(self, pointer, 0, ADDRESS_SPACE, access)

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
        return MemoryRegion(self, pointer, 0, length, access, parent=dm.node)

    def alloc_null_mr(self) -> MemoryRegion:
        """A region of nothing: what is written to it is discarded: ibv_alloc_null_mr(3).

        Its lkey may stand in any scatter/gather entry, with any address; it has no rkey.
        UnsupportedError where the device has none.
        """
        with self.context._offering("null memory regions"):
            pointer = self.context.library.calls.ibv_alloc_null_mr(self.pointer)
        return MemoryRegion(self, pointer, 0, ADDRESS_SPACE, AccessFlags.LOCAL_WRITE)

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

    # --- routes, queues --------------------------------------------------------------------

    def create_ah(self, vector: AddressVector) -> AddressHandle:
        """Resolve the route to a peer, once for many datagrams: ibv_create_ah(3).

        The handle must stay open until the last request that was posted with it has completed.
        VerbsError names the GIDs and the index if the peer cannot be reached.
        """
        try:
            attr = ffi.new("struct ibv_ah_attr *", vector_fields("vector", vector))
        except OverflowError as error:
            raise ValueError(f"{vector}: {error}") from None
        with self.context._offering(
            "address handles",
            lambda error: f"an address handle {describe(self.context, vector, error)}",
        ):
            pointer = self.context.library.calls.ibv_create_ah(self.pointer, attr)
        return AddressHandle(self, pointer, vector)

    def create_ah_from_wc(
        self, wc: WorkCompletion, grh: bytes | bytearray | memoryview, port_num: int = 1
    ) -> AddressHandle:
        """The route back to the sender of a datagram: ibv_create_ah_from_wc(3).

        ``wc`` is the completion of its receive, ``grh`` the first 40 bytes of that receive's
        buffer. The answer goes to queue pair ``wc.src_qp``, whose Q_Key is not known from it.
        """
        return self.create_ah(vector_from_wc(self.context, wc, grh, port_num))

    def alloc_mw(self, mw_type: MWType = MWType.TYPE_2) -> MemoryWindow:
        """Make a memory window, which is not bound to anything yet: ibv_alloc_mw(3).

        UnsupportedError when the device has none of that type.
        """
        context, mw_type = self.context, choice("mw_type", mw_type, MWType)
        what = f"memory windows of type {int(mw_type)}"
        if not offers_windows(context, mw_type):
            raise context._lacking(what, "ibv_alloc_mw")
        try:
            pointer = context.library.calls.ibv_alloc_mw(self.pointer, mw_type)
        except VerbsError as error:
            raise explained(error, f"{what} on {context.name}") from None
        return MemoryWindow(self, pointer, mw_type)

    create_srq: Final = create_srq_in

    def create_qp(
        self,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue | None = None,
        capabilities: QPCapabilities | None = None,
        *,
        qp_type: QPType = QPType.RC,
        sq_sig_all: bool = False,
        srq: SharedReceiveQueue | None = None,
        send_ops: SendOps = SendOps.NONE,
        create_flags: QPCreateFlags = QPCreateFlags.NONE,
        source_qpn: int | None = None,
        max_tso_header: int = 0,
        reserved: bool = False,
    ) -> QueuePair:
        """Make a queue pair, in state RESET: ibv_create_qp(3), ibv_create_qp_ex(3).

        ``recv_cq`` is ``send_cq`` unless given. The device may grant larger capabilities than
        asked for: ``QueuePair.capabilities``. With ``sq_sig_all`` every send makes a completion.
        With ``srq`` receives come from there; those of the capabilities mean nothing then.

        With ``send_ops`` work is posted by the builders of ibv_wr_post(3), with one doorbell for
        any number of requests, all or nothing; they are the operations that will be posted, see
        :func:`send_ops_of`. The methods of the queue pair are the same.
        ``source_qpn`` is the number that a UD queue pair has on the wire; ``max_tso_header`` the
        bytes of the longest header of a segmented send.

        Room for all that can be posted is set aside on the completion queues, which are resized
        when they are too small, so that they cannot overrun; BusyError when they cannot grow. With
        ``reserved`` the caller has set it aside, and tracks what is posted
        (:meth:`QueuePair.untrack`).

        UnsupportedError names what the device does not offer; VerbsError what was asked for, and
        the limits of the device that it passes.
        """
        return create_qp(
            self,
            send_cq,
            recv_cq or send_cq,
            capabilities or QPCapabilities(),
            qp_type,
            sq_sig_all,
            srq,
            QPOptions(send_ops, create_flags, source_qpn, max_tso_header),
            reserved,
        )

    def _label(self) -> str:
        return f"ProtectionDomain of {self.context.name}"
