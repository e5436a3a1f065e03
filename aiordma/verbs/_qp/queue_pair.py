"""Queue pairs, including all features except states and posting."""

from __future__ import annotations

import errno

from aiordma import verbs
from aiordma._core.arguments import instance
from aiordma._native import explained, ffi, lib
from aiordma._native import handles as h
from aiordma.errors import UnsupportedError, VerbsError

from .._cq.completion import CompletionQueue, reserve_entries
from .._device.address import GID
from .._device.enums import LinkLayer, QPType, TransportType
from .._device.resource import Node
from .multicast import MulticastAttachment
from .posted_work import PostedWork
from .posting import Posting
from .qp_attributes import ECE, QPCapabilities, RateLimit
from .shared_receive_queue import SharedReceiveQueue
from .transport_rules import SendOps

_SOFTWARE_WIRES = {
    lib.AIORDMA_WIRE_SHARED_MEMORY: "shared memory",
    lib.AIORDMA_WIRE_TCP: "tcp",
    lib.AIORDMA_WIRE_ROCE: "roce",
}
_LINK_LAYERS = {LinkLayer.ETHERNET: "roce", LinkLayer.INFINIBAND: "infiniband"}

_ECE = "enhanced connection establishment (ECE)"


def wire_of_port(layer: LinkLayer, transport: TransportType) -> str | None:
    """Return the network type of a card's port, or None if it is unknown."""
    return "iwarp" if transport is TransportType.IWARP else _LINK_LAYERS.get(layer)


