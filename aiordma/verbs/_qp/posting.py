"""Posting work to a queue pair: the checks before it, the call, and its errors."""

from __future__ import annotations

import errno
import struct
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from aiordma._native import RequestArray, ffi, lib
from aiordma.errors import (
    PostError,
    QueueFullError,
    RDMAError,
    UnsupportedError,
    WorkCompletionError,
)

from .._device.enums import DeviceCapability, QPType, SendFlags, WROpcode
from .._device.resource import Resource
from .batch import ReceiveBatch, SendBatch
from .post_failures import Limits, request_reason, state_reason
from .posted_work import PostedWork
from .transport_rules import (
    ALWAYS,
    ATOMICS,
    EVERY_BIT,
    NEEDS_CHECK,
    OPERATIONS,
    SendOps,
    flags_of,
    has,
)
from .work_request import (
    ReceiveWorkRequest,
    SendWorkRequest,
    not_packed,
    one_piece,
    pack_recvs,
    pack_sends,
)

if TYPE_CHECKING:
    from aiordma._native import handles as h

    from .._cq.completion import CompletionQueue
    from .._device.context import Context
    from .qp_attributes import QPAttributes, QPCapabilities
    from .shared_receive_queue import SharedReceiveQueue

# No request of ibv_post_send(3), but of ibv_wr_post(3) alone.
_BUILT = frozenset({WROpcode.FLUSH, WROpcode.ATOMIC_WRITE})

_SIGNALED = int(SendFlags.SIGNALED)

# ibv_post_send(3): checksums are offered by type.
_CHECKSUMS = {
    QPType.UD: DeviceCapability.UD_IP_CSUM,
    QPType.RC: DeviceCapability.RC_IP_CSUM,
    QPType.RAW_PACKET: DeviceCapability.RAW_IP_CSUM,
}


def address(pointer: h.ibv_qp | h.ibv_qp_ex | h.Null) -> int:
    return int(ffi.cast("uintptr_t", pointer))


