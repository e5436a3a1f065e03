"""Posting of work requests to a queue pair, including validation and error handling."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property

from aiordma._native import RequestArray, ffi, lib
from aiordma._native import handles as h
from aiordma.errors import PostError, QueueFullError, RDMAError, WorkCompletionError

from .._device.enums import QPType, SendFlags, WROpcode
from .batch import ReceiveBatch, SendBatch
from .bring_up import BringUp
from .post_failures import post_error, request_reason, state_reason
from .posted_work import PostedWork
from .qp_attributes import QPCapabilities
from .shared_receive_queue import SharedReceiveQueue
from .transport_rules import ALWAYS, SendOps, check_request, full_check_bits
from .work_request import (
    PACKING_ERRORS,
    ReceiveWorkRequest,
    SendWorkRequest,
    one_sge,
    pack_recvs,
    pack_sends,
    packing_error,
)

_SIGNALED = int(SendFlags.SIGNALED)


def address(pointer: h.ibv_qp | h.ibv_qp_ex | h.Null) -> int:
    return int(ffi.cast("uintptr_t", pointer))


class Posting(BringUp):
    """The base class of :class:`QueuePair` that provides the methods for posting to its queues."""

    sq_sig_all: bool
    capabilities: QPCapabilities
    send_ops: SendOps
    srq: SharedReceiveQueue | None

    def _init_posting(self) -> None:
        pointer: h.ibv_qp = self.pointer
        self._extended: h.ibv_qp_ex | h.Null = ffi.NULL
        if self.send_ops:
            self._extended = self.context.library.calls.ibv_qp_to_qp_ex(pointer)
        self._addresses: tuple[int, int] = address(pointer), address(self._extended)
        """The addresses of the ibv_qp and ibv_qp_ex structures. The latter is 0 if unused."""
        self._full_check_bits = full_check_bits(self.qp_type, self.send_ops)
        self._posted = None

    @cached_property
    def _send_array(self) -> RequestArray:
        return RequestArray()  # created on demand, because connections do not need it

    @cached_property
    def _receive_array(self) -> RequestArray:
        return RequestArray()  # separate, because another thread may post receives

    # --- tracking --------------------------------------------------------------------------

    @property
    def free_send_slots(self) -> int:
        """The number of requests that can currently be posted to the send queue.

        A slot becomes free once the completion of its request, or of a later signaled request, has
        been polled. After a failure, all slots count as free, and only the device enforces the
        limit.
        """
        return self._tracked_work().free

    @property
    def unsignaled_tail(self) -> int:
        """The number of unsignaled requests posted since the last signaled request."""
        return self._tracked_work().unsignaled

    @property
    def first_failure(self) -> WorkCompletionError | None:
        """The first failed completion polled since the last reset, or None.

        This failure caused all later requests to be flushed.
        """
        return self._tracked_work().first_failure

    def untrack(self) -> None:
        """Stop tracking posted work, to make posting and polling slightly faster.

        Afterwards, you must keep track of outstanding requests yourself. Only the device detects a
        full queue.
        """
        self._posted = None

    def _tracked_work(self) -> PostedWork:
        if self._posted is None:
            raise ValueError(f"{self!r} does not track posted work, because untrack() was called")
        return self._posted

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
        remote_srqn: int = 0,
    ) -> None:
        """Post one work request for a single range of memory, or without memory if ``length`` is 0.

        For SEND_WITH_INV and LOCAL_INV, ``imm_data`` is the key to invalidate. See
        :meth:`post_send`.
        """
        request = SendWorkRequest(
            wr_id, opcode, one_sge(addr, length, lkey), send_flags, imm_data, remote_addr, rkey,
            invalidate_rkey=imm_data, remote_srqn=remote_srqn,
        )  # fmt: skip
        self.post_send((request,))

    def post_recv_one(self, wr_id: int, addr: int, length: int, lkey: int) -> None:
        """Post one receive into a single range of memory, or without memory if ``length`` is 0."""
        self.post_recv((ReceiveWorkRequest(wr_id, one_sge(addr, length, lkey)),))

    def post_send(self, requests: Sequence[SendWorkRequest]) -> None:
        """Post work requests to the send queue in the given order.

        All requests are validated first. If any of them is invalid, none is posted.

        Raises:
            UnsupportedError: If the transport or the device does not support an operation.
            ValueError: If an operation does not support its flags, if an atomic's memory is not 8
                aligned bytes, or if a number is out of range.
            QueueFullError: If the send queue does not have enough free slots, or if unsignaled
                requests would use up all of its slots.
            PostError: If the device rejects a request. ``bad_index`` is the index of the first
                request that was not posted. The requests before it were posted. On a queue pair
                created with ``send_ops``, either all requests are posted or none.
        """
        array, pointer = self._send_array, self.pointer
        self._pack_sends(requests)
        posted = self._posted
        if posted is not None:
            signaled = [self.sq_sig_all or bool(wr.send_flags & _SIGNALED) for wr in requests]
            self._check_room(signaled)
            for wr, is_signaled in zip(requests, signaled, strict=True):
                posted.add_send(wr.wr_id, wr.opcode, is_signaled)
        code = lib.aiordma_post_send(
            pointer, self._extended, array.sends, len(requests), array.sges, array.posted
        )
        if code:
            posted_count = array.posted[0]
            if posted is not None:
                posted.withdraw_sends(len(requests) - posted_count)
            raise self._post_error("ibv_post_send", code, posted_count, requests[posted_count:])
        for wr in requests:
            if wr.bind is not None:
                wr.bind.mw.pointer.rkey = wr.bind.rkey  # the device does not set the key

    def post_recv(self, requests: Sequence[ReceiveWorkRequest]) -> None:
        """Post receives in the given order.

        Raises:
            ValueError: If the queue pair uses a shared receive queue.
            PostError: If the device rejects a receive. ``bad_index`` is the index of the first
                receive that was not posted. The error is a QueueFullError if the queue is full.
        """
        if self.srq is not None:
            raise ValueError(f"{self!r} uses a shared receive queue; post receives to {self.srq!r}")
        array, pointer = self._receive_array, self.pointer
        pack_recvs(array, requests, self._label())
        posted = self._posted
        if posted is not None:
            for wr in requests:
                posted.add_receive(wr.wr_id)
        code = lib.aiordma_post_recv(
            pointer, ffi.NULL, array.recvs, len(requests), array.sges, array.posted
        )
        if code:
            posted_count = array.posted[0]
            if posted is not None:
                posted.withdraw_receives(len(requests) - posted_count)
            raise self._post_error("ibv_post_recv", code, posted_count, requests[posted_count:])

    def batch(self) -> SendBatch:
        """Return a context manager that collects work requests and posts them together.

        The requests are posted at the end of the block, with a single notification to the device
        (doorbell). If the block raises an exception, nothing is posted::

            with qp.batch() as batch:
                batch.write(...)
        """
        return SendBatch(self.post_send)

    def recv_batch(self) -> ReceiveBatch:
        """Return a context manager that collects receives and posts them together.

        It works like :meth:`batch`::

            with qp.recv_batch() as batch:
                batch.recv(...)
        """
        return ReceiveBatch(self.post_recv)

    # --- checks ----------------------------------------------------------------------------

    def _pack_sends(self, requests: Sequence[SendWorkRequest]) -> None:
        """Validate the requests and encode them as C structures."""
        try:
            for wr in requests:
                self._check(wr)
            pack_sends(self._send_array, requests)
        except PACKING_ERRORS as error:
            raise packing_error(self._label(), error, requests) from None

    def _check_sends(self, requests: Sequence[SendWorkRequest]) -> None:
        """Raise the same exception as `post_send` if the requests are invalid or exceed a limit."""
        self._pack_sends(requests)
        limits = self.capabilities
        if request_reason(requests, limits.max_send_sge, "", limits.max_inline_data):
            raise self._post_error("ibv_post_send", errno.EINVAL, 0, requests)

    def _check(self, wr: SendWorkRequest) -> None:
        """Raise ValueError if the request is invalid."""
        try:
            needs_full_check = (wr.send_flags | ALWAYS) & self._full_check_bits[wr.opcode]
            opcode = WROpcode(wr.opcode) if needs_full_check else None
        except (IndexError, ValueError):
            raise ValueError(f"{self._label()}: unknown opcode {wr.opcode}") from None
        if opcode is not None:
            check_request(self, wr, opcode)
        if self.qp_type is QPType.UD and wr.ah is None:
            raise ValueError(f"{self!r}: a datagram needs a destination; pass to= or ah=")

    # --- errors ----------------------------------------------------------------------------

    def _check_room(self, signaled: Sequence[bool]) -> None:
        """Raise QueueFullError if the requests do not fit or would block the queue forever."""
        posted = self._tracked_work()
        if posted.has_room(signaled):
            return
        detail = f"{len(signaled)} slots needed, {posted.free} of {posted.max_send_wr} free"
        if posted.is_stuck:
            detail += "; only signaled requests free slots, but none is in flight; post one"
        else:
            detail += "; poll completions first"
        raise QueueFullError("ibv_post_send", 0, f"{detail}; {self!r} on {self.context.name}")

    def _post_error(
        self,
        verb: str,
        code: int,
        bad_index: int,
        requests: Sequence[SendWorkRequest | ReceiveWorkRequest] = (),
    ) -> PostError:
        """Create the exception for a failed call to ``verb``.

        ``requests`` contains the requests that were not posted.
        """
        queue = f"{self!r} on {self.context.name}"
        is_send = verb != "ibv_post_recv"
        kind, limits = "send" if is_send else "recv", self.capabilities._asdict()
        limit_name = f"max_{kind}_sge"
        reason = request_reason(requests, limits[limit_name], limit_name, limits["max_inline_data"])
        # ENOMEM means that the queue is full, unless a request exceeds a limit.
        is_full = code == errno.ENOMEM and not reason
        if not is_full:
            with suppress(RDMAError):  # a failed device cannot be queried
                reason = state_reason(self.query().qp_state, sends=is_send) or reason
        limit_name = f"max_{kind}_wr"
        return post_error(
            verb,
            code,
            bad_index,
            queue,
            reason=reason,
            full_reason=f"{limit_name} is {limits[limit_name]}",
        )
