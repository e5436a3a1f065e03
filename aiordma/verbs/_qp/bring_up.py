"""Queue pair states, and the transitions that connect a queue pair to a peer's endpoint."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar, Unpack, cast

from aiordma import verbs
from aiordma._core.arguments import choice, instance
from aiordma._core.handshake_layout import Endpoint
from aiordma._core.qp_states import TRANSITIONS, TransitionCheck, check_transition
from aiordma._native import errno_of, explained, failure, lib
from aiordma._native import handles as h
from aiordma.errors import QPTransitionError, VerbsError

from .._device.address import AddressVector, GIDEntry
from .._device.address_handle import Destination, PathKeywords, vector_to
from .._device.enums import MTU, AccessFlags, GIDType, LinkLayer, QPAttrMask, QPState, QPType
from .._device.resource import Resource
from .._device.route_lookup import active_port, describe_route
from .posted_work import PostedWork
from .qp_attributes import MASK_OF_FIELD, QPAttributes, QPChanges, attr_and_mask, attr_from, query

T = TypeVar("T")

# The attributes required by each of the three transitions from RESET to RTS, by queue pair type.
_REQUIRED_MASKS = {
    qp_type: tuple(
        TRANSITIONS[qp_type, current, following].required
        for current, following in pairwise((QPState.RESET, QPState.INIT, QPState.RTR, QPState.RTS))
    )
    for qp_type in QPType
}

# The default limit on outstanding reads and atomics. The value is an estimate. Higher limits have
# not been measured.
_DEFAULT_RD_ATOMIC = 16

# The queue pair type that each type connects to.
_PEER_TYPES = {
    QPType.RC: QPType.RC,
    QPType.UC: QPType.UC,
    QPType.XRC_SEND: QPType.XRC_RECV,
    QPType.XRC_RECV: QPType.XRC_SEND,
}
# Requesters wait for acknowledgements and retransmit. Responders serve reads and atomics.
_REQUESTERS = (QPType.RC, QPType.XRC_SEND)
_RESPONDERS = (QPType.RC, QPType.XRC_RECV)

# Random Q_Keys have 31 bits, because bit 31 marks privileged keys (IBTA volume 1, clause 10.2.5).
_QKEY_BITS = 31

_PSN_BITS = 24

# perftest's defaults, converted to seconds. It sets the ACK timeout to 14, which means
# 4.096 us * 2^14, and the RNR timer to 12, which means 0.64 ms.
ACK_TIMEOUT = 0.067
RNR_TIMER = 0.00064


def _random_bits(count: int) -> int:
    return int.from_bytes(os.urandom(4)) >> (32 - count)


class BringUp(Resource[h.ibv_qp]):
    """The base class of :class:`QueuePair` that implements state transitions."""

    context: verbs.Context
    qp_num: int
    qp_type: QPType
    _pd: verbs.ProtectionDomain | None
    _posted: PostedWork | None
    """The tracked work, or None if the queue pair does not track its work."""

    @property
    def pd(self) -> verbs.ProtectionDomain:
        """The protection domain the queue pair was created in.

        Raises:
            ValueError: If this is an XRC_RECV queue pair, which has no protection domain.
        """
        return self._require(self._pd, "protection domain")

    def _require(self, value: T | None, noun: str) -> T:
        if value is None:
            raise ValueError(f"{self!r} has no {noun}, because it is an XRC_RECV queue pair")
        return value

    def endpoint(
        self,
        gid: GIDEntry | None = None,
        *,
        port_num: int = 1,
        psn: int | None = None,
        qkey: int | None = None,
        max_rd_atomic: int | None = None,
        max_dest_rd_atomic: int | None = None,
    ) -> Endpoint:
        """Return the data a peer needs to connect to this queue pair.

        To send the endpoint to the peer, convert it to bytes with its ``pack()`` method.

        Args:
            gid: The local address's GID table entry. Defaults to ``context.choose_gid(port_num)``.
            port_num: The port, if ``gid`` is not given.
            psn: The first packet sequence number. Random by default.
            qkey: The Q_Key of a datagram queue pair. Random by default.
            max_rd_atomic: The maximum number of outstanding reads and atomics started by this side.
                Defaults to the device's maximum or 16, whichever is smaller.
            max_dest_rd_atomic: The maximum number of outstanding reads and atomics started by the
                peer. Defaults to the device's maximum or 16, whichever is smaller.

        Raises:
            VerbsError: With ENETDOWN, if the port is not active.
        """
        if gid is not None:
            instance(
                "gid", gid, GIDEntry, "a GIDEntry (from Context.query_gid, find_gid or choose_gid)"
            )
            port_num = gid.port_num
        port = active_port(self.context, port_num)
        ethernet = port.link_layer == LinkLayer.ETHERNET
        if gid is None:
            gid = self.context.choose_gid(port_num)
        if qkey is None:
            qkey = _random_bits(_QKEY_BITS) if self.qp_type is QPType.UD else 0
        limits = self.context.query_device()
        if max_rd_atomic is None:
            is_requester = self.qp_type in _REQUESTERS
            max_rd_atomic = (
                min(limits.max_qp_init_rd_atom, _DEFAULT_RD_ATOMIC) if is_requester else 0
            )
        if max_dest_rd_atomic is None:
            is_responder = self.qp_type in _RESPONDERS
            max_dest_rd_atomic = (
                min(limits.max_qp_rd_atom, _DEFAULT_RD_ATOMIC) if is_responder else 0
            )
        return Endpoint(
            gid=gid.gid.raw,
            qp_num=self.qp_num,
            psn=_random_bits(_PSN_BITS) if psn is None else psn,
            lid=port.lid,
            mtu=port.active_mtu,
            qp_type=self.qp_type,
            is_global=ethernet,
            is_roce_v1=gid.gid_type is GIDType.ROCE_V1,
            qkey=qkey,
            max_rd_atomic=max_rd_atomic,
            max_dest_rd_atomic=max_dest_rd_atomic,
        )

    def connect(
        self,
        local: Endpoint,
        remote: Endpoint,
        *,
        access: AccessFlags = AccessFlags.NONE,
        timeout: float = ACK_TIMEOUT,
        retry_cnt: int = 7,
        rnr_retry: int = 7,
        min_rnr_timer: float = RNR_TIMER,
        max_rd_atomic: int | None = None,
        max_dest_rd_atomic: int | None = None,
        pkey_index: int = 0,
        **path: Unpack[PathKeywords],
    ) -> None:
        """Connect an RC, UC or XRC queue pair to a peer, moving the queue pair from RESET to RTS.

        The call does not wait for the peer. Post receives before telling the peer to send.

        Args:
            local: The result of :meth:`endpoint` on this side.
            remote: The result of :meth:`endpoint` on the peer's side. The connection uses the
                smaller of the two path MTUs.
            access: The peer's rights to local memory. An operation must be allowed both by these
                rights and by those of the memory region. By default, no remote access is allowed.
            timeout: The time in seconds to wait for an acknowledgement before retransmitting a
                packet.
            retry_cnt: The maximum number of retransmissions.
            rnr_retry: The maximum number of retries while the peer has not posted a receive; 7
                means no limit.
            min_rnr_timer: The time in seconds the peer must wait before retrying while this side
                has not posted a receive.
            max_rd_atomic: The maximum number of outstanding reads and atomics started by this side.
                Defaults to the maximum supported by both sides.
            max_dest_rd_atomic: The maximum number of outstanding reads and atomics started by the
                peer. Defaults to the maximum supported by both sides.
            pkey_index: The P_Key's index.
            **path: Optional fields of the route.

        Raises:
            ValueError: If the endpoints do not match each other or this queue pair.
            VerbsError: With ENETDOWN, if the port is not active. This is checked before the queue
                pair is modified. With other error codes, if the device rejects a transition. If the
                peer cannot be reached, the message contains both GIDs and the local GID's index.
        """
        if self.qp_type not in _PEER_TYPES:
            raise ValueError(
                f"connect() requires an RC, UC or XRC queue pair, not {self.qp_type.name};"
                " use start() for a UD queue pair"
            )
        for name, value in (("local", local), ("remote", remote)):
            hint = f"write Endpoint.unpack({name})" if isinstance(value, bytes) else ""
            instance(name, value, Endpoint, "an Endpoint (from QueuePair.endpoint)", hint)
        if remote.qp_type != _PEER_TYPES[self.qp_type]:
            raise ValueError(
                f"cannot connect {self!r}: the peer's queue pair must be of type"
                f" {_PEER_TYPES[self.qp_type].name}, not {QPType(remote.qp_type).name}"
            )
        vector = self._checked_route(self.connect, local, remote, path)
        if max_rd_atomic is None:
            max_rd_atomic = min(local.max_rd_atomic, remote.max_dest_rd_atomic)
        if max_dest_rd_atomic is None:
            max_dest_rd_atomic = min(local.max_dest_rd_atomic, remote.max_rd_atomic)
        self._bring_up(
            {
                "port_num": vector.port_num,
                "pkey_index": pkey_index,
                "qp_access_flags": access,
                "ah_attr": vector,
                "dest_qp_num": remote.qp_num,
                "rq_psn": remote.psn,
                "path_mtu": cast(MTU, min(local.mtu, remote.mtu)),
                "max_dest_rd_atomic": max_dest_rd_atomic,
                "min_rnr_timer": min_rnr_timer,
                "sq_psn": local.psn,
                "timeout": timeout,
                "retry_cnt": retry_cnt,
                "rnr_retry": rnr_retry,
                "max_rd_atomic": max_rd_atomic,
            }
        )

    def start(self, local: Endpoint, *, pkey_index: int = 0) -> None:
        """Move a datagram queue pair from RESET to RTS, so that it can send and receive.

        The queue pair uses the Q_Key and the PSN from ``local``, which is the result of
        :meth:`endpoint`. Send this endpoint to peers so that they can send to the queue pair. See
        :meth:`destination`.
        """
        if self.qp_type is not QPType.UD:
            raise ValueError(
                f"start() requires a UD queue pair, not {self.qp_type.name}; use connect() for an"
                " RC, UC or XRC queue pair"
            )
        vector = self._checked_route(self.start, local, local, {})
        self.to_init(port_num=vector.port_num, pkey_index=pkey_index, qkey=local.qkey)
        self.to_rtr()
        self.to_rts(sq_psn=local.psn)

    def destination(
        self, local: Endpoint, remote: Endpoint, **path: Unpack[PathKeywords]
    ) -> Destination:
        """Return a destination for sending datagrams to ``remote``, with a new address handle.

        Close the address handle, ``destination.ah``, once the last request using it has completed.
        If you do not, it is closed together with the protection domain.

        Raises:
            ValueError: If the endpoints do not match each other or this queue pair.
            VerbsError: If the port is not active or the peer cannot be reached, as in
                :meth:`connect`.
        """
        vector = self._checked_route(self.destination, local, remote, path)
        if remote.qp_type != QPType.UD:
            raise ValueError(
                f"the peer's queue pair must be of type UD, not {QPType(remote.qp_type).name}"
            )
        return Destination(self.pd.create_ah(vector), remote.qp_num, remote.qkey)

    def _checked_route(
        self, method: Callable[..., object], local: Endpoint, remote: Endpoint, path: PathKeywords
    ) -> AddressVector:
        """Return the route between the endpoints, after checking the arguments of ``method``."""
        for name in path.keys() - PathKeywords.__annotations__.keys():
            known = ", ".join([*(method.__kwdefaults__ or ()), *PathKeywords.__annotations__])
            raise TypeError(
                f"{method.__name__}() got an unexpected keyword argument {name!r}: expected {known}"
            )
        if local.qp_num != self.qp_num:
            raise ValueError(
                f"local must be the endpoint of {self!r}, not of queue pair {local.qp_num:#x}"
            )
        vector = vector_to(self.context, local, remote, **path)
        active_port(self.context, vector.port_num)
        return vector

    # --- step by step ----------------------------------------------------------------------

    def _transition(self, next_state: QPState, attributes: QPChanges) -> None:
        """Make one transition towards RTS, dropping the attributes it does not require."""
        required_mask = _REQUIRED_MASKS[self.qp_type][next_state - QPState.INIT]
        changes = {
            name: value for name, value in attributes.items() if MASK_OF_FIELD[name] & required_mask
        }
        changes["qp_state"] = next_state
        self.modify(**cast(QPChanges, changes))

    def to_init(
        self,
        *,
        port_num: int = 1,
        pkey_index: int = 0,
        access: AccessFlags = AccessFlags.NONE,
        qkey: int = 0,
    ) -> None:
        """Move from RESET to INIT, in which receives can be posted.

        ``qkey`` is only used by UD queue pairs. A raw packet queue pair only uses ``port_num``.
        """
        self._transition(
            QPState.INIT,
            {
                "port_num": port_num,
                "pkey_index": pkey_index,
                "qp_access_flags": access,
                "qkey": qkey,
            },
        )

    def to_rtr(
        self,
        ah_attr: AddressVector | None = None,
        *,
        dest_qp_num: int = 0,
        rq_psn: int = 0,
        path_mtu: MTU = MTU.MTU_1024,
        max_dest_rd_atomic: int = 1,
        min_rnr_timer: float = RNR_TIMER,
    ) -> None:
        """Move from INIT to RTR, ready to receive from the given peer.

        A UD queue pair does not need any of the arguments.
        """
        changes: QPChanges = {
            "dest_qp_num": dest_qp_num,
            "rq_psn": rq_psn,
            "path_mtu": path_mtu,
            "max_dest_rd_atomic": max_dest_rd_atomic,
            "min_rnr_timer": min_rnr_timer,
        }
        if ah_attr is not None:
            changes["ah_attr"] = ah_attr
        self._transition(QPState.RTR, changes)

    def to_rts(
        self,
        *,
        sq_psn: int = 0,
        timeout: float = ACK_TIMEOUT,
        retry_cnt: int = 7,
        rnr_retry: int = 7,
        max_rd_atomic: int = 1,
    ) -> None:
        """Move from RTR to RTS, ready to send."""
        self._transition(
            QPState.RTS,
            {
                "sq_psn": sq_psn,
                "timeout": timeout,
                "retry_cnt": retry_cnt,
                "rnr_retry": rnr_retry,
                "max_rd_atomic": max_rd_atomic,
            },
        )

    def to_sqd(self, *, notify: bool = False) -> None:
        """Move from RTS to SQD, which drains the send queue.

        Requests in progress are completed. Requests posted in this state wait until :meth:`resume`
        is called. See IBTA volume 1, clause 10.3.1.5.

        Args:
            notify: Whether to generate an SQ_DRAINED asynchronous event once the send queue is
                drained. You can also check ``query().sq_draining``.
        """
        changes: QPChanges = {"qp_state": QPState.SQD}
        if notify:
            changes["en_sqd_async_notify"] = True
        self.modify(**changes)

    def resume(self) -> None:
        """Return to RTS and process the requests waiting in the send queue.

        The current state must be SQD or, for datagrams, SQE.
        """
        self.modify(qp_state=QPState.RTS)

    def to_error(self) -> None:
        """Move to ERR. All posted requests are flushed and complete with WR_FLUSH_ERR."""
        self.modify(qp_state=QPState.ERR)

    def to_reset(self) -> None:
        """Move to RESET. All posted requests are discarded without a completion."""
        self.modify(qp_state=QPState.RESET)

    # --- states ----------------------------------------------------------------------------

    @property
    def state(self) -> QPState:
        """The state most recently requested by this program or the connection manager.

        A device can also move a queue pair to ERR on its own. Only ``query()`` shows this.
        """
        return QPState(self.pointer.state)

    def modify(self, **changes: Unpack[QPChanges]) -> None:
        """Change attributes, usually together with the state (``qp_state``). Times are in seconds.

        See ibv_modify_qp(3) and IBTA volume 1, clause 11.2.5.2.

        Raises:
            QPTransitionError: If the transition does not exist, requires a missing attribute, or
                forbids a given attribute. aiordma checks this before calling the device.
            VerbsError: If the device rejects the change. The message names the transition.
        """
        attr, mask = attr_and_mask(changes)
        for name in ("qp_state", "cur_qp_state"):
            if name in changes:
                changes[name] = choice(name, changes[name], QPState)
        current = changes.get("cur_qp_state", self.state)
        next_state = changes.get("qp_state", current)
        check = self._check_transition(current, next_state, mask)
        try:
            self.context.library.calls.ibv_modify_qp(self.pointer, attr, mask)
        except VerbsError as error:
            raise self._transition_error(error, check, mask, changes) from None
        if self._posted is not None:
            if next_state is QPState.RESET:
                self._posted.clear()
            elif next_state is QPState.RTS:
                self._posted.resume()

    def _check_transition(
        self, current: QPState, next_state: QPState, mask: int
    ) -> TransitionCheck:
        check = check_transition(self.qp_type, current, next_state, mask)
        if not check.ok:
            raise QPTransitionError(
                f"{self._label()}: {check.problem()}",
                missing=check.missing,
                forbidden=check.forbidden,
            )
        return check

    def _bring_up(self, changes: QPChanges) -> None:
        """Move from RESET to RTS, passing each transition the attributes it requires."""
        attr = attr_from(changes)
        masks = _REQUIRED_MASKS[self.qp_type]
        pointer = self.pointer
        if pointer.state != QPState.RESET:  # raises unless INIT can be reached from this state
            self._check_transition(QPState(pointer.state), QPState.INIT, masks[0])
        code = lib.aiordma_bring_up(self.context.library.table, pointer, attr, *masks)
        if code:
            failed_state = QPState(attr.qp_state)  # the state that could not be reached
            mask = masks[failed_state - QPState.INIT]
            check = check_transition(self.qp_type, QPState(failed_state - 1), failed_state, mask)
            error = failure("ibv_modify_qp", errno_of(code))
            # Only the transition to RTR uses the route, so only its error describes the route.
            route: QPChanges = changes if failed_state is QPState.RTR else {}
            raise self._transition_error(error, check, mask, route)

    def _transition_error(
        self, error: VerbsError, check: TransitionCheck, mask: QPAttrMask, changes: QPChanges
    ) -> VerbsError:
        """Return the error of a failed transition, with its states and likely reasons.

        ``changes`` contains the route if the transition uses it.
        """
        states = f"from {check.current.name} to {check.next.name}"
        detail = f"cannot change {self._label()} ({check.qp_type.name}) {states}"
        try:
            actual = self.query().qp_state
        except VerbsError:
            actual = check.current
        if actual is not check.current:
            detail += f"; the device reports the state {actual.name}"
        # If the transition sets the route, the more likely reason is the route, described below.
        if error.errno == errno.EINVAL and not mask & QPAttrMask.AV:
            detail += f"; attributes: {mask!r}"
        vector = changes.get("ah_attr")
        if vector is not None:
            detail += f"; the route goes {describe_route(self.context, vector, error)}"
        return explained(error, detail)

    def query(self) -> QPAttributes:
        """Query the current attributes from the device."""
        return query(self.context, self.pointer)

    def _label(self) -> str:
        return f"QueuePair {self.qp_num:#x}"
