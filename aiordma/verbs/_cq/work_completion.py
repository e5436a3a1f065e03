"""How one work request ended."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, NamedTuple, Self

from aiordma.errors import WorkCompletionError, work_completion_error

from .._device.enums import WCFields, WCFlags, WCOpcode, WCStatus

if TYPE_CHECKING:
    from aiordma._native import More, Record


class WorkCompletion(NamedTuple):
    """How one work request ended: ``struct ibv_wc``, see ibv_poll_cq(3).

    When ``status`` is not SUCCESS only ``wr_id``, ``status``, ``vendor_err`` and ``qp_num`` are
    defined; ``opcode`` is None then. ``imm_data`` is a number in host order, None unless the
    completion has one; so is ``invalidated_rkey``, which a send has invalidated here.
    ``byte_len`` is defined for receives, reads and atomics.

    What follows ``failure`` is told by extended completion queues that were made for it, and is
    None otherwise; ``slid``, ``sl``, ``dlid_path_bits`` and ``pkey_index`` are told by classic
    ones too. ``timestamp`` is the device's clock when it completed the work, in ticks
    (:meth:`ExtendedDeviceAttributes.seconds`); ``wallclock_ns`` the time of day, in nanoseconds
    since 1970.
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
        """From a raw record of :meth:`CompletionQueue.poll_raw`.

        ``failure`` is what the queue pair's tracking says of a failed one. ``more`` is the
        rest of it, ``fields`` what an extended queue was made to tell; None for a classic one.
        """
        wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, flags = record
        if status:
            return cls(
                wr_id, WCStatus(status), None, vendor_err, 0, None, qp_num, 0, WCFlags(0), failure
            )
        wc = cls(
            wr_id,
            WCStatus.SUCCESS,
            WCOpcode(opcode),
            vendor_err,
            byte_len,
            # rdma_rxe tells it of sends as well, without the data.
            imm_data if flags & WCFlags.WITH_IMM and opcode & WCOpcode.RECV else None,
            qp_num,
            src_qp,
            WCFlags(flags),
            None,
            invalidated(imm_data) if flags & WCFlags.WITH_INV else None,
        )
        return wc if more is None else wc._with(more, fields)

    def _with(self, more: More, fields: WCFields | None) -> Self:
        timestamp, wallclock_ns, tm_tag, slid, pkey_index, sl, bits, cvlan, flow_tag, priv = more
        if fields is None:
            return self._replace(slid=slid, sl=sl, dlid_path_bits=bits, pkey_index=pkey_index)
        tm = WCFields.WITH_TM_INFO in fields
        return self._replace(
            timestamp=timestamp if WCFields.WITH_COMPLETION_TIMESTAMP in fields else None,
            wallclock_ns=(
                wallclock_ns if WCFields.WITH_COMPLETION_TIMESTAMP_WALLCLOCK in fields else None
            ),
            slid=slid if WCFields.WITH_SLID in fields else None,
            sl=sl if WCFields.WITH_SL in fields else None,
            dlid_path_bits=bits if WCFields.WITH_DLID_PATH_BITS in fields else None,
            cvlan=cvlan if WCFields.WITH_CVLAN in fields else None,
            flow_tag=flow_tag if WCFields.WITH_FLOW_TAG in fields else None,
            tm_tag=tm_tag if tm else None,
            tm_priv=priv if tm else None,
        )

    @property
    def ok(self) -> bool:
        """Whether the work was done."""
        return self.status is WCStatus.SUCCESS

    def error(self, operation: str = "") -> WorkCompletionError | None:
        """The exception for a failed completion, None for a good one.

        It names the operation, and a flush has the queue pair's first failure as its cause,
        when the queue pair tracks its work (all do but those that the event loop's driver
        has). The completion itself does not say what had been posted; ``operation`` may.
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
        """Raise :meth:`error` when the work failed; nothing otherwise."""
        if (error := self.error()) is not None:
            raise error


def invalidated(imm_data: int) -> int:
    """The key that shares its place with immediate data, which records have in host order.

    The key was there as it is; so turning the immediate data has turned it as well.
    """
    return socket.htonl(imm_data)