class Posting(Resource["h.ibv_qp"]):
    """The send queue and the receive queue; a part of :class:`QueuePair`."""

    context: Context
    qp_num: int
    qp_type: QPType
    sq_sig_all: bool
    capabilities: QPCapabilities
    send_ops: SendOps

    srq: SharedReceiveQueue | None
    _send_cq: CompletionQueue | None

    def _begin_posting(self, pointer: h.ibv_qp, extended: h.ibv_qp_ex | h.Null) -> None:
        self._extended = extended
        self._addresses: tuple[int, int] = (
            address(pointer),
            address(extended) if self.send_ops else 0,
        )
        """Addresses of struct ibv_qp, and of its struct ibv_qp_ex or 0."""
        needs_check = NEEDS_CHECK[self.qp_type]
        if self.send_ops:
            closer = {
                int(opcode): EVERY_BIT
                for opcode, operation in OPERATIONS.items()
                if not operation.send_op & self.send_ops
            }
            needs_check = tuple(closer.get(at, bits) for at, bits in enumerate(needs_check))
        self._needs_check = needs_check
        self._posted: PostedWork | None = None

    def _keep_account(self, *cqs: CompletionQueue | None) -> None:
        self._posted = posted = PostedWork(self.capabilities.max_send_wr, self.context._failures)
        for cq in cqs:
            if cq is not None:
                cq._posted_work[self.qp_num] = posted

    @cached_property
    def _array(self) -> RequestArray:
        return RequestArray()  # which connections do not need

    @cached_property
    def _receive_array(self) -> RequestArray:
        return RequestArray()  # of another thread, perhaps

    # --- tracking --------------------------------------------------------------------------

    @property
    def free_send_slots(self) -> int:
        """Requests that can be posted to the send queue now.

        A slot is free again when the completion of its request, or of a later signaled one, has
        been polled. After a failure, all of them: the device then decides.
        """
        return self._account().free

    @property
    def unsignaled_tail(self) -> int:
        """Requests posted last for which no completion is under way: post a signaled one."""
        return self._account().unsignaled

    @property
    def first_failure(self) -> WorkCompletionError | None:
        """The first failed completion that has been polled: why everything after it was flushed.

        None while all is well, and again after a reset.
        """
        return self._account().first_failure

    def untrack(self) -> None:
        """Stop tracking posted work: the caller tracks it, as the event loop's driver does.

        Posting and polling are a little quicker then; a full queue is what the device says.
        """
        self._posted = None

    def _account(self) -> PostedWork:
        if self._posted is None:
            raise ValueError(f"{self!r} does not track its work: untrack() was called")
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
        """Post one work request of one piece of memory (none when ``length`` is 0).

        As :meth:`post_send`. ``imm_data`` is the key to invalidate for SEND_WITH_INV and LOCAL_INV.
        """
        request = SendWorkRequest(
            wr_id, opcode, one_piece(addr, length, lkey), send_flags, imm_data, remote_addr, rkey,
            invalidate_rkey=imm_data, remote_srqn=remote_srqn,
        )  # fmt: skip
        self.post_send((request,))

    def post_recv_one(self, wr_id: int, addr: int, length: int, lkey: int) -> None:
        """Post one receive of one piece of memory (none when ``length`` is 0)."""
        self.post_recv((ReceiveWorkRequest(wr_id, one_piece(addr, length, lkey)),))

    def post_send(self, requests: Sequence[SendWorkRequest]) -> None:
        """Post work requests in order, in one call of C.

        Nothing is posted when a request is wrong in itself: UnsupportedError for an operation
        that the transport or the device lacks, ValueError for flags that the operation cannot
        have, an atomic that is not 8 aligned bytes, a number out of range. Nothing is posted
        either when the send queue has too few free slots, or unsignaled requests would take them
        all: QueueFullError. PostError from the
        device tells by ``bad_index`` the first that was not posted; those before it are, unless
        the queue pair was made with ``send_ops``, which posts all or nothing.
        """
        array, pointer = self._array, self.pointer
        try:
            for wr in requests:
                self._check(wr)
            pack_sends(array, requests)
        except (struct.error, TypeError, AttributeError) as error:
            raise not_packed(self._label(), error, requests) from None
        posted = self._posted
        if posted is not None:
            signaled = [self.sq_sig_all or bool(wr.send_flags & _SIGNALED) for wr in requests]
            self._check_room(signaled)
            for wr, asked in zip(requests, signaled, strict=True):
                posted.send(wr.wr_id, wr.opcode, asked)
        code = lib.aiordma_post_send(
            pointer, self._extended, array.sends, len(requests), array.sges, array.posted
        )
        if code:
            done = array.posted[0]
            if posted is not None:
                posted.withdraw_sends(len(requests) - done)
            raise self._post_error("ibv_post_send", code, done, requests[done:])
        for wr in requests:
            if wr.bind is not None:
                wr.bind.mw.pointer.rkey = wr.bind.rkey  # the device leaves that to us

    def post_recv(self, requests: Sequence[ReceiveWorkRequest]) -> None:
        """Post receives in order, in one call of C.

        ValueError when the queue pair takes them from a shared receive queue. PostError
        (QueueFullError when there is no room) tells by ``bad_index`` the first that was not
        posted; those before it are.
        """
        if self.srq is not None:
            raise self._shared()
        array, pointer = self._receive_array, self.pointer
        try:
            pack_recvs(array, requests)
        except (struct.error, TypeError, AttributeError) as error:
            raise not_packed(self._label(), error, requests) from None
        posted = self._posted
        if posted is not None:
            for wr in requests:
                posted.receive(wr.wr_id)
        code = lib.aiordma_post_recv(
            pointer, ffi.NULL, array.recvs, len(requests), array.sges, array.posted
        )
        if code:
            done = array.posted[0]
            if posted is not None:
                posted.withdraw_receives(len(requests) - done)
            raise self._post_error("ibv_post_recv", code, done, requests[done:])

    def batch(self) -> SendBatch:
        """A scope that collects work requests and posts them at its end with one doorbell.

        An exception inside drops them all. ``with qp.batch() as batch: batch.write(...)``.
        """
        return SendBatch(self.post_send)

    def recv_batch(self) -> ReceiveBatch:
        """The same for receives: ``with qp.recv_batch() as batch: batch.recv(...)``."""
        return ReceiveBatch(self.post_recv)

    # --- checks ----------------------------------------------------------------------------

    def _check(self, wr: SendWorkRequest) -> None:
        try:
            if (wr.send_flags | ALWAYS) & self._needs_check[wr.opcode]:
                length = sum(sge[1] for sge in wr.sges)
                self._examine(wr.opcode, wr.send_flags, wr.remote_addr, length)
                if wr.opcode == WROpcode.BIND_MW and wr.bind is None:
                    raise ValueError("BIND_MW needs a BindInfo, bind=")
                if wr.opcode == WROpcode.TSO and wr.tso is None:
                    raise ValueError("TSO needs a Segmentation, tso=")
                if wr.opcode == WROpcode.FLUSH and (wr.flush is None or wr.sges):
                    raise ValueError("FLUSH needs a FlushInfo, flush=, and has no memory here")
        except IndexError:
            raise self._unknown_opcode(wr.opcode) from None
        if self.qp_type is QPType.UD and wr.ah is None:
            raise ValueError(f"{self!r}: a datagram needs its destination: to= of a batch, or ah=")

    def _examine(self, number: int, send_flags: int, remote_addr: int, length: int) -> None:
        """Raise what is wrong with a request, if anything is."""
        try:
            opcode = WROpcode(number)
        except ValueError:
            raise self._unknown_opcode(number) from None
        if not has(self.qp_type, opcode):
            raise self._unsupported(f"{opcode.name} on a {self.qp_type.name} queue pair")
        if self.send_ops and not OPERATIONS[opcode].send_op & self.send_ops:
            raise ValueError(
                f"{self!r} was made without SendOps.{OPERATIONS[opcode].send_op.name}:"
                f" {opcode.name} cannot be posted to it"
            )
        if opcode in _BUILT and not self.send_ops:
            raise self._unsupported(f"{opcode.name} on a queue pair made without send_ops")
        wrong = SendFlags(send_flags) & ~flags_of(self.qp_type, opcode)
        if wrong:
            raise ValueError(
                f"{opcode.name} on a {self.qp_type.name} queue pair cannot have {wrong!r}"
            )
        if send_flags & SendFlags.IP_CSUM:
            offered = self.context.query_device().device_cap_flags
            if not offered & _CHECKSUMS.get(self.qp_type, DeviceCapability(0)):
                raise self._unsupported(f"IP checksums on a {self.qp_type.name} queue pair")
        if opcode in ATOMICS or opcode is WROpcode.ATOMIC_WRITE:
            # IBTA volume 1, clause 9.4.5: 8 bytes, naturally aligned.
            if remote_addr % 8:
                raise ValueError(f"{opcode.name} at {remote_addr:#x}: not a multiple of 8")
            if length != 8:
                raise ValueError(f"{opcode.name} of {length} bytes: it is always 8")

    # --- errors ----------------------------------------------------------------------------

    def _unsupported(self, capability: str) -> UnsupportedError:
        return UnsupportedError(capability, device=self.context.name, verb="ibv_post_send")

    def _shared(self) -> ValueError:
        return ValueError(f"{self!r} takes its receives from {self.srq!r}: post them there")

    def _unknown_opcode(self, opcode: int) -> ValueError:
        return ValueError(f"{self._label()}: there is no operation {opcode}")

    def _check_room(self, signaled: Sequence[bool]) -> None:
        """QueueFullError if these requests do not fit, or nothing could free an entry then."""
        posted = self._account()
        if posted.has_room(signaled):
            return
        detail = f"{len(signaled)} wanted, {posted.free} of {posted.max_send_wr} slots free"
        if posted.is_stuck:
            detail += "; only a signaled request frees slots, and none is under way: post one"
        else:
            detail += "; poll the completions of what was posted"
        raise QueueFullError("ibv_post_send", 0, f"{detail}; {self!r} on {self.context.name}")

    def _post_error(
        self,
        verb: str,
        code: int,
        bad_index: int,
        requests: Sequence[SendWorkRequest | ReceiveWorkRequest] = (),
    ) -> PostError:
        """The error to raise when posting returned ``code``.

        ``requests`` are those that were not posted.
        """
        where = f"{self!r} on {self.context.name}"
        sends = verb != "ibv_post_recv"
        caps = self.capabilities
        limits = (
            Limits(caps.max_send_sge, "max_send_sge", caps.max_inline_data)
            if sends
            else Limits(caps.max_recv_sge, "max_recv_sge")
        )
        why = request_reason(limits, requests)
        if code == errno.ENOMEM and not why:  # some providers say that of too many pieces as well
            limit = "max_send_wr" if sends else "max_recv_wr"
            return QueueFullError(verb, bad_index, f"{limit} is {getattr(caps, limit)}; {where}")
        with suppress(RDMAError):  # the device has failed
            why = state_reason(self.query().qp_state, sends=sends) or why
        # Some providers return -1 instead of an errno value (ibv_post_send(3) allows only the
        # latter); there is no errno to be had then.
        return PostError(
            code if code > 0 else errno.EINVAL, verb, bad_index, f"{why}; {where}" if why else where
        )

    @abstractmethod
    def query(self) -> QPAttributes: ...
