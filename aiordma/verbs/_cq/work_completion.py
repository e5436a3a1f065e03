"""The completion of a work request."""

from __future__ import annotations

import socket
from functools import lru_cache
from typing import NamedTuple, Self

from aiordma._native import More, Record
from aiordma.errors import WorkCompletionError, work_completion_error

from .._device.enums import WCFields, WCFlags, WCOpcode, WCStatus

# Use plain ints and cached enum members, because enum operators are ten times slower.
_opcode = lru_cache(256)(WCOpcode)
_flags = lru_cache(256)(WCFlags)
_RECV = int(WCOpcode.RECV)
_WITH_IMM, _WITH_INV = int(WCFlags.WITH_IMM), int(WCFlags.WITH_INV)
_TIMESTAMP = int(WCFields.WITH_COMPLETION_TIMESTAMP)
_WALLCLOCK = int(WCFields.WITH_COMPLETION_TIMESTAMP_WALLCLOCK)
_SLID, _SL = int(WCFields.WITH_SLID), int(WCFields.WITH_SL)
_DLID_PATH_BITS = int(WCFields.WITH_DLID_PATH_BITS)
_CVLAN, _FLOW_TAG = int(WCFields.WITH_CVLAN), int(WCFields.WITH_FLOW_TAG)
_TM_INFO = int(WCFields.WITH_TM_INFO)


class WorkCompletion(NamedTuple):
    """The completion of a work request (``struct ibv_wc``). See ibv_poll_cq(3).

    If ``status`` is not SUCCESS, ``opcode`` is None, and only ``wr_id``, ``status``, ``vendor_err``
    and ``qp_num`` are valid. ``byte_len`` is valid for receives, reads and atomics. ``imm_data`` is
    the immediate data as a number in host byte order, or None. ``invalidated_rkey`` is the rkey on
    this side that the received message invalidated, or None.

    ``timestamp`` and all fields after it are None unless the completion queue reports them. An
    extended queue reports the fields selected when it was created. A classic queue reports
    ``slid``, ``sl``, ``dlid_path_bits`` and ``pkey_index``. ``timestamp`` is a reading of the
    device's clock in ticks; use :meth:`ExtendedDeviceAttributes.seconds` to convert it.
    ``wallclock_ns`` is the time in nanoseconds since 1970.
    """

    wr_id: int
    status: WCStatus
    opcode: WCOpcode | None
    vendor_err: int
    byte_len: int
    imm_data: int | None
    qp_num: int
    src_qp: int
    wc_flags: WCFlags
    failure: WorkCompletionError | None = None
    invalidated_rkey: int | None = None
    timestamp: int | None = None
    wallclock_ns: int | None = None
    slid: int | None = None
    sl: int | None = None
    dlid_path_bits: int | None = None
    pkey_index: int | None = None
    cvlan: int | None = None
    flow_tag: int | None = None
    tm_tag: int | None = None
    tm_priv: int | None = None

    @classmethod
    def from_record(
        cls,
        record: Record,
        failure: WorkCompletionError | None = None,
        more: More | None = None,
        fields: WCFields | None = None,
    ) -> Self:
        """Create a completion from the fields of a `struct aiordma_completion`.

        Args:
            record: The fields as plain numbers.
            failure: The exception for a failed completion, if the queue pair tracks its work.
            more: The remaining fields.
            fields: The fields that an extended queue reports, or None for a classic queue.
        """
        wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, flags = record
        if status:
            return cls(
                wr_id, WCStatus(status), None, vendor_err, 0, None, qp_num, 0, WCFlags(0), failure
            )
        return cls(
            wr_id,
            WCStatus.SUCCESS,
            _opcode(opcode),
            vendor_err,
            byte_len,
            # rdma_rxe also sets WITH_IMM for send completions, which contain no immediate data.
            imm_data if flags & _WITH_IMM and opcode & _RECV else None,
            qp_num,
            src_qp,
            _flags(flags),
            None,
            invalidated(imm_data) if flags & _WITH_INV else None,
            *(() if more is None else _extended_values(more, fields)),
        )

    @property
    def ok(self) -> bool:
        """Whether the work request succeeded."""
        return self.status is WCStatus.SUCCESS

    def error(self, operation: str = "") -> WorkCompletionError | None:
        """Return the exception for a failed completion, or None for a successful one.

        A queue pair tracks its posted work unless it was created with ``reserved`` or
        :meth:`QueuePair.untrack` was called. With tracking, the exception names the failed
        operation. If the request was flushed after an earlier failure, the queue pair's first
        failure is the exception's cause.

        Args:
            operation: The name of the operation, if known. The completion itself does not contain
                it.
        """
        if self.ok:
            return None
        if self.failure is not None and not operation:
            return self.failure
        return work_completion_error(
            self.status,
            operation=operation,
            qp_num=self.qp_num,
            wr_id=self.wr_id,
            vendor_err=self.vendor_err,
        )

    def raise_for_status(self) -> None:
        """If the work request failed, raise the exception returned by :meth:`error`."""
        if (error := self.error()) is not None:
            raise error


def invalidated(imm_data: int) -> int:
    """Return the invalidated key, which shares a field with the immediate data.

    In records, this field has already been converted to host byte order. Keys must not be
    byte-swapped, so this function undoes the conversion.
    """
    return socket.htonl(imm_data)


def _extended_values(more: More, fields: WCFields | None) -> tuple[int | None, ...]:
    """Return ``timestamp`` and all later fields. Fields the queue does not report are None."""
    timestamp, wallclock_ns, tm_tag, slid, pkey_index, sl, bits, cvlan, flow_tag, tm_priv = more
    if fields is None:
        return None, None, slid, sl, bits, pkey_index
    reported = int(fields)
    return (
        timestamp if reported & _TIMESTAMP else None,
        wallclock_ns if reported & _WALLCLOCK else None,
        slid if reported & _SLID else None,
        sl if reported & _SL else None,
        bits if reported & _DLID_PATH_BITS else None,
        None,  # pkey_index, which only classic queues report
        cvlan if reported & _CVLAN else None,
        flow_tag if reported & _FLOW_TAG else None,
        tm_tag if reported & _TM_INFO else None,
        tm_priv if reported & _TM_INFO else None,
    )
