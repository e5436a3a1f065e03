"""Protection domains: memory and queue pairs that may be used together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiordma._core.arguments import choice
from aiordma._native import explained, ffi
from aiordma.errors import UnsupportedError, VerbsError

from .._memory.memory_window import MemoryWindow, offers_windows
from .._memory.registration import Registration
from .._qp.qp_attributes import QPCapabilities
from .._qp.qp_creation import QPOptions, create_qp
from .._qp.queue_pair import QueuePair
from .._qp.shared_receive_queue import SharedReceiveQueue, create_srq
from .._qp.transport_rules import SendOps
from .address import AddressVector, vector_fields
from .address_handle import AddressHandle, vector_from_wc
from .enums import MWType, QPCreateFlags, QPType
from .resource import Node
from .route_lookup import describe

if TYPE_CHECKING:
    from aiordma._native import handles as h

    from .._cq.completion import CompletionQueue
    from .._cq.work_completion import WorkCompletion
    from .._qp.xrc import XRCDomain
    from .context import Context


class ProtectionDomain(Registration):
    """Memory regions and queue pairs made here may be used together, and with no others.

    Making children may be done from any thread.
    """

    def __init__(
        self, context: Context, pointer: h.ibv_pd, parents: Sequence[Node[Any]] = ()
    ) -> None:
        self.context = context
        destroy = context.library.calls.ibv_dealloc_pd
        super().__init__(Node("ProtectionDomain", pointer, destroy, [*parents] or [context.node]))

    @property
    def _domain(self) -> ProtectionDomain:
        return self

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
            raise UnsupportedError(what, device=context.name, verb="ibv_alloc_mw")
        try:
            pointer = context.library.calls.ibv_alloc_mw(self.pointer, mw_type)
        except VerbsError as error:
            raise explained(error, f"{what} on {context.name}") from None
        return MemoryWindow(self, pointer, mw_type)

    def create_srq(
        self,
        max_wr: int,
        max_sge: int = 1,
        *,
        xrcd: XRCDomain | None = None,
        cq: CompletionQueue | None = None,
    ) -> SharedReceiveQueue:
        """Make a shared receive queue for ``max_wr`` receives of ``max_sge`` pieces each.

        The device may grant more. The receives' memory must be of this protection domain; that of
        the queue pairs may be another. With ``xrcd`` it is one for extended reliable connections,
        whose completions go to ``cq``. ValueError for sizes that the device does not have,
        UnsupportedError when it has no shared receive queues; ibv_create_srq(3).
        """
        return create_srq(self, max_wr, max_sge, xrcd, cq)

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
            QPOptions(
                send_ops=send_ops,
                create_flags=create_flags,
                source_qpn=source_qpn,
                max_tso_header=max_tso_header,
            ),
            reserved,
        )

    def _label(self) -> str:
        return f"ProtectionDomain of {self.context.name}"
