"""Queue pairs of kinds that one vendor's devices alone have: type IBV_QPT_DRIVER."""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from aiordma._native import RequestArray, failure, ffi, lib
from aiordma.errors import PostError, UnsupportedError, VerbsError

from .._cq.completion import hold_room
from .._device.enums import WROpcode
from .._device.resource import Node, Resource
from .._qp.qp_attributes import (
    QUERY_ALL,
    QPAttributes,
    QPCapabilities,
    QPChanges,
    fill,
    resets,
)
from .._qp.transport_rules import SendOps
from .._qp.work_request import ReceiveWorkRequest, SendWorkRequest, pack_recvs

if TYPE_CHECKING:
    from aiordma._native import handles as h

    from .._cq.completion import CompletionQueue
    from .._device.address_handle import AddressHandle
    from .._device.context import Context
    from .._device.protection_domain import ProtectionDomain

DRIVER = 0xFF
"""IBV_QPT_DRIVER."""

# enum ibv_qp_init_attr_mask
_PD, _SEND_OPS = 1 << 0, 1 << 6


def init_attr_ex(
    pd: ProtectionDomain,
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    capabilities: QPCapabilities,
    send_ops: SendOps,
    sq_sig_all: bool,
) -> h.ibv_qp_init_attr_ex:
    """``struct ibv_qp_init_attr_ex`` for a queue pair of type DRIVER."""
    attr = ffi.new("struct ibv_qp_init_attr_ex *")
    attr.qp_type = DRIVER
    attr.send_cq, attr.recv_cq = send_cq.pointer, recv_cq.pointer
    attr.sq_sig_all = int(sq_sig_all)
    attr.comp_mask, attr.pd = _PD, pd.pointer
    if send_ops:
        attr.comp_mask |= _SEND_OPS
        attr.send_ops_flags = int(send_ops)
    try:
        capabilities.write(attr)
    except OverflowError as error:
        raise ValueError(f"a queue pair with {capabilities}: {error}") from None
    return attr


class DriverQueuePair(Resource["h.ibv_qp"]):
    """The base of queue pairs of one vendor's kinds. No table has their states.

    So the device alone checks what is modified and posted, and work under way is not tracked.
    The caller keeps the memory of what is posted, as with QueuePair.
    """

    def __init__(
        self,
        pd: ProtectionDomain,
        pointer: h.ibv_qp,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        attr: h.ibv_qp_init_attr_ex,
        srq: Resource[h.ibv_srq] | None = None,
    ) -> None:
        calls = pd.context.library.calls
        parents: list[Node[Any]] = [pd.node, send_cq.node, recv_cq.node]
        if srq is not None:
            parents.append(srq.node)
        super().__init__(Node(type(self).__name__, pointer, calls.ibv_destroy_qp, parents))
        self.node.halt = resets(pd.context.library)
        self.pd = pd
        self.context: Context = pd.context
        self.send_cq = send_cq
        self.recv_cq = recv_cq
        self.qp_num: int = pointer.qp_num
        self.capabilities: QPCapabilities = QPCapabilities.read(attr)
        taken = self.capabilities
        hold_room(self.node, (send_cq, taken.max_send_wr), (recv_cq, taken.max_recv_wr))
        self.context._route_events(int(ffi.cast("uintptr_t", pointer)), self)

    def modify(self, **changes: Unpack[QPChanges]) -> None:
        """Change attributes, most often with ``qp_state``; timers are seconds: ibv_modify_qp(3).

        VerbsError when the device refuses.
        """
        attr, mask = fill(changes)
        try:
            self.context.library.calls.ibv_modify_qp(self.pointer, attr, mask)
        except VerbsError as error:
            raise failure(error.verb, error.errno or 0, f"{self._label()}: {mask!r}") from None
        self.qp_num = self.pointer.qp_num  # a target of mlx5 has none before RTR

    def query(self) -> QPAttributes:
        """The attributes as the device has them now: ibv_query_qp(3)."""
        attr = ffi.new("struct ibv_qp_attr *")
        init = ffi.new("struct ibv_qp_init_attr *")
        self.context.library.calls.ibv_query_qp(self.pointer, attr, QUERY_ALL, init)
        return QPAttributes.read(attr)

    def post_recv(self, requests: Sequence[ReceiveWorkRequest]) -> None:
        """Post receives in order. PostError tells by ``bad_index`` the first that was not."""
        array = RequestArray()
        pack_recvs(array, requests)
        pointer = self.pointer
        code = lib.aiordma_post_recv(
            pointer, ffi.NULL, array.recvs, len(requests), array.sges, array.posted
        )
        if code:
            raise self._post_error("ibv_post_recv", code, array.posted[0])

    def _post_to(
        self,
        wr: SendWorkRequest,
        ah: AddressHandle,
        remote_number: int,
        remote_key: int,
        dc: h.mlx5dv_qp_ex | None = None,
    ) -> None:
        """Post one request to a peer that it names itself."""
        if wr.opcode not in _OPERATIONS:
            raise UnsupportedError(
                f"{WROpcode(wr.opcode).name} on a {self._label()}",
                device=self.context.name,
                verb="ibv_wr_start",
            )
        array = RequestArray()
        try:
            pack_recvs(array, [ReceiveWorkRequest(0, wr.sges)])  # its pieces
            code = lib.aiordma_post_addressed(
                self.context.library.calls.ibv_qp_to_qp_ex(self.pointer),
                dc or ffi.NULL,
                wr.wr_id,
                wr.opcode,
                wr.send_flags,
                wr.imm_data,
                wr.remote_addr,
                wr.rkey,
                array.sges,
                len(wr.sges),
                ah.pointer,
                remote_number,
                remote_key,
            )
        except (OverflowError, struct.error) as error:
            raise ValueError(f"a number that does not fit its field: {error}") from None
        if code:
            raise self._post_error("ibv_wr_complete", code, 0)

    def _post_error(self, verb: str, code: int, bad_index: int) -> PostError:
        where = f"{self!r} on {self.context.name}"
        return PostError(code if code > 0 else errno.EINVAL, verb, bad_index, where)

    def _label(self) -> str:
        return f"{type(self).__name__} {self.qp_num:#x}"


_OPERATIONS = frozenset(
    {
        WROpcode.SEND,
        WROpcode.SEND_WITH_IMM,
        WROpcode.RDMA_WRITE,
        WROpcode.RDMA_WRITE_WITH_IMM,
        WROpcode.RDMA_READ,
    }
)
