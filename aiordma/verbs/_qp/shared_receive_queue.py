"""Shared receive queues, whose receives are shared by several queue pairs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from aiordma import verbs
from aiordma._core.arguments import U32_MAX, integer
from aiordma._native import RequestArray, copy_of, explained, failure, ffi, lib
from aiordma._native import handles as h
from aiordma.errors import VerbsError

from .._cq.completion import CompletionQueue
from .._device.enums import DeviceCapability
from .._device.resource import Node, Resource
from .batch import ReceiveBatch
from .post_failures import post_error, request_reason
from .work_request import ReceiveWorkRequest, one_sge, pack_recvs

# Values of enum ibv_srq_attr_mask, ibv_srq_type and ibv_srq_init_attr_mask.
_MAX_WR, _LIMIT = 1 << 0, 1 << 1
_TYPE_XRC = 1
_MASK_TYPE, _MASK_PD, _MASK_XRCD, _MASK_CQ = 1 << 0, 1 << 1, 1 << 2, 1 << 3


class SRQAttributes(NamedTuple):
    """A shared receive queue's size and event limit (``struct ibv_srq_attr``).

    The queue holds up to ``max_wr`` receives with up to ``max_sge`` scatter/gather elements each.
    The device generates a limit event when the number of receives drops below ``srq_limit``. A
    limit of 0 means that no event has been requested.
    """

    max_wr: int
    max_sge: int
    srq_limit: int = 0


class SharedReceiveQueue(Resource[h.ibv_srq]):
    """A queue of receives shared by several queue pairs (``pd.create_qp(..., srq=srq)``).

    A message that arrives on any of these queue pairs consumes the oldest receive in the queue. The
    completion is reported on that queue pair's ``recv_cq``, and its ``qp_num`` identifies the queue
    pair. The queue pairs have no receive queues of their own, so their ``post_recv`` raises an
    exception. If one of the queue pairs fails, the unused receives remain available to the others.
    The QP_LAST_WQE_REACHED event reports that the failed queue pair will not consume any more
    receives.

    ``max_wr`` and ``max_sge`` are the sizes granted by the device. Only one thread at a time may
    post receives. Keep a posted receive's memory registered until you have polled its completion or
    closed the queue. Closing the queue also closes the queue pairs that use it.

    See ibv_create_srq(3) and IBTA volume 1, clause 10.2.9.
    """

    def __init__(self, pd: verbs.ProtectionDomain, node: Node[h.ibv_srq], max_sge: int) -> None:
        super().__init__(node)
        self.pd = pd
        self.context: verbs.Context = pd.context
        self.max_sge = max_sge
        self.max_wr: int = self.query().max_wr
        self._array = RequestArray()
        # The number of entries reserved in each completion queue. Every completion queue needs room
        # for all of the receives, because any queue pair may consume them.
        self._reserved_entries: weakref.WeakKeyDictionary[CompletionQueue, int] = (
            weakref.WeakKeyDictionary()
        )
        # A bound method would make the node keep this object alive.
        node.on_destroyed = partial(_release_entries, self._reserved_entries)
        self.context._objects_by_address[self.raw_handle] = self

    # --- attributes ------------------------------------------------------------------------

    def query(self) -> SRQAttributes:
        """Query the queue's current attributes. See ibv_query_srq(3)."""
        attr = ffi.new("struct ibv_srq_attr *")
        self.context.library.calls.ibv_query_srq(self.pointer, attr)
        return copy_of(attr, SRQAttributes)

    def modify(self, *, max_wr: int | None = None, srq_limit: int | None = None) -> None:
        """Resize the queue, or change the limit for its event. See ibv_modify_srq(3).

        Args:
            max_wr: The new maximum number of receives. None leaves the size unchanged.
            srq_limit: The limit for the SRQ_LIMIT_REACHED event. The device generates the event
                once, as soon as fewer receives than this are posted (see
                ``context.async_events()``). 0 cancels the event, and None leaves the limit
                unchanged.

        Raises:
            UnsupportedError: If the device cannot resize the queue.
            BusyError: If a completion queue the receives may use cannot reserve enough entries.
            VerbsError: If the device rejects the change, for example because more than ``max_wr``
                receives are posted, or because the limit exceeds ``max_wr``. Nothing is changed in
                this case.
        """
        attr = ffi.new("struct ibv_srq_attr *")
        context, mask = self.context, 0
        if max_wr is not None:
            attr.max_wr = max_wr = integer("max_wr", max_wr, 0, U32_MAX)
            mask |= _MAX_WR
        if srq_limit is not None:
            attr.srq_limit = srq_limit = integer("srq_limit", srq_limit, 0, U32_MAX)
            mask |= _LIMIT
        if max_wr is not None and not (
            context.query_device().device_cap_flags & DeviceCapability.SRQ_RESIZE
        ):
            raise context._unsupported_error("resizing shared receive queues", "ibv_modify_srq")
        reserved = self._reserved_entries
        additional = {
            cq: max_wr - reserved[cq]
            for cq in reserved
            if max_wr is not None and max_wr > reserved[cq]
        }
        with ExitStack() as rollback:
            for cq, entries in additional.items():
                cq.make_room(entries)
                rollback.callback(cq.release, entries)
            try:
                context.library.calls.ibv_modify_srq(self.pointer, attr, mask)
            except VerbsError as error:
                raise explained(
                    error, f"cannot change {self!r} to {max_wr=}, {srq_limit=}"
                ) from None
            rollback.pop_all()
        for cq, entries in additional.items():
            reserved[cq] += entries
        if max_wr is not None:
            self.max_wr = self.query().max_wr

    def _reserve_entries_in(self, cq: CompletionQueue, node: Node[Any]) -> None:
        """Reserve a completion queue entry for every receive until this queue is closed.

        Raises:
            BusyError: If there are too few entries. In this case, ``node``, which belongs to the
                object being created, is closed.
        """
        if cq not in self._reserved_entries:
            try:
                cq.make_room(self.max_wr)
            except BaseException:
                node.close()
                raise
            self._reserved_entries[cq] = self.max_wr

    @property
    def srq_num(self) -> int:
        """The queue's number, which peers specify in XRC requests.

        Raises:
            UnsupportedError: If the queue does not have a number.
        """
        number = ffi.new("uint32_t *")
        self.context.library.calls.ibv_get_srq_num(self.pointer, number)
        return number[0]

    # --- posting ---------------------------------------------------------------------------

    def post_recv_one(self, wr_id: int, addr: int, length: int, lkey: int) -> None:
        """Post one receive into a single range of memory, or without memory if ``length`` is 0."""
        self.post_recv((ReceiveWorkRequest(wr_id, one_sge(addr, length, lkey)),))

    def post_recv(self, requests: Sequence[ReceiveWorkRequest]) -> None:
        """Post receives in the given order. See ibv_post_srq_recv(3).

        Raises:
            PostError: If the device rejects a receive. ``bad_index`` is the index of the first
                receive that was not posted. The error is a QueueFullError if the queue is full.
        """
        array, pointer = self._array, self.pointer
        pack_recvs(array, requests, repr(self))
        code = lib.aiordma_post_recv(
            ffi.NULL, pointer, array.recvs, len(requests), array.sges, array.posted
        )
        if code:
            posted_count = array.posted[0]
            reason = request_reason(requests[posted_count:], self.max_sge, "max_sge")
            queue = f"{self!r} on {self.context.name}"
            raise post_error("ibv_post_srq_recv", code, posted_count, queue, reason=reason)

    def recv_batch(self) -> ReceiveBatch:
        """Return a context manager that collects receives and posts them together."""
        return ReceiveBatch(self.post_recv)

    def _details(self) -> str:
        return f"max_wr={self.max_wr} max_sge={self.max_sge}"


