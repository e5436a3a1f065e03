"""Protection domains, which group the memory regions and queue pairs that can be used together."""

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
from .._memory.memlock import locked_memory_hint
from .._memory.memory_region import (
    ADDRESS_SPACE,
    MemoryRegion,
    check_range,
    check_rights,
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
from .route_lookup import describe_route


class ProtectionDomain(Resource[h.ibv_pd]):
    """A group of memory regions and queue pairs that can be used together.

    They cannot be combined with objects from other protection domains. Any thread may create
    objects in a protection domain.
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
        """Register memory for access by the device. See ibv_reg_mr(3).

        Args:
            memory: A number of bytes, or an object that provides contiguous memory, such as a
                bytearray, array, numpy array, mmap or torch tensor (see :func:`bytes_of`). A number
                allocates new memory, which is zeroed and page-aligned. An object's memory stays
                pinned until the region is closed.
            access: The access rights. By default, the memory can only be used locally, and is
                writable (LOCAL_WRITE) unless the object is read-only. With ON_DEMAND, the memory is
                not pinned, and its pages are loaded when needed.
            iova: The address for work requests and peers to use instead of the actual address. Both
                addresses must have the same offset within a page. With ZERO_BASED, the address is
                0.
            huge_pages: Whether to allocate new memory on huge pages. If too few are free, ordinary
                pages are used instead and a warning is logged. The region's ``page_size`` shows the
                result.

        Raises:
            ValueError: If the memory cannot be registered with these rights.
            TypeError: If the object does not provide access to its memory, or if its elements are
                Python objects or pointers.
            BufferError: If the memory is not contiguous.
            UnsupportedError: If the device does not support the rights, or if the memory is on a
                GPU.
            VerbsError: If the device rejects the registration, or if the kernel cannot provide new
                memory. With ENOMEM, the message mentions the limit on locked memory if that may be
                the reason.
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
        """Register memory by address, for example memory allocated by another library.

        GPU memory can be registered if the GPU's driver lets other devices access it. The region
        does not keep the memory alive, so you must keep it at this address until the region is
        closed. This method also raises the exceptions of :meth:`reg_mr`.

        Raises:
            VerbsError: With EFAULT, if no memory is mapped at the address.
        """
        addr, length = integer("addr", addr), integer("length", length, None)
        if length <= 0:
            raise ValueError(f"a memory region must be at least 1 byte long, not {length}")
        access = choice("access", access, AccessFlags)
        iova = None if iova is None else integer("iova", iova)
        pointer, region_addr = reg_mr(self, ffi.cast("void *", addr), length, access, iova)
        return MemoryRegion(self, pointer, region_addr, length, access)

    def reg_dmabuf_mr(
        self,
        fd: int,
        length: int,
        access: AccessFlags = AccessFlags.LOCAL_WRITE,
        *,
        offset: int = 0,
        iova: int | None = None,
    ) -> MemoryRegion:
        """Register another device's memory, such as a GPU's, that has been exported as a dma-buf.

        See ibv_reg_dmabuf_mr(3).

        Args:
            fd: The dma-buf's file descriptor. You may close it after the call.
            length: The number of bytes.
            access: The access rights.
            offset: The start of the region within the dma-buf.
            iova: The address for work requests and peers to use. Defaults to ``offset``. ``iova``
                and ``offset`` must have the same offset within a page.

        Raises:
            UnsupportedError: If the device or its driver does not support dma-bufs.
        """
        fd, length = integer("fd", fd, 0, I32_MAX), integer("length", length)
        offset, access = integer("offset", offset), choice("access", access, AccessFlags)
        iova = None if iova is None else integer("iova", iova)
        check_rights(access)
        addr = offset if iova is None else iova
        message = f"cannot register {length} bytes at offset {offset} of dma-buf {fd} as {addr:#x}"
        with self.context._requires_capability(
            "memory of other devices (dma-buf)", lambda error: message + locked_memory_hint(error)
        ):
            pointer = self.context.library.calls.ibv_reg_dmabuf_mr(
                self.pointer, offset, length, addr, fd, int(access)
            )
        return MemoryRegion(self, pointer, addr, length, access)

    def reg_implicit(self, access: AccessFlags = AccessFlags.LOCAL_WRITE) -> MemoryRegion:
        """Register the process's whole address space without pinning it ("implicit ODP").

        With on-demand paging (ODP), the device loads pages as it needs them. You can use the region
        for every local buffer. Be careful with remote rights: anyone who knows the key can then
        access all of the process's memory.

        Raises:
            UnsupportedError: If the device does not support implicit ODP.
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
        """Register device memory allocated with :meth:`Context.alloc_dm`.

        The region's addresses start at 0. See ibv_reg_dm_mr(3).

        Args:
            dm: The device memory.
            access: The access rights.
            offset: The start of the region within the device memory.
            length: The number of bytes. By default, the region extends to the end of the device
                memory.

        Raises:
            LocalRangeError: If the range is not within the device memory.
        """
        access = choice("access", access, AccessFlags)
        offset, length = check_range(dm.length, offset, length)
        check_rights(access)
        access |= AccessFlags.ZERO_BASED  # device memory has no address (ibv_alloc_dm(3))
        pointer = self.context.library.calls.ibv_reg_dm_mr(
            self.pointer, dm.pointer, offset, length, int(access)
        )
        return MemoryRegion(self, pointer, 0, length, access, parent=dm.node)

    def alloc_null_mr(self) -> MemoryRegion:
        """Create a memory region that discards all data written to it. See ibv_alloc_null_mr(3).

        You can use its ``lkey`` in any scatter/gather element, with any address. The region has no
        ``rkey``.

        Raises:
            UnsupportedError: If the device does not support null memory regions.
        """
        with self.context._requires_capability("null memory regions"):
            pointer = self.context.library.calls.ibv_alloc_null_mr(self.pointer)
        return MemoryRegion(self, pointer, 0, ADDRESS_SPACE, AccessFlags.LOCAL_WRITE)

    def advise_mr(
        self, advice: Advice, sges: Sequence[ScatterGatherElement], *, flush: bool = False
    ) -> None:
        """Tell the device which ranges of on-demand regions are about to be used.

        Other regions do not need this hint, because their pages always stay in memory. See
        ibv_advise_mr(3).

        Args:
            advice: How the ranges will be used.
            sges: The ranges.
            flush: Whether to wait until the pages are in memory. Otherwise, the device may ignore
                the advice.

        Raises:
            UnsupportedError: If the device does not support advice.
            VerbsError: With EFAULT, if a range is outside its region. With EPERM, if a region
                belongs to another protection domain or lacks the necessary access rights. With
                ENOENT, if no region has the given ``lkey``.
        """
        advice = choice("advice", advice, Advice)
        array = ffi.new("struct ibv_sge[]", max(1, len(sges)))
        ffi.buffer(array)[: SGE.size * len(sges)] = b"".join(SGE.pack(*sge) for sge in sges)
        flags = lib.IB_UVERBS_ADVISE_MR_FLAG_FLUSH if flush else 0
        with self.context._requires_capability(
            "advice about memory regions (ibv_advise_mr)",
            lambda error: f"cannot apply {advice.name} to {list(sges)}{locked_memory_hint(error)}",
        ):
            self.context.library.calls.ibv_advise_mr(
                self.pointer, int(advice), flags, array, len(sges)
            )

    # --- routes, queues --------------------------------------------------------------------

    def create_ah(self, vector: AddressVector) -> AddressHandle:
        """Create an address handle, which can be used for many datagrams to the same peer.

        Keep the handle open until the last request using it has completed. See ibv_create_ah(3).

        Raises:
            VerbsError: If the peer cannot be reached. The message contains both GIDs and the local
                GID's index.
        """
        try:
            attr = ffi.new("struct ibv_ah_attr *", vector_fields("vector", vector))
        except OverflowError as error:
            raise ValueError(f"invalid address vector {vector}: {error}") from None
        with self.context._requires_capability(
            "address handles",
            lambda error: (
                f"cannot create an address handle {describe_route(self.context, vector, error)}"
            ),
        ):
            pointer = self.context.library.calls.ibv_create_ah(self.pointer, attr)
        return AddressHandle(self, pointer, vector)

    def create_ah_from_wc(
        self, wc: WorkCompletion, grh: bytes | bytearray | memoryview, port_num: int = 1
    ) -> AddressHandle:
        """Create an address handle for replying to a datagram's sender.

        Send the reply to the queue pair with the number ``wc.src_qp``. You must already know the
        sender's Q_Key, because the completion does not contain it. See ibv_create_ah_from_wc(3).

        Args:
            wc: The receive's completion.
            grh: The first 40 bytes of the receive's memory.
            port_num: The port the datagram arrived on.
        """
        return self.create_ah(vector_from_wc(self.context, wc, grh, port_num))

    def alloc_mw(self, mw_type: MWType = MWType.TYPE_2) -> MemoryWindow:
        """Create a memory window. It is not bound to any memory yet. See ibv_alloc_mw(3).

        Raises:
            UnsupportedError: If the device does not support memory windows of this type.
        """
        context, mw_type = self.context, choice("mw_type", mw_type, MWType)
        what = f"memory windows of type {int(mw_type)}"
        if not offers_windows(context, mw_type):
            raise context._unsupported_error(what, "ibv_alloc_mw")
        try:
            pointer = context.library.calls.ibv_alloc_mw(self.pointer, mw_type)
        except VerbsError as error:
            what = f"cannot create a memory window of type {int(mw_type)} on {context.name}"
            raise explained(error, what) from None
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
        """Create a queue pair in the RESET state. See ibv_create_qp(3) and ibv_create_qp_ex(3).

        Entries for all of the queue pair's completions are reserved in its completion queues, so
        that they cannot overrun. A completion queue that is too small is enlarged.

        Args:
            send_cq: The completion queue for sends.
            recv_cq: The completion queue for receives. Defaults to ``send_cq``.
            capabilities: The requested sizes. The device may grant larger ones, which are then
                available as ``QueuePair.capabilities``.
            qp_type: The transport.
            sq_sig_all: Whether every send generates a completion, even without SendFlags.SIGNALED.
            srq: The shared receive queue to receive from. If given, the receive queue sizes in
                ``capabilities`` are ignored.
            send_ops: The operations you will post, if requests should be posted with the functions
                described in ibv_wr_post(3). The queue pair's methods then use these functions, and
                post either all of the given requests or none. See :func:`send_ops_of`.
            create_flags: Options that only some devices support.
            source_qpn: The queue pair number that a UD queue pair puts into its packets.
            max_tso_header: The maximum header length of a segmented send, in bytes.
            reserved: Whether the caller has already reserved the completion queue entries and
                tracks the posted work (see :meth:`QueuePair.untrack`).

        Raises:
            BusyError: If a completion queue is too small and cannot be enlarged.
            UnsupportedError: If the device does not support a feature. The message names the
                feature.
            VerbsError: If the device cannot create the queue pair. The message contains the
                requested sizes and the limits they exceed.
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