class QueuePair(Posting):
    """A send queue and a receive queue that can be connected to a peer's.

    ``qp_type`` is the transport, for example RC for reliable connections. ``qp_num`` is the number
    the peer uses to address the queue pair. ``capabilities`` contains the sizes granted by the
    device. ``srq`` is the shared receive queue, or None.

    Only one thread at a time may post to a queue pair or modify it. The queue pair does not keep
    the memory of posted requests alive or registered. You must keep it yourself until you have
    polled the completion or closed the queue pair.
    """

    def __init__(
        self,
        node: Node[h.ibv_qp],
        pd: verbs.ProtectionDomain | None,
        send_cq: CompletionQueue | None,
        recv_cq: CompletionQueue | None,
        attr: h.ibv_qp_init_attr | h.ibv_qp_init_attr_ex,
        *,
        srq: SharedReceiveQueue | None = None,
        send_ops: SendOps = SendOps.NONE,
        context: verbs.Context | None = None,
        reserved: bool = False,
    ) -> None:
        """Initialize the object. Only code in this package may call the constructor.

        ``pd``, ``send_cq`` and ``recv_cq`` are None only for XRC_RECV queue pairs. ``reserved``
        means that the caller has already reserved the completion queue entries and does not need
        tracking of posted work. Otherwise, the constructor reserves entries and starts tracking.

        Raises:
            BusyError: If a completion queue does not have enough entries. The queue pair is then
                destroyed.
        """
        super().__init__(node)
        pointer = self.pointer
        context = context or (pd.context if pd is not None else None)
        assert context is not None
        self._pd, self._send_cq, self._recv_cq = pd, send_cq, recv_cq
        self.context = context
        self.srq = srq
        self.qp_num: int = pointer.qp_num
        self.qp_type: QPType = QPType(pointer.qp_type)
        self.sq_sig_all: bool = bool(attr.sq_sig_all)
        self.capabilities: QPCapabilities = QPCapabilities.read(attr)
        self.send_ops = send_ops
        if not reserved:
            receives = 0 if srq is not None else self.capabilities.max_recv_wr
            reserve_entries(node, (send_cq, self.capabilities.max_send_wr), (recv_cq, receives))
            if srq is not None and recv_cq is not None:
                srq._reserve_entries_in(recv_cq, node)
        self._init_posting()
        if not reserved:
            self._posted = PostedWork(self.capabilities.max_send_wr, context._failures)
            for cq in (send_cq, recv_cq):
                if cq is not None:
                    cq._posted_work[self.qp_num] = self._posted
        context._objects_by_address[self._addresses[0]] = self

    @property
    def send_cq(self) -> CompletionQueue:
        """The completion queue for sends. Raises the same exceptions as :attr:`pd`."""
        return self._require(self._send_cq, "completion queue")

    @property
    def recv_cq(self) -> CompletionQueue:
        """The completion queue for receives. Raises the same exceptions as :attr:`pd`."""
        return self._require(self._recv_cq, "completion queue")

    @property
    def wire(self) -> str | None:
        """The type of medium that carries the data, or None if it is not known yet.

        For cards and rdma_rxe, this is "roce", "infiniband" or "iwarp". For the embedded device, it
        is "shared memory" or "tcp", or "roce" if RoCE was selected. It is None until the embedded
        device's queue pair is connected.
        """
        context = self.context
        if context.library.offers("wire"):
            return _SOFTWARE_WIRES.get(context.library.table.device.wire(self.pointer))
        port = context.query_port(self.query().port_num or 1)
        transport = TransportType(context.pointer.device.transport_type)
        return wire_of_port(port.link_layer, transport)

    # --- multicast -------------------------------------------------------------------------

    def attach_mcast(self, gid: GID, lid: int = 0) -> MulticastAttachment:
        """Join a multicast group to receive the messages sent to it. Only for UD queue pairs.

        A member also receives its own messages to the group. To send to the group, use a
        :class:`Destination` with an address handle for the GID, the queue pair number
        ``MULTICAST_QPN``, and the members' Q_Key. See ibv_attach_mcast(3).

        Args:
            gid: An IPv6 or IPv4 multicast address, for example ``GID.from_ip("239.1.2.3")``.
            lid: The group's LID on an InfiniBand network. The subnet manager must also know about
                the new member. :meth:`ConnectionId.join_multicast` registers the member and joins.

        Raises:
            ValueError: If this is not a UD queue pair, or if the address is not a multicast
                address.
            VerbsError: If the device cannot join more groups. The message contains the device's
                limits.
        """
        context, calls, pointer = self.context, self.context.library.calls, self.pointer
        if self.qp_type is not QPType.UD:
            raise ValueError(f"only UD queue pairs can join a multicast group, not {self!r}")
        if not gid.ip.is_multicast:  # RoCE v2 uses IPv4-mapped addresses for IPv4 groups
            raise ValueError(f"{gid} is not a multicast address")
        if not 0 <= lid < 1 << 16:
            raise ValueError(f"lid must be between 0 and 65535, not {lid}")
        raw = ffi.new("union ibv_gid *")
        ffi.buffer(raw)[:] = gid.raw
        try:
            with context._requires_capability("multicast groups"):
                calls.ibv_attach_mcast(pointer, raw, lid)
        except UnsupportedError:
            raise
        except VerbsError as error:
            detail = f"cannot attach {self!r} to {gid}"
            if error.errno == errno.ENOMEM:
                limits = context.query_device()
                detail += (
                    f"; the device supports {limits.max_mcast_grp} groups with "
                    f"{limits.max_mcast_qp_attach} queue pairs each"
                )
            raise explained(error, detail) from None

        def detach(raw: h.ibv_gid) -> None:
            calls.ibv_detach_mcast(pointer, raw, lid)

        node = Node("MulticastAttachment", raw, detach, [self.node])
        return MulticastAttachment(node, self, gid, lid)

    # --- beyond the standard ---------------------------------------------------------------

    def set_ece(self, ece: ECE) -> None:
        """Set the ECE options for the next state transition. See ibv_set_ece(3).

        Raises:
            UnsupportedError: If the device does not support these options.
        """
        packed = instance("ece", ece, ECE, "an ECE, such as the result of query_ece()").packed()
        with self.context._requires_capability(_ECE):
            self.context.library.calls.ibv_set_ece(self.pointer, packed)

    def query_ece(self) -> ECE:
        """Return the ECE options supported by the device or, from state RTR on, in use.

        If ``options`` is 0, no options are supported or in use. See ibv_query_ece(3).

        Raises:
            UnsupportedError: If the device does not support ECE.
        """
        ece = ffi.new("struct ibv_ece *")
        with self.context._requires_capability(_ECE):
            self.context.library.calls.ibv_query_ece(self.pointer, ece)
        return ECE.read(ece)

    def modify_rate_limit(self, limit: RateLimit) -> None:
        """Limit the sending rate of a queue pair in the RTS state. See ibv_modify_qp_rate_limit(3).

        Raises:
            UnsupportedError: If the device cannot limit the rate of queue pairs of this type.
        """
        packed = instance(
            "limit", limit, RateLimit, "a RateLimit, such as RateLimit(1000)"
        ).packed()
        with self.context._requires_capability(f"rate limits of {self.qp_type.name} queue pairs"):
            self.context.library.calls.ibv_modify_qp_rate_limit(self.pointer, packed)

    def _details(self) -> str:
        return f"{self.qp_type.name} {self.state.name}"
