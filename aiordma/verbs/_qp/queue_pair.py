"""Queue pairs: their states, and posting work to them."""

from __future__ import annotations

import errno
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar, Unpack

from aiordma._core.arguments import choice, instance
from aiordma._core.qp_states import TRANSITIONS, TransitionCheck, check_transition
from aiordma._native import errno_of, explained, failure, ffi, lib
from aiordma.errors import QPTransitionError, UnsupportedError, VerbsError

from .._cq.completion import hold_room
from .._device.enums import QPAttrMask, QPState, QPType
from .._device.resource import Node
from .._device.route_lookup import describe
from .bring_up import BringUp
from .multicast import MulticastAttachment, attach
from .posting import Posting
from .qp_attributes import QUERY_ALL, QPAttributes, QPCapabilities, QPChanges, fill, filled
from .qp_options import ECE, RateLimit
from .transport_rules import SendOps
from .wire import wire

if TYPE_CHECKING:
    from aiordma._native import handles as h

    from .._cq.completion import CompletionQueue
    from .._device.address import GID
    from .._device.context import Context
    from .._device.protection_domain import ProtectionDomain
    from .shared_receive_queue import SharedReceiveQueue

T = TypeVar("T")

# What the three steps to RTS take, of those that are connected to a peer: what they need.
_MASKS_UP = {
    qp_type: tuple(
        TRANSITIONS[qp_type, current, following].required
        for current, following in pairwise((QPState.RESET, QPState.INIT, QPState.RTR, QPState.RTS))
    )
    for qp_type in (QPType.RC, QPType.UC, QPType.XRC_SEND, QPType.XRC_RECV)
}


