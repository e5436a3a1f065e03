"""Queue pairs: their states, and posting work to them."""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, Unpack

from aiordma._core.qp_states import TransitionCheck, check_transition
from aiordma._native import RequestArray, failure, ffi, lib
from aiordma.errors import PostError, QPTransitionError, UnsupportedError, VerbsError

from .bring_up import BringUp
from .enums import QPAttrMask, QPState, QPType, WROpcode
from .qp_attributes import QUERY_ALL, QPAttributes, QPCapabilities, QPChanges, fill
from .resource import Node
from .work_request import (
    ALLOWED,
    ReceiveWorkRequest,
    ScatterGatherElement,
    SendWorkRequest,
    pack_recvs,
    pack_sends,
)

if TYPE_CHECKING:
    from aiordma._native import handles as h

    from .completion import CompletionQueue
    from .protection_domain import ProtectionDomain

_post_send_one = lib.aiordma_post_send_one
_post_recv_one = lib.aiordma_post_recv_one
_U64_MAX = (1 << 64) - 1


class QueuePair(BringUp):
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
        self._allowed = ALLOWED[self.qp_type]
        self._room: RequestArray | None = None
        self._room_size = (0, 0)
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
        vector = changes.get("ah_attr")
        if vector is not None and vector.dgid is not None:
            detail += (
                f" to {vector.dgid} by GID index {vector.sgid_index} of port {vector.port_num}"
                f" of {self.context.name}"
            )
        try:
            actual = self.query().qp_state
        except VerbsError:
            actual = check.current
        if actual is not check.current:
            detail += f"; the device has it in {actual.name}"
        if error.errno == errno.EINVAL and not mask & QPAttrMask.AV:
            detail += f"; attributes: {mask!r}"
        return failure(error.verb, error.errno or 0, detail)

    # --- posting ---------------------------------------------------------------------------

    def post_send_one(
        self,
        wr_id: int,
        opcode: int,
        send_flags: int,
        addr: int,
        length: int,
        lkey: int,
        remote_addr: int = 0,
        rkey: int = 0,
        imm_data: int = 0,
    ) -> None:
        """Post one work request of one piece of memory (none when ``length`` is 0).

        The fast path: plain numbers, no objects. As :meth:`post_send` otherwise.
        """
        if not self._allowed >> opcode & 1:
            self._refuse_opcode(opcode)
        if (pointer := self._node.pointer) is None:
            raise self.closed_error()
        try:
            code = _post_send_one(
                pointer, wr_id, opcode, send_flags, imm_data, addr, length, lkey, remote_addr, rkey
            )
        except OverflowError as error:
            raise self._bad_number(error) from None
        if code:
            raise self._post_error("ibv_post_send", code, 0)

    def post_recv_one(self, wr_id: int, addr: int, length: int, lkey: int) -> None:
        """Post one receive of one piece of memory (none when ``length`` is 0): the fast path."""
        if (pointer := self._node.pointer) is None:
            raise self.closed_error()
        try:
            code = _post_recv_one(pointer, wr_id, addr, length, lkey)
        except OverflowError as error:
            raise self._bad_number(error) from None
        if code:
            raise self._post_error("ibv_post_recv", code, 0)

    def post_send_atomic(
        self,
        wr_id: int,
        opcode: int,
        send_flags: int,
        addr: int,
        lkey: int,
        remote_addr: int,
        rkey: int,
        compare_add: int,
        swap: int = 0,
    ) -> None:
        """Post one atomic. The 8 bytes at ``addr`` receive the old value.

        Numbers are taken modulo 2^64, so that -1 can be added.
        """
        sge = ScatterGatherElement(addr, 8, lkey)
        wr = SendWorkRequest(
            wr_id,
            opcode,
            (sge,),
            send_flags,
            remote_addr=remote_addr,
            rkey=rkey,
            compare_add=compare_add & _U64_MAX,
            swap=swap & _U64_MAX,
        )
        self.post_send((wr,))

    def post_send(self, requests: Sequence[SendWorkRequest]) -> None:
        """Post work requests in order, in one crossing.

        PostError tells by ``bad_index`` the first that was not posted (ENOMEM: the queue is
        full); those before it are. UnsupportedError, with nothing posted, when the transport
        lacks an operation.
        """
        for wr in requests:
            if not self._allowed >> wr.opcode & 1:
                self._refuse_opcode(wr.opcode)
        room = self._request_room(len(requests), sum(len(wr.sges) for wr in requests))
        pointer = self.pointer
        try:
            pack_sends(room, requests)
        except struct.error as error:
            raise self._bad_number(error) from None
        code = lib.aiordma_post_send(pointer, room.sends, len(requests), room.sges, room.posted)
        if code:
            raise self._post_error("ibv_post_send", code, room.posted[0])

    def post_recv(self, requests: Sequence[ReceiveWorkRequest]) -> None:
        """Post receives in order, in one crossing; errors as of :meth:`post_send`."""
        room = self._request_room(len(requests), sum(len(wr.sges) for wr in requests))
        pointer = self.pointer
        try:
            pack_recvs(room, requests)
        except struct.error as error:
            raise self._bad_number(error) from None
        code = lib.aiordma_post_recv(pointer, room.recvs, len(requests), room.sges, room.posted)
        if code:
            raise self._post_error("ibv_post_recv", code, room.posted[0])

    def _request_room(self, requests: int, sges: int) -> RequestArray:
        if self._room is None or requests > self._room_size[0] or sges > self._room_size[1]:
            self._room_size = (max(16, requests), max(16, sges))
            self._room = RequestArray(*self._room_size)
        return self._room

    def _refuse_opcode(self, opcode: int) -> NoReturn:
        name = WROpcode(opcode).name
        raise UnsupportedError(
            f"{name} on a {self.qp_type.name} queue pair",
            device=self.context.name,
            verb="ibv_post_send",
        )

    def _bad_number(self, error: Exception) -> ValueError:
        return ValueError(f"{self._label()}: a number that does not fit its field: {error}")

    def _post_error(self, verb: str, code: int, bad_index: int) -> PostError:
        # Some providers return -1 instead of an errno value (ibv_post_send(3) allows only the
        # latter); there is no errno to be had then.
        return PostError(
            code if code > 0 else errno.EINVAL, verb, bad_index, f"{self!r} on {self.context.name}"
        )

    def _label(self) -> str:
        return f"QueuePair {self.qp_num:#x}"

    def _details(self) -> str:
        return f"{self.qp_type.name} {self.state.name}"
