"""Work under way on one queue pair: every posted request has an owner, and an end.

Some facts: a send queue has a fixed number of entries, and one that is full refuses; a work
request that was posted cannot be taken back, and its memory belongs to the device until its
completion; when a queue pair dies, completions of what was under way may or may not come.

So: what finds no entry waits here, first come first served, and can be withdrawn as long as it
does; a cancellation after that changes nothing for the device; when the queue pair dies every
waiter fails at once, and memory returns when the completion arrives or the queue pair has been
destroyed, whichever is first.

Messages wait elsewhere, for credits.  None of them may be posted before work that was there before
it: a write and then the message about it keep that order.  So each knows its `turn`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import ClassVar, cast

from .. import verbs
from .._core.operations import OperationKind
from .._loop.driver import Driver, event_error
from .._native import Block, Fetch, Frame, Queue, Run, WrongCompletion
from .._native import Work as NativeWork
from ..errors import BufferStateError, work_completion_error

# Entries of the send queue that only control frames may use, so that a queue full of the user's
# own work cannot keep back the credits that the peer waits for.
CONTROL_ENTRIES = 4


class Work(NativeWork):
    """One work request with one scatter/gather element.  Subclasses say what happens at its end.

    Exactly one of `done` and `failed` is called.  `done` is the completion: the device has let go
    of the memory.  After `failed`, which may come before the completion, `release` says when it
    has.
    """

    entries: ClassVar[int] = 1

    __slots__ = ()

    def done(self, byte_len: int) -> None:
        raise NotImplementedError

    def failed(self, error: BaseException) -> None:
        raise NotImplementedError

    def release(self) -> None:
        raise NotImplementedError


Posted = Work | Run | Frame | Fetch
"""What stands in the send queue."""


class WorkQueue(Queue):
    """The send and the receive queue of one queue pair, on one event loop.

    The slots, the account of the send queue and what completes well are native/fast's; here is
    what waits for room, and how everything ends.

    `on_failure` is called once, with the root cause, when the queue pair has failed; `on_room`
    when entries of the send queue have become free; `waiter_error` makes the error that those
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
        self.qp = qp
        self.table = driver.operations
        self.address, self.extended_address = qp.addresses
        self.capacity = self.free = qp.capabilities.max_send_wr
        self.reserved = CONTROL_ENTRIES
        self.error: BaseException | None = None
        self._on_failure = on_failure
        self._waiter_error = waiter_error
        self.on_room: Callable[[], None] = noop
        self._messages_first = False
        self._backlog: OrderedDict[Work | Run | Fetch, int] = OrderedDict()
        self._latest = 0  # the number of the one that came to it last
        driver.attach(qp, self)

    def __repr__(self) -> str:
        return f"<WorkQueue of {self.qp!r}, {self.capacity - self.free} sends under way>"

    # ---- posting -------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Entries of the send queue that the user's work may take now."""
        return self.free - CONTROL_ENTRIES

    @property
    def control_room(self) -> int:
        """Entries that control frames may take now."""
        return self.free

    @property
    def outstanding(self) -> int:
        return self.capacity - self.free + len(self._backlog)

    def post(self, work: Work | Run | Fetch) -> None:
        """Posts `work`, or keeps it until there is room.  Its end is told to `work` itself."""
        if self.error is not None:
            work.failed(self._waiter_error(self.error))
            work.release()
        elif self._backlog or work.entries > self.room:
            self._latest += 1
            self._backlog[work] = self._latest
            self._post_backlog()
        else:
            self._post(work)

    def _post_backlog(self) -> None:
        while self._backlog and (room := self.room) > 0:
            first = next(iter(self._backlog))
            if isinstance(first, Run) and first.entries > room:
                self._post(first.part(room))
            else:
                del self._backlog[first]
                self._post(first)
        self.backlogged = bool(self._backlog)

    def withdraw(self, runs: Iterable[Run]) -> None:
        """Drops those that have not been posted; they are not awaited any more."""
        found = [run for run in runs if self._backlog.pop(run, None) is not None]
        for run in found:
            if run.waiter is not None:
                run.waiter.cancel()
            run.release()
        if found:
            self.backlogged = bool(self._backlog)
            self._use_room()  # what waited behind them alone

    @property
    def turn(self) -> int:
        """For `is_turn`: behind all that has been asked for up to now."""
        return self._latest

    def is_turn(self, turn: int) -> bool:
        """Whether all that was before that `turn` has been posted, or withdrawn."""
        return not self.backlogged or next(iter(self._backlog.values())) > turn

    def post_frame(self, work: Posted) -> None:
        """Posts `work` past the backlog; the caller has seen `room`, or `control_room`, and the
        `turn` of what has one.
        """
        if self.error is not None:
            work.failed(self._waiter_error(self.error))
            work.release()
        else:
            self._post(work)

    def _post(self, work: Posted) -> None:
        code, posted = self.post_work(work)
        if code:
            self._refused(work, code, posted)

    def _refused(self, work: Posted, code: int, posted: int) -> None:
        error = self.qp.post_error("ibv_post_send", code, posted)
        work.failed(error)
        if not posted:  # else its memory is held until the queue pair is gone
            work.release()
        self.fail(error)

    def post_receive(self, block: Block, length: int) -> None:
        """Posts a receive of so many bytes; the caller keeps to the queue pair's `max_recv_wr`."""
        if self.error is not None:
            block.release()
        elif code := self.post_block(block, length):
            block.release()
            self.fail(self.qp.post_error("ibv_post_recv", code, 0))

    # ---- completions and events ----------------------------------------------------------

    def _went_wrong(self, work: Posted | Block, facts: WrongCompletion) -> None:
        kind, status, vendor_err, wr_id, earlier = facts
        told = self.failed  # all that was under way was, and this was
        if status == verbs.WCStatus.WR_FLUSH_ERR and not told:
            self._driver.take_device_events()  # what put the queue pair into this state
        if not told:
            error = work_completion_error(
                status,
                operation=OperationKind(kind).text,
                qp_num=self.qp.qp_num,
                wr_id=wr_id,
                vendor_err=vendor_err,
            )
            if not isinstance(work, Block):
                if self.error is not None:
                    work.failed(self._waiter_error(self.error))
                elif status in OF_THE_CONNECTION:
                    work.failed(self._waiter_error(error))
                else:
                    work.failed(error)
            self.fail(error)
        if not earlier:
            work.release()

    def _broken(self, error: Exception) -> None:
        self._driver.report(self, error)

    def _use_room(self) -> None:
        """Freed entries go in turn to the backlog and to the messages, so that neither starves."""
        self._messages_first = not self._messages_first
        if self._messages_first:
            self.on_room()
        if self._backlog:
            self._post_backlog()
        if not self._messages_first:
            self.on_room()

    def watch_room(self, on_room: Callable[[], None]) -> None:
        """From now on it is called whenever entries of the send queue have become free."""
        self.on_room = on_room
        self.watched = True

    def device_event(self, event: verbs.AsyncEvent) -> None:
        if event.type in FATAL_EVENTS:
            self.fail(event_error(event, self.qp.context))

    # ---- the end -------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """The queue pair is of no more use, for this reason.  The first call decides."""
        if self.failed:
            return
        error = self.error = self.error or error
        self.failed = True
        backlog, self._backlog = self._backlog, OrderedDict()
        self.backlogged = False
        for work in cast("list[Posted]", self.under_way()):
            work.failed(self._waiter_error(error))
        for work in backlog:
            work.failed(self._waiter_error(error))
            work.release()
        self._on_failure(error)

    def refuse(self, error: BaseException) -> None:
        """Nothing more is posted here, for this reason; what is under way goes on, or fails so."""
        self.error = error

    def close(self) -> None:
        """Destroys the queue pair; after this the device touches none of its memory any more."""
        self.fail(BufferStateError("the queue pair was closed"))
        self._driver.detach(self.qp)
        self.qp.close()
        for work in cast("list[Posted]", self.clear_slots()):
            work.release()
        self.on_room = noop
        self.user = None
        self.traffic = None


def noop(*_: object) -> None:
    """A callback for after the end."""


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