class QueuePair(BringUp, Posting):
    """A send queue and a receive queue, with the connection between them and a peer's.

    ``qp_type`` is its transport and ``qp_num`` its number, which the peer needs. ``capabilities``
    are those that the device granted. ``srq`` is the shared receive queue, or None. Posting and
    modifying are done by one thread at a time. Nothing here keeps posted memory alive or
    registered: the caller keeps it so until the completion has been polled, or the queue pair is
    closed.
    """

    def __init__(
        self,
        node: Node[h.ibv_qp],
        pd: ProtectionDomain | None,
        send_cq: CompletionQueue | None,
        recv_cq: CompletionQueue | None,
        attr: h.ibv_qp_init_attr | h.ibv_qp_init_attr_ex,
        *,
        srq: SharedReceiveQueue | None = None,
        send_ops: SendOps = SendOps.NONE,
        context: Context | None = None,
        reserved: bool = False,
    ) -> None:
        """For this package. Only the receiving side of XRC has none of the first three.

        Room for its completions is set aside, and what is posted is tracked, unless
        ``reserved``; BusyError, and it is destroyed again, when there is no room.
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
            hold_room(node, (send_cq, self.capabilities.max_send_wr), (recv_cq, receives))
            if srq is not None and recv_cq is not None:
                try:
                    srq._complete_at(recv_cq)
                except BaseException:
                    node.close()
                    raise
        extended = context.library.calls.ibv_qp_to_qp_ex(pointer) if send_ops else ffi.NULL
        self._begin_posting(pointer, extended)
        if not reserved:
            self._keep_account(send_cq, recv_cq)
        context._route_events(self._addresses[0], self)

    @property
    def pd(self) -> ProtectionDomain:
        """Where it was made. ValueError for the receiving side of XRC, which has none."""
        return self._own(self._pd, "protection domain")

    @property
    def send_cq(self) -> CompletionQueue:
        """Where sends complete; errors as of :attr:`pd`."""
        return self._own(self._send_cq, "completion queue")

    @property
    def recv_cq(self) -> CompletionQueue:
        """Where receives complete; errors as of :attr:`pd`."""
        return self._own(self._recv_cq, "completion queue")

    def _own(self, there: T | None, what: str) -> T:
        if there is None:
            raise ValueError(f"{self!r} has no {what}: it is the receiving side of XRC")
        return there

    # --- states ----------------------------------------------------------------------------

    @property
    def state(self) -> QPState:
        """The state that it was last put into, by this or by the connection manager.

        A device that puts a queue pair into ERR by itself may not show here: ``query()`` asks.
        """
        return QPState(self.pointer.state)

    def modify(self, **changes: Unpack[QPChanges]) -> None:
        """Change attributes, most often with ``qp_state``; timers are seconds.

        QPTransitionError, before the device is asked, when the state table has no such
        transition, or attributes are missing or forbidden; VerbsError when the device refuses,
        naming the transition. Source: IBTA volume 1, clause 11.2.5.2; ibv_modify_qp(3).
        """
        attr, mask = fill(changes)
        for name in ("qp_state", "cur_qp_state"):
            if name in changes:
                changes[name] = choice(name, changes[name], QPState)
        current = changes.get("cur_qp_state", self.state)
        following = changes.get("qp_state", current)
        check = self._checked(current, following, mask)
        try:
            self.context.library.calls.ibv_modify_qp(self.pointer, attr, mask)
        except VerbsError as error:
            raise self._refused(error, check, mask, changes) from None
        if self._posted is not None:
            if following is QPState.RESET:
                self._posted.clear()
            elif following is QPState.RTS:
                self._posted.resume()

    def _checked(self, current: QPState, following: QPState, mask: int) -> TransitionCheck:
        check = check_transition(self.qp_type, current, following, mask)
        if not check.ok:
            raise QPTransitionError(
                f"{self._label()}: {check.problem()}",
                missing=check.missing,
                forbidden=check.forbidden,
            )
        return check

    def _bring_up(self, changes: QPChanges) -> None:
        attr = filled(changes)
        masks = _MASKS_UP[self.qp_type]
        pointer = self.pointer
        if pointer.state != QPState.RESET:
            self._checked(QPState(pointer.state), QPState.INIT, masks[0])
        code = lib.aiordma_bring_up(self.context.library.table, pointer, attr, *masks)
        if code:
            step = QPState(attr.qp_state)
            mask = masks[step - QPState.INIT]
            check = check_transition(self.qp_type, QPState(step - 1), step, mask)
            error = failure("ibv_modify_qp", errno_of(code))
            raise self._refused(error, check, mask, changes if step is QPState.RTR else {})

    @property
    def wire(self) -> str | None:
        """The medium of its bytes: "roce", "infiniband" or "iwarp" with cards and rdma_rxe.

        With the embedded device "shared memory" or "tcp", and None while it is not connected.
        """
        return wire(self)

    def query(self) -> QPAttributes:
        """The attributes as the device has them now."""
        attr = ffi.new("struct ibv_qp_attr *")
        init = ffi.new("struct ibv_qp_init_attr *")
        self.context.library.calls.ibv_query_qp(self.pointer, attr, QUERY_ALL, init)
        return QPAttributes.read(attr)

    # --- multicast -------------------------------------------------------------------------

    def attach_mcast(self, gid: GID, lid: int = 0) -> MulticastAttachment:
        """Receive what is sent to a group from now on: ibv_attach_mcast(3). UD only.

        ``gid`` is an IPv6 multicast address, or an IPv4 one (``GID.from_ip("239.1.2.3")``);
        ``lid`` the group's LID in an InfiniBand network, whose subnet must know of the member
        (:meth:`ConnectionId.join_multicast` does both). A queue pair that is a member gets
        its own messages as well. To send, give :class:`Destination` an address handle to the
        GID, ``MULTICAST_QPN`` and the members' Q_Key. ValueError for another type of queue pair
        or an address of no group; VerbsError, with the device's limits, when it has no room.
        """
        return attach(self, gid, lid)

    # --- beyond the standard ---------------------------------------------------------------

    def set_ece(self, ece: ECE) -> None:
        """Set the options for the next transition to agree on with the peer: ibv_set_ece(3).

        UnsupportedError where the device has no such options.
        """
        packed = instance("ece", ece, ECE, "an ECE, as of query_ece()").packed()
        try:
            self.context.library.calls.ibv_set_ece(self.pointer, packed)
        except UnsupportedError as error:
            raise self._lacks("enhanced connection establishment (ECE)", error) from None

    def query_ece(self) -> ECE:
        """The options that the device offers, or after RTR those in use; 0: none.

        Source: ibv_query_ece(3). UnsupportedError where the device has no such options.
        """
        ece = ffi.new("struct ibv_ece *")
        try:
            self.context.library.calls.ibv_query_ece(self.pointer, ece)
        except UnsupportedError as error:
            raise self._lacks("enhanced connection establishment (ECE)", error) from None
        return ECE.read(ece)

    def modify_rate_limit(self, limit: RateLimit) -> None:
        """Limit its sending rate from now on, in RTS: ibv_modify_qp_rate_limit(3).

        UnsupportedError where the device cannot pace queue pairs of this type.
        """
        packed = instance("limit", limit, RateLimit, "a RateLimit, as RateLimit(1000)").packed()
        try:
            self.context.library.calls.ibv_modify_qp_rate_limit(self.pointer, packed)
        except UnsupportedError as error:
            raise self._lacks(f"rate limits of {self.qp_type.name} queue pairs", error) from None

    def _lacks(self, capability: str, error: UnsupportedError) -> UnsupportedError:
        return UnsupportedError(
            capability, device=self.context.name, verb=error.verb, errno=error.errno or 0
        )

    def _refused(
        self, error: VerbsError, check: TransitionCheck, mask: QPAttrMask, changes: QPChanges
    ) -> VerbsError:
        detail = f"{self._label()}: {check.qp_type.name} {check.current.name} -> {check.next.name}"
        try:
            actual = self.query().qp_state
        except VerbsError:
            actual = check.current
        if actual is not check.current:
            detail += f"; the device has it in {actual.name}"
        if error.errno == errno.EINVAL and not mask & QPAttrMask.AV:
            detail += f"; attributes: {mask!r}"
        vector = changes.get("ah_attr")
        if vector is not None:
            detail += f" {describe(self.context, vector, error)}"
        return explained(error, detail)

    def _label(self) -> str:
        return f"QueuePair {self.qp_num:#x}"

    def _details(self) -> str:
        return f"{self.qp_type.name} {self.state.name}"
