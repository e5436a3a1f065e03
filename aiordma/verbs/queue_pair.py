"""Queue pairs: their states, and posting work to them."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Unpack

from aiordma._core.qp_states import TransitionCheck, check_transition
from aiordma._native import failure, ffi
from aiordma.errors import QPTransitionError, VerbsError

from .bring_up import BringUp
from .enums import QPAttrMask, QPState, QPType
from .posting import Posting
from .qp_attributes import QUERY_ALL, QPAttributes, QPCapabilities, QPChanges, fill
from .resource import Node
from .routes import explain
from .transport_rules import SendOps

if TYPE_CHECKING:
    from aiordma._native import handles as h

    from .completion import CompletionQueue
    from .protection_domain import ProtectionDomain


class QueuePair(BringUp, Posting):
    """A send queue and a receive queue, with the connection between them and a peer's.

    ``capabilities`` are those that the device granted. Posting and modifying are done by one
    thread at a time. Nothing here keeps posted memory alive or registered: whoever posts sees to
    it that the memory stays so until the completion has been polled, or the queue pair is closed.
    """

    def __init__(
        self,
        node: Node[h.QPPointer],
        pd: ProtectionDomain,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        attr: h.QPInitAttr,
        send_ops: SendOps = SendOps.NONE,
    ) -> None:
        super().__init__(node)
        pointer = self.pointer
        self.pd = pd
        self.context = pd.context
        self.send_cq = send_cq
        self.recv_cq = recv_cq
        self.qp_num = pointer.qp_num
        self.qp_type = QPType(pointer.qp_type)
        self.sq_sig_all = bool(attr.sq_sig_all)
        self.capabilities = QPCapabilities.read(attr)
        self.send_ops = send_ops
        extended = self.context.library.calls.ibv_qp_to_qp_ex(pointer) if send_ops else ffi.NULL
        self._begin_posting(extended, send_cq, recv_cq)
        self.context.route_events(int(ffi.cast("uintptr_t", pointer)), self)

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
        current = changes.get("cur_qp_state", self.state)
        following = changes.get("qp_state", current)
        check = check_transition(self.qp_type, current, following, mask)
        if not check.ok:
            raise QPTransitionError(
                f"{self._label()}: {check.problem()}",
                missing=check.missing,
                forbidden=check.forbidden,
            )
        try:
            self.context.library.calls.ibv_modify_qp(self.pointer, attr, mask)
        except VerbsError as error:
            raise self._refused(error, check, mask, changes) from None
        if following is QPState.RESET and self.posted_work is not None:
            self.posted_work.clear()

    def query(self) -> QPAttributes:
        """The attributes as the device has them now."""
        attr = ffi.new("struct ibv_qp_attr *")
        init = ffi.new("struct ibv_qp_init_attr *")
        self.context.library.calls.ibv_query_qp(self.pointer, attr, QUERY_ALL, init)
        return QPAttributes.read(attr)

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
            return explain(error, self.context, vector, detail)
        return failure(error.verb, error.errno or 0, detail)

    def _label(self) -> str:
        return f"QueuePair {self.qp_num:#x}"

    def _details(self) -> str:
        return f"{self.qp_type.name} {self.state.name}"
