"""Completions one by one, each field read when it is asked for: ibv_start_poll(3)."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from aiordma._native import failure, ffi, lib
from aiordma.errors import UnsupportedError, WorkCompletionError

from .._device.enums import WCFlags, WCOpcode, WCStatus
from .work_completion import WorkCompletion, invalidated

if TYPE_CHECKING:
    from aiordma._native import handles as h

    from .completion import CompletionQueue


class CompletionCursor:
    """The position of a thread in a completion queue: :meth:`CompletionQueue.start_poll`.

    Iterating steps from completion to completion and gives the cursor itself, until the queue is
    empty; the attributes are those of the current completion, named as those of
    :class:`WorkCompletion`, each read from the device when it is asked for. On a classic queue
    they have all been read. No other thread may poll the queue before the ``with`` has ended.

    UnsupportedError for a field that the queue was not made to tell. When ``status`` is not
    SUCCESS only ``wr_id``, ``vendor_err`` and ``qp_num`` are defined beside it.
    """

    def __init__(self, cq: CompletionQueue) -> None:
        self._cq = cq
        self._started = False
        self._value = ffi.new("uint64_t *")
        self._wc: WorkCompletion | None = None  # the current one of a classic queue
        self._ex: h.CQExPointer | None = None  # the extended queue
        self.failure: WorkCompletionError | None = None

    def __enter__(self) -> Self:
        if self._cq.fields is not None:
            self._ex = ffi.cast("struct ibv_cq_ex *", self._cq.pointer)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._started and self._ex is not None:
            self._started = False
            lib.aiordma_end_poll(self._ex)

    def __iter__(self) -> Iterator[Self]:
        while self._step():
            yield self

    def _step(self) -> bool:
        if self._ex is None:
            found = self._cq.poll(1)
            self._wc = found[0] if found else None
            self.failure = self._wc.failure if self._wc else None
            return bool(found)
        if not self._start(self._ex):
            return False
        self.failure = self._cq.posted_work.settle(self._record())
        return True

    def _start(self, cq: h.CQExPointer) -> bool:
        self._end()  # and not next_poll, for the reason in native/verbs/completion.c
        code = lib.aiordma_start_poll(cq)
        if code == 0:
            self._started = True
            return True
        if code != errno.ENOENT:
            raise failure("ibv_start_poll", abs(code), f"the completion queue {self._cq!r}")
        self._cq.entries.seen_empty()
        return False

    def _record(self) -> tuple[int, int, int, int, int, int, int, int, int]:
        """The record by which the queue pair finds its posted work."""
        opcode = 0 if self.status else self._read(lib.AIORDMA_WC_OPCODE, "opcode")
        number = self._read(lib.AIORDMA_WC_QP_NUM, "qp_num") if self._has_qp_num else 0
        return self.wr_id, self.status, opcode, self.vendor_err, 0, 0, number, 0, 0

    @property
    def _has_qp_num(self) -> bool:
        return self._ex is not None and bool(self._ex.read_qp_num)

    def _read(self, field: int, name: str) -> int:
        if self._ex is None:
            if self._wc is None:
                raise RuntimeError("the cursor is at no completion: iterate over it")
            value = getattr(self._wc, name)
            if value is None and not self._wc.ok:
                return 0
            if value is None:
                raise UnsupportedError(f"{name} of completions", device=self._cq.context.name)
            assert isinstance(value, int)
            return value
        if not self._started:
            raise RuntimeError("the cursor is at no completion: iterate over it")
        if lib.aiordma_read_wc(self._ex, field, self._value):
            raise UnsupportedError(
                f"{name} of completions (it was not asked for when the queue was made)",
                device=self._cq.context.name,
            )
        return self._value[0]

    # --- the fields ------------------------------------------------------------------------

    @property
    def wr_id(self) -> int:
        """The number that was given to the work request."""
        if self._ex is not None and self._started:
            return self._ex.wr_id
        return self._read(0, "wr_id")

    @property
    def status(self) -> WCStatus:
        """How it ended."""
        if self._ex is not None and self._started:
            return WCStatus(self._ex.status)
        return WCStatus(self._read(0, "status"))

    @property
    def opcode(self) -> WCOpcode:
        """What was completed."""
        return WCOpcode(self._read(lib.AIORDMA_WC_OPCODE, "opcode"))

    @property
    def vendor_err(self) -> int:
        """The device's own number for a failure."""
        return self._read(lib.AIORDMA_WC_VENDOR_ERR, "vendor_err")

    @property
    def byte_len(self) -> int:
        """Bytes that arrived."""
        return self._read(lib.AIORDMA_WC_BYTE_LEN, "byte_len")

    @property
    def imm_data(self) -> int | None:
        """Immediate data in host order, None when there is none."""
        if not self.wc_flags & WCFlags.WITH_IMM:
            return None
        return self._read(lib.AIORDMA_WC_IMM_DATA, "imm_data")

    @property
    def invalidated_rkey(self) -> int | None:
        """The key that a send has invalidated, None when it has not."""
        if not self.wc_flags & WCFlags.WITH_INV:
            return None
        if self._wc is not None:
            return self._wc.invalidated_rkey
        return invalidated(self._read(lib.AIORDMA_WC_IMM_DATA, "imm_data"))

    @property
    def qp_num(self) -> int:
        """The queue pair."""
        return self._read(lib.AIORDMA_WC_QP_NUM, "qp_num")

    @property
    def src_qp(self) -> int:
        """The peer's queue pair, of datagrams."""
        return self._read(lib.AIORDMA_WC_SRC_QP, "src_qp")

    @property
    def wc_flags(self) -> WCFlags:
        """What else the completion holds."""
        return WCFlags(self._read(lib.AIORDMA_WC_FLAGS, "wc_flags"))

    @property
    def slid(self) -> int:
        """The LID that it came from."""
        return self._read(lib.AIORDMA_WC_SLID, "slid")

    @property
    def sl(self) -> int:
        """Its service level."""
        return self._read(lib.AIORDMA_WC_SL, "sl")

    @property
    def dlid_path_bits(self) -> int:
        """The low bits of the LID that it was sent to."""
        return self._read(lib.AIORDMA_WC_DLID_PATH_BITS, "dlid_path_bits")

    @property
    def timestamp(self) -> int:
        """The device's clock, in ticks."""
        return self._read(lib.AIORDMA_WC_TIMESTAMP, "timestamp")

    @property
    def wallclock_ns(self) -> int:
        """The time of day, in nanoseconds since 1970."""
        return self._read(lib.AIORDMA_WC_WALLCLOCK_NS, "wallclock_ns")

    @property
    def cvlan(self) -> int:
        """The VLAN that the device took off."""
        return self._read(lib.AIORDMA_WC_CVLAN, "cvlan")

    @property
    def flow_tag(self) -> int:
        """The tag of the flow that it matched."""
        return self._read(lib.AIORDMA_WC_FLOW_TAG, "flow_tag")
