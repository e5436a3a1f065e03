"""Completion queues, the channels that announce them, and what a completion says."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Self

from aiordma._native import CompletionArray, Record, failure, ffi, lib
from aiordma.errors import BusyError, WorkCompletionError, work_completion_error

from .enums import WCFlags, WCOpcode, WCStatus
from .posted_work import Accounts
from .resource import Node, Resource

if TYPE_CHECKING:
    from aiordma._native import handles as h

    from .context import Context


class WorkCompletion(NamedTuple):
    """How one work request ended: ``struct ibv_wc``, see ibv_poll_cq(3).

    When ``status`` is not SUCCESS only ``wr_id``, ``status``, ``vendor_err`` and ``qp_num`` are
    defined; ``opcode`` is None then. ``imm_data`` is a number in host order, None unless the
    completion has one. ``byte_len`` is defined for receives, reads and atomics.
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

    @classmethod
    def from_record(cls, record: Record, failure: WorkCompletionError | None = None) -> Self:
        """From a raw record of :meth:`CompletionQueue.poll_raw`.

        ``failure`` is what the account of the queue pair says of a failed one.
        """
        wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, flags = record
        if status:
            return cls(
                wr_id, WCStatus(status), None, vendor_err, 0, None, qp_num, 0, WCFlags(0), failure
            )
        return cls(
            wr_id,
            WCStatus.SUCCESS,
            WCOpcode(opcode),
            vendor_err,
            byte_len,
            imm_data if flags & WCFlags.WITH_IMM else None,
            qp_num,
            src_qp,
            WCFlags(flags),
        )

    @property
    def ok(self) -> bool:
        """Whether the work was done."""
        return self.status is WCStatus.SUCCESS

    def error(self, operation: str = "") -> WorkCompletionError | None:
        """The exception for a failed completion, None for a good one.

        It names the operation, and a flush has the queue pair's first failure as its cause,
        when the queue pair keeps an account (all do but those that the event loop's driver
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


class CompletionChannel(Resource["h.ChannelPointer"]):
    """Where completion queues announce that they have something; ``fd`` is for an event loop.

    ``fd`` never blocks. It is readable while an armed queue's announcement has not been taken;
    it may be readable earlier, when looking for one does the work that leads to it.
    Either :meth:`drain`, which does everything, or :meth:`get_event` and polling by hand.
    """

    def __init__(self, context: Context, pointer: h.ChannelPointer) -> None:
        self.context = context
        self.fd = pointer.fd
        destroy = context.library.calls.ibv_destroy_comp_channel
        super().__init__(Node("CompletionChannel", pointer, destroy, [context.node]))
        code = lib.aiordma_set_nonblocking(self.fd)
        if code:
            self.close()
            raise failure("fcntl", code, "the completion channel's fd")
        self.queues: weakref.WeakValueDictionary[int, CompletionQueue] = (
            weakref.WeakValueDictionary()
        )
        self.drain_state: h.DrainPointer = ffi.new("struct aiordma_drain *")
        self.drain_state.calls = context.library.table
        self.drain_state.channel = pointer
        self.accounts = Accounts()
        self._more = ffi.new("int *")
        self._room: CompletionArray | None = None
        self._events = 0

    @property
    def events(self) -> int:
        """Completion events taken so far."""
        return self._events + self.drain_state.events

    def get_event(self) -> CompletionQueue | None:
        """Take and acknowledge one announcement, None when there is none.

        The queue is not armed any more: call its ``req_notify()``, then poll it until it is
        empty. Announcements of a queue whose object is gone are taken and passed over.
        """
        cq = ffi.new("struct ibv_cq **")
        context = ffi.new("void **")
        calls = self.context.library.calls
        while calls.ibv_get_cq_event(self.pointer, cq, context):
            self._events += 1
            calls.ibv_ack_cq_events(cq[0], 1)
            queue = self.queues.get(int(ffi.cast("uintptr_t", cq[0])))
            if queue is not None:
                return queue
        return None

    def drain(self, capacity: int = 256, spin_us: int = 0) -> tuple[Iterator[Record], bool]:
        """Take every announcement, acknowledge, arm again, and poll: all in one crossing.

        Returns up to ``capacity`` records, of all queues of this channel, and whether there may
        be more, in which case the fd does not tell: call again. The records stay valid. When
        there is nothing, it goes on looking for ``spin_us`` microseconds, without the GIL.

        Each queue must have been armed once by ``req_notify()``; after that this keeps it armed.
        Closing a queue takes the announcements of the channel's others as well: call this
        afterwards, since the fd will not tell.
        """
        if self._room is None or self._room.capacity < capacity:
            self._room = CompletionArray(capacity)
        self.pointer  # noqa: B018 - raises when this is closed
        self.drain_state.spin_us = spin_us
        count = lib.aiordma_drain(self.drain_state, self._room.pointer, capacity, self._more)
        if count < 0:
            raise failure("ibv_get_cq_event", -count, f"draining {self!r}")
        return self.accounts.settled(self._room.records(count)), bool(self._more[0])

    def _details(self) -> str:
        return f"fd {self.fd}"


class CompletionQueue(Resource["h.CQPointer"]):
    """Where completions of work are found, in the order in which they were made."""

    def __init__(
        self, context: Context, pointer: h.CQPointer, channel: CompletionChannel | None
    ) -> None:
        self.context = context
        self.channel = channel
        self.accounts = channel.accounts if channel else Accounts()
        self.cqe = pointer.cqe
        self.reserved = 0
        self._room: CompletionArray | None = None
        destroy = context.library.calls.ibv_destroy_cq
        if channel is None:
            super().__init__(Node("CompletionQueue", pointer, destroy, [context.node]))
        else:
            drain_state = channel.drain_state

            def forget_and_destroy(cq: h.CQPointer) -> None:
                lib.aiordma_drain_forget(drain_state, cq)
                destroy(cq)

            super().__init__(
                Node("CompletionQueue", pointer, forget_and_destroy, [context.node, channel.node])
            )
            channel.queues[int(ffi.cast("uintptr_t", pointer))] = self
        context.route_events(int(ffi.cast("uintptr_t", pointer)), self)

    def poll(self, max: int = 16) -> list[WorkCompletion]:
        """Take up to ``max`` completions; an empty list when there are none. Never waits."""
        settle = self.accounts.settle
        return [WorkCompletion.from_record(record, settle(record)) for record in self._records(max)]

    def poll_raw(self, max: int = 256) -> Iterator[Record]:
        """As :meth:`poll`, as tuples of plain numbers in the order of WorkCompletion's fields.

        What is not defined for a completion is then whatever the device wrote.
        """
        return self.accounts.settled(self._records(max))

    def _records(self, max: int) -> Iterator[Record]:
        if self._room is None or self._room.capacity < max:
            self._room = CompletionArray(max)
        count = lib.aiordma_poll(self.pointer, self._room.pointer, max)
        if count < 0:
            raise failure("ibv_poll_cq", -count, f"the completion queue {self!r} is broken")
        return self._room.records(count)

    def req_notify(self, solicited_only: bool = False) -> None:
        """Arm: the next completion makes an announcement on the channel.

        Completions that are already there make none: poll after arming. With ``solicited_only``
        only a failure or a receive whose sender asked for it (SendFlags.SOLICITED) does.
        """
        code = lib.aiordma_req_notify(self.pointer, int(solicited_only))
        if code:
            raise failure("ibv_req_notify_cq", code if code > 0 else errno.EIO)

    def resize(self, cqe: int) -> None:
        """Change the number of entries; completions inside are kept. The device may give more.

        ValueError below what is reserved, UnsupportedError where the device cannot.
        """
        if cqe < self.reserved:
            raise ValueError(f"{self!r}: {self.reserved} entries are reserved, more than {cqe}")
        pointer = self.pointer
        self.context.library.calls.ibv_resize_cq(pointer, cqe)
        self.cqe = pointer.cqe

    # --- so that it cannot overrun ---------------------------------------------------------
    # A completion queue that overruns is broken, and every queue pair on it with it (IBTA volume
    # 1, clause 11.6.3.1). So whoever posts reserves room first: the sizes of a queue pair's two
    # queues, given back when its last completions have been polled.

    @property
    def available(self) -> int:
        """Entries that are not reserved."""
        return self.cqe - self.reserved

    def reserve(self, entries: int) -> None:
        """Set entries aside. BusyError when there are not enough; resize, or use another queue."""
        if entries > self.available:
            raise BusyError(
                f"{self!r} has {self.available} of {self.cqe} entries free, {entries} are wanted"
            )
        self.reserved += entries

    def release(self, entries: int) -> None:
        """Give reserved entries back."""
        if entries > self.reserved:
            raise ValueError(f"{self!r}: {entries} entries released, {self.reserved} reserved")
        self.reserved -= entries

    def _details(self) -> str:
        return f"{self.cqe} entries, {self.reserved} reserved"
