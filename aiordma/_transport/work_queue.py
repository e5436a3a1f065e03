"""Work under way on one queue pair: every posted request has an owner, and an end.

Some facts: a send queue has a fixed number of entries, and one that is full refuses; a work
request that was posted cannot be taken back, and its memory belongs to the device until its
completion; when a queue pair dies, completions of what was under way may or may not come.

So: what finds no entry waits here, first come first served; whoever stops waiting changes nothing
for the device; when the queue pair dies every waiter fails at once, and memory returns when the
completion arrives or the queue pair has been destroyed, whichever is first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ClassVar, Protocol, Self, cast

from .. import verbs
from .._core.operations import OperationKind, OperationSlot
from .._core.send_queue import SendQueue
from ..driver import Driver, event_error
from ..errors import BufferStateError, PostError, RDMAError, VerbsError, work_completion_error

SIGNALED = int(verbs.SendFlags.SIGNALED)
WITH_IMM = int(verbs.WCFlags.WITH_IMM)

# Entries of the send queue that only control frames may use, so that a queue full of the user's
# own work cannot keep back the credits that the peer waits for.
CONTROL_ENTRIES = 4


class SendWork(Protocol):
    """Work for the send queue, of one work request or of several that are posted together.

    Exactly one of `done` and `failed` is called.  `done` is the completion: the device has let go
    of the memory.  After `failed`, which may come before the completion, `release` says when it
    has.
    """

    @property
    def kind(self) -> OperationKind: ...

    @property
    def entries(self) -> int:
        """How many work requests it is."""

    def part(self, entries: int) -> Self:
        """The first of them, as work of its own; it is the rest from now on."""

    def post(self, qp: verbs.QueuePair, wr_id: int) -> None: ...

    def done(self, byte_len: int) -> None: ...

    def failed(self, error: BaseException) -> None: ...

    def release(self) -> None: ...


class Work:
    """One work request with one scatter/gather element.  Subclasses say what happens at its end."""

    entries: ClassVar[int] = 1

    __slots__ = ("address", "imm", "kind", "length", "lkey", "opcode", "remote_address", "rkey")

    def __init__(
        self,
        kind: OperationKind,
        opcode: int,
        address: int,
        length: int,
        lkey: int,
        remote_address: int = 0,
        rkey: int = 0,
        imm: int = 0,
    ) -> None:
        self.kind = kind
        self.opcode = opcode
        self.address = address
        self.length = length
        self.lkey = lkey
        self.remote_address = remote_address
        self.rkey = rkey
        self.imm = imm

    def post(self, qp: verbs.QueuePair, wr_id: int) -> None:
        qp.post_send_one(
            wr_id,
            self.opcode,
            SIGNALED,
            self.address,
            self.length,
            self.lkey,
            self.remote_address,
            self.rkey,
            self.imm,
        )

    def part(self, entries: int) -> Self:
        raise NotImplementedError("one work request has no parts")

    def done(self, byte_len: int) -> None:
        raise NotImplementedError

    def failed(self, error: BaseException) -> None:
        raise NotImplementedError

    def release(self) -> None:
        raise NotImplementedError


class ReceiveWork(Protocol):
    """A posted receive: memory, and whom to tell."""

    address: int
    length: int
    lkey: int

    def done(self, byte_len: int) -> None: ...

    def written(self, byte_len: int, imm: int) -> None:
        """It was used up by a write of the peer with immediate data; it holds nothing."""

    def release(self) -> None: ...


class WorkQueue:
    """The send and the receive queue of one queue pair, on one event loop.

    `on_failure` is called once, with the root cause, when the queue pair has failed; `on_room`
    whenever an entry of the send queue has become free; `waiter_error` makes the error that those
    get who waited for something else than what failed.
    """

    def __init__(
        self,
        driver: Driver,
        qp: verbs.QueuePair,
        on_failure: Callable[[BaseException], None],
        waiter_error: Callable[[BaseException], BaseException],
    ) -> None:
        self._driver = driver
        self._operations = driver.operations
        self.qp = qp
        self.error: BaseException | None = None
        self.completions = 0  # good ones: each is a sign of life of the peer's device
        self._on_failure = on_failure
        self._waiter_error = waiter_error
        self.on_room: Callable[[], None] = lambda: None
        self._messages_first = False
        self._sends: SendQueue[OperationSlot] = SendQueue(qp.capabilities.max_send_wr)
        self._receives: dict[int, OperationSlot] = {}
        self._backlog: deque[SendWork] = deque()
        driver.attach(qp, self)

    def __repr__(self) -> str:
        return f"<WorkQueue of {self.qp!r}, {len(self._sends)} sends under way>"

    # ---- posting -------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Entries of the send queue that the user's work may take now."""
        return self._sends.free - CONTROL_ENTRIES

    @property
    def control_room(self) -> int:
        """Entries that control frames may take now."""
        return self._sends.free

    @property
    def outstanding(self) -> int:
        return len(self._sends) + len(self._backlog)

    def post(self, work: SendWork) -> None:
        """Posts `work`, or keeps it until there is room.  Its end is told to `work` itself."""
        if self.error is not None:
            work.failed(self._waiter_error(self.error))
            work.release()
        elif self._backlog or work.entries > self.room:
            self._backlog.append(work)
            self._post_backlog()
        else:
            self._post(work)

    def _post_backlog(self) -> None:
        while self._backlog and (room := self.room) > 0:
            if self._backlog[0].entries > room:
                self._post(self._backlog[0].part(room))
            else:
                self._post(self._backlog.popleft())

    def post_frame(self, work: SendWork) -> None:
        """Posts `work` past the backlog; the caller has seen `room`, or `control_room`."""
        if self.error is not None:
            work.failed(self._waiter_error(self.error))
            work.release()
        else:
            self._post(work)

    def _post(self, work: SendWork) -> None:
        slot = self._operations.post(work.kind, None, work, self)
        self._sends.post(slot, work.entries)
        try:
            work.post(self.qp, slot.wr_id)
        except (VerbsError, BufferStateError) as error:
            work.failed(error)
            # If some of it was posted, its memory is held until the queue pair is gone.
            if not (isinstance(error, PostError) and error.bad_index):
                self._sends.withdraw()
                self._operations.withdraw(slot)
                work.release()
            self.fail(error)

    def post_receive(self, receive: ReceiveWork) -> None:
        """Posts a receive; the caller keeps to the queue pair's `max_recv_wr`."""
        if self.error is not None:
            receive.release()
            return
        slot = self._operations.post(OperationKind.RECV, None, receive, self)
        try:
            self.qp.post_recv_one(slot.wr_id, receive.address, receive.length, receive.lkey)
        except (VerbsError, BufferStateError) as error:
            self._operations.withdraw(slot)
            receive.release()
            self.fail(error)
        else:
            self._receives[slot.wr_id] = slot

    # ---- completions and events ----------------------------------------------------------

    def complete(
        self,
        slot: OperationSlot,
        status: int,
        byte_len: int,
        imm: int,
        wc_flags: int,
        vendor_err: int,
    ) -> None:
        if status == verbs.WCStatus.WR_FLUSH_ERR and self.error is None:
            self._driver.look_for_events()  # what put the queue pair into this state
        if slot.kind is OperationKind.RECV:
            del self._receives[slot.wr_id]
            receive = cast(ReceiveWork, slot.memory)
            if status == 0 and self.error is None:
                self.completions += 1
                if wc_flags & WITH_IMM:
                    receive.written(byte_len, imm)
                else:
                    receive.done(byte_len)
            else:
                if status:
                    self.fail(self._status_error(slot, status, vendor_err))
                receive.release()
            return
        self._sends.complete(slot)
        work = cast(SendWork, slot.memory)
        if self.error is not None:
            work.release()  # `failed` was called when the queue pair failed
        elif status == 0:
            self.completions += 1
            work.done(byte_len)
            self._use_room()
        else:
            self._work_failed(slot, work, status, vendor_err)
            work.release()

    def earlier_failed(self, slot: OperationSlot, status: int, vendor_err: int) -> None:
        if self.error is None:
            self._work_failed(slot, cast(SendWork, slot.memory), status, vendor_err)

    def _work_failed(
        self, slot: OperationSlot, work: SendWork, status: int, vendor_err: int
    ) -> None:
        error = self._status_error(slot, status, vendor_err)
        work.failed(self._waiter_error(error) if status in OF_THE_CONNECTION else error)
        self.fail(error)

    def _status_error(self, slot: OperationSlot, status: int, vendor_err: int) -> RDMAError:
        return work_completion_error(
            status,
            operation=slot.kind.text,
            qp_num=self.qp.qp_num,
            wr_id=slot.wr_id,
            vendor_err=vendor_err,
        )

    def _use_room(self) -> None:
        """Freed entries go in turn to the backlog and to the messages, so that neither starves."""
        self._messages_first = not self._messages_first
        if self._messages_first:
            self.on_room()
        self._post_backlog()
        if not self._messages_first:
            self.on_room()

    def device_event(self, event: verbs.AsyncEvent) -> None:
        if event.type in FATAL_EVENTS:
            self.fail(event_error(event, self.qp.context))

    # ---- the end -------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """The queue pair is of no more use, for this reason.  The first call decides."""
        if self.error is not None:
            return
        self.error = error
        backlog, self._backlog = self._backlog, deque()
        for slot in self._sends:
            cast(SendWork, slot.memory).failed(self._waiter_error(error))
        for work in backlog:
            work.failed(self._waiter_error(error))
            work.release()
        self._on_failure(error)

    def close(self) -> None:
        """Destroys the queue pair; after this the device touches none of its memory any more."""
        self.fail(BufferStateError("the queue pair was closed"))
        self._driver.detach(self.qp)
        self.qp.close()
        for slot in (*self._sends.clear(), *self._receives.values()):
            owned = slot.memory
            self._operations.complete(slot.wr_id)
            self._operations.release(slot)
            cast(ReceiveWork, owned).release()
        self._receives.clear()


# Failures that are not about the work request that happens to tell of them: the peer or the way to
# it is gone.  Their waiter gets the same error as all others.
OF_THE_CONNECTION = frozenset(
    {
        verbs.WCStatus.WR_FLUSH_ERR,
        verbs.WCStatus.RETRY_EXC_ERR,
        verbs.WCStatus.RNR_RETRY_EXC_ERR,
    }
)

FATAL_EVENTS = frozenset(
    {
        verbs.EventType.QP_FATAL,
        verbs.EventType.QP_REQ_ERR,
        verbs.EventType.QP_ACCESS_ERR,
        verbs.EventType.CQ_ERR,
        verbs.EventType.SRQ_ERR,
        verbs.EventType.DEVICE_FATAL,
    }
)
