"""Vendor-specific queue pair types (IBV_QPT_DRIVER)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from aiordma._native import RequestArray, failure, ffi, lib
from aiordma._native import handles as h
from aiordma.errors import VerbsError

from .._cq.completion import CompletionQueue, reserve_entries
from .._device.address_handle import AddressHandle
from .._device.context import Context
from .._device.enums import WROpcode
from .._device.protection_domain import ProtectionDomain
from .._device.resource import Node, Resource
from .._qp.post_failures import post_error
from .._qp.qp_attributes import (
    QPAttributes,
    QPCapabilities,
    QPChanges,
    attr_and_mask,
    query,
    reset_function,
)
from .._qp.qp_creation import QPOptions, init_attr_ex, init_members
from .._qp.transport_rules import SendOps
from .._qp.work_request import (
    PACKING_ERRORS,
    ReceiveWorkRequest,
    SendWorkRequest,
    pack_recvs,
    pack_sends,
    packing_error,
)

DRIVER = 0xFF
"""The queue pair type IBV_QPT_DRIVER."""


def init_attr(
    pd: ProtectionDomain,
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    capabilities: QPCapabilities,
    send_ops: SendOps,
    sq_sig_all: bool = False,
    srq: Resource[h.ibv_srq] | None = None,
) -> h.ibv_qp_init_attr_ex:
    """Create ``struct ibv_qp_init_attr_ex`` for a queue pair of type DRIVER."""
    members = init_members(send_cq, recv_cq, capabilities, DRIVER, sq_sig_all, srq)
    try:
        return init_attr_ex(pd, members, QPOptions(send_ops))
    except OverflowError as error:
        raise ValueError(f"cannot create a queue pair with {capabilities}: {error}") from None


class DriverQueuePair(Resource[h.ibv_qp]):
    """The base class for vendor-specific queue pair types.

    This class does not validate attribute changes or track posted work. Most errors are detected
    only by the device. Keep a request's memory alive until the request has completed, as with
    :class:`QueuePair`.
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
        self.node.halt = reset_function(pd.context.library)
        self.pd = pd
        self.context: Context = pd.context
        self.send_cq = send_cq
        self.recv_cq = recv_cq
        self.qp_num: int = pointer.qp_num
        self.capabilities: QPCapabilities = QPCapabilities.read(attr)
        sizes = self.capabilities
        reserve_entries(self.node, (send_cq, sizes.max_send_wr), (recv_cq, sizes.max_recv_wr))
        self.context._objects_by_address[self.raw_handle] = self

    def modify(self, **changes: Unpack[QPChanges]) -> None:
        """Change the queue pair's attributes. Times are in seconds. See ibv_modify_qp(3).

        Raises:
            VerbsError: If the device rejects the change.
        """
        attr, mask = attr_and_mask(changes)
        try:
            self.context.library.calls.ibv_modify_qp(self.pointer, attr, mask)
        except VerbsError as error:
            raise failure(
                error.verb, error.errno or 0, f"cannot change {mask!r} of {self._label()}"
            ) from None
        self.qp_num = self.pointer.qp_num  # an mlx5 DC target has no number before RTR

    def query(self) -> QPAttributes:
        """Query the current attributes from the device. See ibv_query_qp(3)."""
        return query(self.context, self.pointer)

    def post_recv(self, requests: Sequence[ReceiveWorkRequest]) -> None:
        """Post receives in the given order.

        Raises:
            PostError: If the device rejects a receive. ``bad_index`` is the index of the first
                receive that was not posted.
        """
        array, pointer = RequestArray(), self.pointer
        pack_recvs(array, requests, self._label())
        code = lib.aiordma_post_recv(
            pointer, ffi.NULL, array.recvs, len(requests), array.sges, array.posted
        )
        self._check("ibv_post_recv", code, array.posted[0])

    def _post_to(
        self,
        wr: SendWorkRequest,
        ah: AddressHandle,
        remote_number: int,
        remote_key: int,
        dc: h.mlx5dv_qp_ex | h.Null = ffi.NULL,
    ) -> None:
        """Post one request to the given peer.

        ``dc`` is this queue pair's mlx5 structure if it is a DC initiator.
        """
        if wr.opcode not in _OPERATIONS:
            raise self.context._unsupported_error(
                f"{WROpcode(wr.opcode).name} on a {self._label()}", "ibv_wr_start"
            )
        array, qp = RequestArray(), self.context.library.calls.ibv_qp_to_qp_ex(self.pointer)
        try:
            pack_sends(array, [wr])
            code = lib.aiordma_post_addressed(
                qp, dc, array.sends, array.sges, ah.pointer, remote_number, remote_key
            )
        except (OverflowError, *PACKING_ERRORS) as error:
            raise packing_error(self._label(), error, [wr]) from None
        self._check("ibv_wr_complete", code, 0)

    def _check(self, verb: str, code: int, bad_index: int) -> None:
        if code:
            raise post_error(verb, code, bad_index, f"{self!r} on {self.context.name}")

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