def _release_entries(reserved: weakref.WeakKeyDictionary[CompletionQueue, int]) -> None:
    for cq, entries in reserved.items():
        cq.release_when_empty(entries)


def create_srq(
    pd: verbs.ProtectionDomain,
    max_wr: int,
    max_sge: int = 1,
    *,
    xrcd: Resource[h.ibv_xrcd] | None = None,
    cq: CompletionQueue | None = None,
) -> SharedReceiveQueue:
    """Create a shared receive queue. The device may grant larger sizes than requested.

    See ibv_create_srq(3).

    Args:
        pd: The protection domain of the memory to receive into. The queue pairs may belong to a
            different protection domain.
        max_wr: The maximum number of posted receives.
        max_sge: The maximum number of scatter/gather elements per receive.
        xrcd: The XRC domain, if the queue is for extended reliable connections.
        cq: The completion queue, if the queue is for extended reliable connections.

    Raises:
        ValueError: If the device does not support these sizes, or if only one of ``xrcd`` and
            ``cq`` is given.
        UnsupportedError: If the device does not support shared receive queues.
    """
    context = pd.context
    max_wr, max_sge = integer("max_wr", max_wr, None), integer("max_sge", max_sge, None)
    device = context.query_device()
    if not device.max_srq:
        raise context._unsupported_error("shared receive queues", "ibv_create_srq")
    if not 0 < max_wr <= device.max_srq_wr:
        raise ValueError(
            f"max_wr must be between 1 and {device.max_srq_wr} on {context.name}, not {max_wr}"
        )
    if not 0 <= max_sge <= device.max_srq_sge:
        raise ValueError(
            f"max_sge must be between 0 and {device.max_srq_sge} on {context.name}, not {max_sge}"
        )
    if (xrcd is None) != (cq is None):
        raise ValueError("an XRC shared receive queue needs both xrcd and cq")
    calls = context.library.calls
    parents: list[Node[Any]] = [pd.node]
    attr: h.ibv_srq_init_attr | h.ibv_srq_init_attr_ex
    try:
        if xrcd is not None and cq is not None:
            attr = ffi.new("struct ibv_srq_init_attr_ex *")
            attr.comp_mask = _MASK_TYPE | _MASK_PD | _MASK_XRCD | _MASK_CQ
            attr.srq_type = _TYPE_XRC
            attr.pd, attr.xrcd, attr.cq = pd.pointer, xrcd.pointer, cq.pointer
            attr.attr.max_wr, attr.attr.max_sge = max_wr, max_sge
            pointer = calls.ibv_create_srq_ex(context.pointer, attr)
            parents += [xrcd.node, cq.node]
        else:
            attr = ffi.new("struct ibv_srq_init_attr *")
            attr.attr.max_wr, attr.attr.max_sge = max_wr, max_sge
            pointer = calls.ibv_create_srq(pd.pointer, attr)
    except VerbsError as error:
        kind = "an XRC" if xrcd is not None else "a"
        message = f"cannot create {kind} shared receive queue with {max_wr=}, {max_sge=}"
        raise failure(error.verb, error.errno or 0, f"{message} on {context.name}") from None
    node = Node("SharedReceiveQueue", pointer, calls.ibv_destroy_srq, parents)
    srq = SharedReceiveQueue(pd, node, attr.attr.max_sge)
    if cq is not None:
        srq._reserve_entries_in(cq, node)
    return srq
