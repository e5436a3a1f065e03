"""Iteration over completions whose fields are read on demand (see ibv_start_poll(3))."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Any, Self

from aiordma import verbs
from aiordma._native import failure, ffi
from aiordma._native import handles as h
from aiordma.errors import UnsupportedError, WorkCompletionError

from .._device.enums import WCFlags, WCOpcode, WCStatus
from .work_completion import WorkCompletion


def _numeric_field(name: str, doc: str, member: str = "") -> Any:
    """Create a property that reads a numeric field with :meth:`CompletionCursor._read`."""
    return property(lambda cursor: cursor._read(name, member), doc=doc)


class CompletionCursor:
    """A thread's position in a completion queue, created by :meth:`CompletionQueue.start_poll`.

    Iterating over the cursor advances it to the next completion and yields the cursor itself, until
    the queue is empty. The attributes describe the current completion and have the same names as
    those of :class:`WorkCompletion`. On an extended queue, each attribute is read from the device
    on access. No other thread may poll the queue until the ``with`` block ends.

    Accessing a field that the queue does not report raises UnsupportedError. If ``status`` is not
    SUCCESS, only ``status``, ``wr_id``, ``vendor_err`` and ``qp_num`` are valid.
    """

    def __init__(self, cq: verbs.CompletionQueue) -> None:
        self._cq = cq
        self._started = False
        self._attr = ffi.new("struct ibv_poll_cq_attr *")
        self._wc: WorkCompletion | None = None  # current completion of a classic queue
        self._extended_cq: h.ibv_cq_ex | None = None  # the queue, if extended
        self.failure: WorkCompletionError | None = None

    def __enter__(self) -> Self:
        if self._cq.fields is not None:
            self._extended_cq = ffi.cast("struct ibv_cq_ex *", self._cq.pointer)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_poll()

    def _end_poll(self) -> None:
        if self._started and self._extended_cq is not None:
            self._started = False
            self._extended_cq.end_poll(self._extended_cq)

    def __iter__(self) -> Iterator[Self]:
        while self._step():
            yield self

    def _step(self) -> bool:
        """Advance to the next completion. Return False if the queue is empty."""
        if self._extended_cq is None:
            found = self._cq.poll(1)
            self._wc = found[0] if found else None
            self.failure = self._wc.failure if self._wc else None
            return bool(found)
        if not self._start_poll(self._extended_cq):
            return False
        self.failure = self._cq._settle(self._record())
        return True

    def _start_poll(self, cq: h.ibv_cq_ex) -> bool:
        """Advance an extended queue to its next completion. Return False if the queue is empty."""
        # Start again for each completion instead of calling next_poll, which can lose completions
        # (see native/verbs/completion.c).
        self._end_poll()
        code = cq.start_poll(cq, self._attr)
        if code == 0:
            self._started = True
            return True
        if code != errno.ENOENT:
            raise failure("ibv_start_poll", abs(code), f"cannot poll {self._cq!r}")
        self._cq.entries.release_pending()  # ENOENT means that the queue is empty
        return False

    def _record(self) -> tuple[int, int, int, int, int, int, int, int, int]:
        """Return the current completion as a record for :meth:`CompletionQueue._settle`."""
        opcode = 0 if self.status else self._read("opcode")
        qp_num = self._read("qp_num") if getattr(self._extended_cq, "read_qp_num", None) else 0
        byte_len = imm_data = src_qp = wc_flags = 0  # `_settle` does not use them
        return (
            self.wr_id, self.status, opcode, self.vendor_err, byte_len, imm_data, qp_num, src_qp,
            wc_flags,
        )  # fmt: skip

    def _read(self, name: str, member: str = "") -> int:
        """Return the value of a field. On an extended queue, ``read_<member>`` reads the value."""
        if self._wc is None and not self._started:
            raise RuntimeError(
                "the cursor is not positioned on a completion; iterate over the cursor first"
            )
        if self._extended_cq is not None:
            if name in ("wr_id", "status"):
                return int(getattr(self._extended_cq, name))
            if read := getattr(self._extended_cq, f"read_{member or name}"):
                return int(read(self._extended_cq))
            hint = " (the queue was created without it)"
        else:
            value = getattr(self._wc, name)
            if value is not None:
                return int(value)
            if self.failure is not None or self.status:
                return 0  # the device does not report this field for a failed request
            hint = ""
        field, device = f"the completion field {name}{hint}", self._cq.context.name
        raise UnsupportedError(field, device=device, verb="ibv_start_poll")

    # --- the fields ------------------------------------------------------------------------

    @property
    def status(self) -> WCStatus:
        """The result of the work request."""
        return WCStatus(self._read("status"))

    @property
    def opcode(self) -> WCOpcode:
        """The operation that completed."""
        return WCOpcode(self._read("opcode"))

    @property
    def imm_data(self) -> int | None:
        """The immediate data in host byte order, or None if the message has none."""
        if not self.wc_flags & WCFlags.WITH_IMM:
            return None
        imm_data = self._read("imm_data")
        # In a WorkCompletion of a classic queue, the data has already been converted.
        return imm_data if self._extended_cq is None else socket.ntohl(imm_data)

    @property
    def invalidated_rkey(self) -> int | None:
        """The rkey on this side that the received message invalidated, or None."""
        if not self.wc_flags & WCFlags.WITH_INV:
            return None
        # The key shares a field with the immediate data, but is not in network byte order.
        return self._read("invalidated_rkey", "imm_data")

    @property
    def wc_flags(self) -> WCFlags:
        """The completion's flags."""
        return WCFlags(self._read("wc_flags"))

    wr_id: int = _numeric_field("wr_id", "The number of the work request.")
    vendor_err: int = _numeric_field("vendor_err", "The vendor's error code.")
    byte_len: int = _numeric_field("byte_len", "The number of bytes received.")
    qp_num: int = _numeric_field("qp_num", "The number of the queue pair.")
    src_qp: int = _numeric_field("src_qp", "The sender's queue pair, for datagrams.")
    slid: int = _numeric_field("slid", "The sender's LID.")
    sl: int = _numeric_field("sl", "The service level.")
    dlid_path_bits: int = _numeric_field("dlid_path_bits", "The low bits of the destination LID.")
    timestamp: int = _numeric_field(
        "timestamp", "The device's clock at the completion, in ticks.", "completion_ts"
    )
    wallclock_ns: int = _numeric_field(
        "wallclock_ns", "The time of day, in nanoseconds since 1970.", "completion_wallclock_ns"
    )
    cvlan: int = _numeric_field("cvlan", "The VLAN tag that the device removed.")
    flow_tag: int = _numeric_field("flow_tag", "The tag of the matching flow rule.")
