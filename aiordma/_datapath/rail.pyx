# A rail: one queue pair with its send queue and receives. It also has the work that waits for room,
# and the work that is left over when the rail breaks.

from libc.stdint cimport uintptr_t

cimport cython

from .memory cimport Clock, release_all
from .work_queue cimport (
    TURN_LEAVE,
    KIND_RECV,
    BEFORE_LAST,
    NO_SLOT,
    NOT_POSTED,
    TO_OTHER_DEVICE,
    TURN_STAY,
    WAIT_NONE,
    WAIT_SEND_QUEUE,
    WAS_POSTED,
    aiordma_recv,
    ibv_sge,
    post_recvs,
)

import collections
import copy

from aiordma._core.operations import OperationKind
from aiordma._native.calls import shortage_hint
from aiordma.errors import (
    BufferStateError,
    OutcomeUnknownError,
    RDMAError,
    short_cause,
    work_completion_error,
)
from aiordma.verbs._device.context import event_error
from aiordma.verbs._device.enums import EventType, WCStatus


RESERVED_ENTRIES = CONTROL_ENTRIES


cdef class SendQueue(WorkQueues):
    """A rail: the send and receive queue of one queue pair, on one event loop.

    The data path relies on these members:

    - `free` and `capacity` are the exact numbers of entries in the send queue. CONTROL_ENTRIES of
      them are reserved for control frames.
    - `failed` means that the rail accepts no more posts. `backlog.is_waiting` means that work waits for
      entries.
    - `post_checked` and `post_receives` post immediately, receives in the given order. The caller
      has checked `free` and `failed`.
    - `post` and `withdraw` are for one-sided work, which is posted in order as there is room. Work
      that still waits can be withdrawn.
    - `backlog.latest` and `backlog.has_posted` show whether all earlier work has been posted, for
      frames that follow writes.
    - After `stop`, no frames arrive, and the peer cannot access memory. After `close`, the device
      uses no memory, and every `free_memory` has been called.

    They guarantee the following:

    1. Frames arrive in the order of posting, each complete and once, until the queue pair fails.
    2. Work that is not withdrawn ends once. It ends with `on_completion`, in the order of posting,
    when the device has released its memory. Or it ends with its first `on_error`, and `free_memory`
    is called once when the device has released its memory.
    3. A write that was posted before a frame is in the peer's memory before the frame arrives.
    4. If the FrameHandler continues without the rail, the rail is `suspended` instead. `take_works`
    returns the posted work, including frames, that another rail can repeat. `backlog` has the work
    that waits for room, which that rail takes over. Other work fails with OutcomeUnknownError.
    `take_receives` returns the blocks of the receives, in order.
    5. Members do not end the connection themselves. `Owner.broken` defers that, because it may be
    called from within a post.

    A receive completion calls `received` or `received_write` of the FrameHandler, which takes over
    the lease of the block. A drain that has freed entries calls its `flush` once. When the queue
    pair fails, every waiter fails immediately, and the root cause is reported to `owner` once. For
    work that did not fail itself, the owner creates the error from this cause and a description of
    the work.
    """

    def __init__(self, driver: Driver, qp: QueuePair, owner: Owner):
        cdef uintptr_t address, extended
        self.driver, self.qp, self.owner = driver, qp, owner
        self.table, self.keys = driver.table, ReadKeys(driver.pool)
        self.backlog = Backlog(self.table.clock)
        address, extended = qp._addresses
        self.open(<ibv_qp *> address, <ibv_qp_ex *> extended, qp.capabilities.max_send_wr)
        self.served = Served(qp)
        self.count_in(Counts())
        driver.attach(qp, self)

    def __repr__(self):
        return f"<SendQueue of {self.qp!r}, {self.capacity - self.free} sends in flight>"

    def count_in(self, Counts counts not None):
        """Add this rail's traffic to `counts`, the counters of its connection."""
        self.counts = counts
        counts.open_rail(self.served)

    # ---- posting ----

    @property
    def peer(self) -> str:
        """The name of the peer in errors."""
        return self.owner.peer_name

    @property
    def suspended(self) -> bool:
        """Whether the rail has failed and the session continues on another rail."""
        return self.leftovers is not None

    @property
    def outstanding(self) -> int:
        return self.capacity - self.free + len(self.backlog)

    cpdef int post(self, WorkRequest work) except -1:
        """Post `work`, or queue it until there is room."""
        if self.backlog.is_waiting or work.request_count + CONTROL_ENTRIES > self.free:
            return self.post_in_turn(work)
        return self.post_checked(work)

    cdef int post_in_turn(self, WorkRequest work) except -1:
        """Queue `work` behind all work that is already waiting for room."""
        # On a rail that broke, `post_checked` keeps the work for the next lead, or fails it.
        if self.error is not None and not (keeps_new_work(self) and work.can_move(NOT_POSTED)):
            return self.post_checked(work)
        if work not in self.backlog.works:
            self.backlog.append(work)
        return self.post_backlog()

    cpdef int post_checked(self, WorkRequest work) except -1:
        """Post `work` ahead of the backlog. The caller has checked for room and for its turn."""
        if self.error is None:
            return post_now(self, work)
        if keeps_new_work(self):
            return set_aside(self, work, NOT_POSTED)
        work.on_error(self.error_of(work))
        work.free_memory()
        return 0

    cdef int post_backlog(self) except -1:
        """Post work from the front of the backlog, until there is no room or the work must wait."""
        cdef WorkRequest first
        while len(self.backlog.works) and self.has_room() and not self.backlog.held:
            first = self.backlog.first()
            turn = first.take_turn()
            if turn == TURN_STAY:
                break
            if turn == TURN_LEAVE:
                self.backlog.remove(first)
                continue
            reason = first.reason_not_to_post()
            if reason is not None:
                self.backlog.remove(first)
                first.end_unposted(reason)
            elif first.request_count + CONTROL_ENTRIES > self.free:
                # Post as many requests as fit. Only a chain has several, and the rest stays first.
                post_now(self, (<object> first).part(self.free - CONTROL_ENTRIES))
            else:
                self.backlog.remove(first)
                post_now(self, first)
        return self.backlog.update_wait()

    def withdraw(self, works: Iterable[WorkRequest]) -> bool:
        """Drop any of `works` that still waits for room. Returns False if all have been posted."""
        cdef WorkRequest work
        found = [work for work in works if self.backlog.remove(work)]
        for work in found:
            work.free_memory()
        if found:
            self.backlog.update_wait()
            self.use_freed_entries()  # for work that was queued behind them
        return bool(found)

    # ---- receives ----

    cdef uint32_t post_receives(self, list blocks, uint32_t length) except? 0xFFFFFFFF:
        """Post at most CHAIN receives with one call.

        The caller observes the queue pair's `max_recv_wr`. The connection ends if this process has
        no memory for their slots, or if the blocks belong to another rail's pool and cannot be
        registered with this rail's device.

        Returns:
            The number of receives that the device has accepted or the next lead will accept.
        """
        cdef aiordma_recv[CHAIN] receives
        cdef ibv_sge[CHAIN] sges
        cdef uint32_t[CHAIN] indices
        cdef uint32_t i, count = len(blocks), taken = 0, posted = 0
        cdef PoolBlock block
        cdef int code = 0
        try:
            for i in range(count if self.error is None and self.native_qp != NULL else 0):
                block = <PoolBlock> blocks[i]
                sges[i].addr, sges[i].length, sges[i].lkey = (
                    block.address, length, self.keys.local_key(block)
                )
                indices[i] = self.table.take_slot(self, KIND_RECV, block, 0)
                taken += 1
                receives[i].wr_id = self.table.wr_id(indices[i])
                receives[i].first_sge, receives[i].num_sge = i, 1 if length else 0
            if taken:
                code = post_recvs(self, receives, taken, sges, &posted)
        except (RDMAError, OSError, MemoryError) as error:
            self.connection_broke(error)
        for i in range(posted, taken):
            self.table.free_slot(indices[i])
        if code:
            self.rail_broke(self.qp._post_error("ibv_post_recv", code, 0))
        if self.leftovers is not None:
            self.leftovers.late_receives.extend(blocks[posted:])
            return count
        for i in range(posted, count):
            (<PoolBlock> blocks[i]).end_lease()
        return posted

    # ---- completions and events ----

    cdef int on_error_completion(
        self, object work, uint8_t kind, const aiordma_completion *wc
    ) except -1:
        cdef bint before_last = wc.wr_id & BEFORE_LAST != 0
        cdef WorkRequest request = None if isinstance(work, PoolBlock) else <WorkRequest?> work
        self.qp.context._failures[wc.status] += 1
        is_handled = self.failed  # all work in flight, including this, has got the error
        if wc.status == FLUSHED and self.stopped and not is_handled:
            is_handled = True  # flushed on purpose; other work is flushed in its turn
            if request is not None:
                request.on_error(self.owner.error_for(self.error))
        if wc.status == FLUSHED and not is_handled:
            self.driver.take_device_events()  # an event may explain the state of the queue pair
            if self.leftovers is not None:  # an event has suspended the rail
                is_handled = True
                if request is not None and not before_last:  # `suspend` has kept all later work
                    set_aside(self, request, WAS_POSTED, IS_FIRST)
        if not is_handled:
            error = work_completion_error(
                wc.status,
                operation=OperationKind(kind).text,
                qp_num=self.qp.qp_num,
                wr_id=wc.wr_id,
                vendor_err=wc.vendor_err,
                detail=shortage_hint() if wc.status == RETRY_EXCEEDED else "",
                what=request.text(self.peer) if request is not None else "",
            )
            # If an earlier request of a chain fails, the device still has the rest of the chain.
            failed_request = None if before_last else request
            if wc.status in RAIL_FAILURES and suspend(self, error, failed_request):
                pass  # the request has been set aside, or has got its error
            elif request is not None:
                if self.error is not None:
                    request.on_error(self.error_of(request))
                elif wc.status in RAIL_FAILURES:
                    request.on_error(self.owner.error_for(error))
                else:  # a copy, because the frames of the error may refer to this object
                    request.on_error(copy.copy(error))
            if wc.status in RAIL_FAILURES:
                self.rail_broke(error)  # without effect if `suspend` has returned True
            else:
                self.connection_broke(error)
        if before_last:
            return 0
        if request is not None:
            return request.free_memory()
        if self.leftovers is not None:
            self.leftovers.returned_receives.append(work)
        else:
            (<PoolBlock> work).end_lease()
        return 0

    cdef object error_of(self, WorkRequest work):
        """Return the error for work that did not fail itself. Its cause is `error`."""
        if self.leftovers is not None:
            return self.unknown_outcome(work)
        return self.owner.error_for(self.error, work.text(self.peer))

    cdef object unknown_outcome(self, WorkRequest work):
        why = "" if self.error is None else f": {short_cause(self.error)}"
        return OutcomeUnknownError(
            f"the outcome of {work.text(self.peer)} is unknown, because the rail broke; the "
            f"connection continues on another rail{why}"
        )

    cdef int use_freed_entries(self) except -1:
        """Give freed entries alternately to the backlog and to messages, so that neither starves.
        """
        self.messages_first = not self.messages_first
        if self.messages_first:
            flush_or_report_empty(self)
        if self.backlog.is_waiting:
            self.post_backlog()
            if not self.backlog.is_waiting:  # refused work has no completion that calls this again
                return flush_or_report_empty(self)
        if not self.messages_first:
            flush_or_report_empty(self)
        return 0

    def device_event(self, event: AsyncEvent):
        if event.type in REFUSALS:
            self.connection_broke(event_error(event, self.qp.context))
        elif event.type in FATAL_EVENTS:
            self.rail_broke(event_error(event, self.qp.context))
        elif event.type is EventType.PORT_ERR:
            error = event_error(event, self.qp.context)
            is_lead = self.stripes is not None or self.number == 0
            if not is_lead:
                self.rail_broke(error)
            elif (
                self.frame_handler is not None
                and self.frame_handler.begin_failover(self, TO_OTHER_DEVICE)
            ):
                # Fail over only to a rail on another device. If there is none, keep the lead,
                # because a card's queue pair recovers if its port comes back before the retries are
                # exhausted.
                suspend(self, error)

    # ---- the end ----

    def rail_broke(self, error: BaseException):
        """Fail this rail because its queue pair, device or path has failed.

        Another rail may take over.
        """
        if not suspend(self, error):
            self.connection_broke(error)

    cdef list take_receives(self):
        """Return the blocks of the receives of a suspended and closed rail, in order."""
        cdef list blocks = [] if self.leftovers is None else self.leftovers.take_receives()
        if self.expects_resume and blocks:  # only this rail could receive the Resume
            (<PoolBlock> blocks.pop(0)).end_lease()
        return blocks

    def connection_broke(self, error: BaseException):
        """Fail this queue pair with an error that affects all rails of the connection."""
        if not self.failed:
            self.fail(error)
            self.owner.broken(self.error)

    def fail(self, error: BaseException):
        """Fail all work and post nothing more. Only the first call has an effect.

        The owner already knows the reason `error`, or will be told.
        """
        cdef WorkRequest work
        if self.failed:
            return
        self.error = self.error or error
        self.failed = True
        backlog = self.backlog.take_all()
        for work in self.outstanding_work():
            fail_work(self, work)
        for work in backlog:
            fail_work(self, work)
            work.free_memory()

    def retire(self, error: BaseException):
        """Post nothing more because of `error`, and tell the owner when outstanding work has ended.
        """
        self.error, self.retiring = error, True
        flush_or_report_empty(self)

    def stop(self, error: BaseException):
        """Stop receiving, but deliver the messages whose senders already know of their arrival.

        The queue pair goes to ERR, in which it accepts nothing and flushes the receives behind
        these messages. Outstanding work fails with `error`. Do not call this from within a drain.
        """
        if self.failed or self.stopped:
            return
        self.error, self.stopped = error, True
        drain_receives(self)

    def close(self):
        """Destroy the queue pair. Afterwards, the device does not use any of its memory."""
        cdef list receives = []
        if self.native_qp == NULL:
            return
        self.fail(BufferStateError("the queue pair was closed"))
        if self.leftovers is not None:
            # The next lead takes over the blocks of the receives in the order of posting.
            drain_receives(self)
        self.driver.detach(self.qp)
        try:
            self.keys.close_windows()
        finally:
            self.qp.close()  # if it fails, the memory of its work is kept
            self.native_qp = NULL
            self.counts.close_rail(self.served)
            while self.sends.first != NO_SLOT:
                (<WorkRequest> self.take_first(&self.sends)).free_memory()
            while self.receives.first != NO_SLOT:
                receives.append(self.take_first(&self.receives))
            if self.leftovers is not None:
                self.leftovers.returned_receives += receives
            else:
                release_all(receives)
            self.frame_handler = self.stripes = None


cdef bint keeps_new_work(SendQueue rail) noexcept:
    """Return whether the rail is suspended and keeps new work for the next lead."""
    return rail.leftovers is not None and rail.leftovers.unposted is not None


cdef int post_now(SendQueue rail, WorkRequest work) except -1:
    """Post the work. If that fails, the rail breaks, and another rail may take over the work."""
    cdef WorkRequestTable table = rail.table
    cdef uint32_t posted = 0, index
    cdef int code
    if not work.request_count or work.request_count > rail.free or rail.native_qp == NULL:
        raise ValueError(
            f"{work.request_count} requests do not fit in a send queue with {rail.free} of "
            f"{rail.capacity} entries free"
        )
    index = table.take_slot(rail, work.kind, work, work.request_count)
    rail.free -= work.request_count
    code = work.post_to(rail, table.wr_id(index), &posted)
    if code:
        if not posted:
            table.free_slot(index)
        error = rail.qp._post_error("ibv_post_send", code, posted)
        if suspend(rail, error):
            return 0 if posted else set_aside(rail, work, NOT_POSTED, IS_FIRST)
        rail.error = rail.error or error
        work.on_error(error)
        if not posted:  # otherwise, the device has its memory until the queue pair is gone
            work.free_memory()
        rail.rail_broke(error)
    return 0


cdef int flush_or_report_empty(SendQueue rail) except -1:
    """Send waiting messages. If the rail is retiring, tell the owner when it is empty instead."""
    if rail.retiring:
        if rail.free == rail.capacity:
            rail.owner.emptied()
    elif rail.frame_handler is not None:
        rail.frame_handler.flush()
    return 0


cdef bint suspend(SendQueue rail, object error, WorkRequest failed=None) except -1:
    """Suspend the rail if the session continues on another one.

    Returns False, without any effect, if it does not. `failed` is work that the device no longer
    has.
    """
    cdef WorkRequest work
    if rail.failed or rail.error is not None or rail.frame_handler is None:
        return False
    if not rail.frame_handler.begin_failover(rail):
        return False
    rail.error, rail.failed, rail.leftovers = error, True, Leftovers()
    rail.backlog.held = True
    if failed is not None:
        set_aside(rail, failed, WAS_POSTED)
    for work in rail.outstanding_work():
        set_aside(rail, work, WAS_POSTED)
    for work in tuple(rail.backlog.works):
        if not work.can_move(NOT_POSTED):
            rail.backlog.remove(work)
            fail_work(rail, work)
            work.free_memory()
    rail.backlog.update_wait()
    rail.owner.broken(error)
    return True


cdef int set_aside(
    SendQueue rail, WorkRequest work, bint was_posted, bint is_first=IS_LAST
) except -1:
    """Keep work for another rail, or end it.

    `is_first` places it at the front of the posted or the unposted work.
    """
    if not work.can_move(was_posted):
        fail_work(rail, work)
    else:
        rail.leftovers.keep(work, was_posted, is_first)
    return 0 if was_posted else work.free_memory()


cdef int fail_work(SendQueue rail, WorkRequest work) except -1:
    try:
        work.on_error(rail.error_of(work))
    except RuntimeError:
        if not rail.table.wakeups.loop.is_closed():
            raise
        # A closed loop runs no callbacks, so there is no task to wake.
    return 0


cdef int drain_receives(SendQueue rail) except -1:
    try:
        rail.qp.to_error()
    except (RDMAError, OSError):
        return 0  # the device has failed
    # Some drivers do not flush receives, so stop when no more completions arrive.
    while rail.receives.first != NO_SLOT and rail.driver.poll():
        pass
    return 0


# ---- work that is not in the send queue ----

@cython.final
cdef class Backlog:
    """The queue of work that waits for send queue entries. Each item has a sequence number."""

    def __cinit__(self, Clock clock not None):
        self.works, self.wait = collections.OrderedDict(), Wait.__new__(Wait, clock)

    def __len__(self) -> int:
        return len(self.works)

    cdef int append(self, WorkRequest work) except -1:
        self.latest += 1
        self.works[work] = self.latest
        return 0

    cdef WorkRequest first(self):
        return next(iter(self.works))

    cdef bint remove(self, WorkRequest work) except -1:
        return self.works.pop(work, None) is not None

    cdef list take_all(self):
        works = list(self.works)
        self.works.clear()
        self.update_wait()
        return works

    cdef int take_over(self, Backlog previous) except -1:
        """Insert the work of `previous`, including its numbers, in front of this backlog's work."""
        previous.works.update(self.works)
        self.works, previous.works = previous.works, collections.OrderedDict()
        self.latest = max(self.latest, previous.latest)
        previous.held = False
        previous.update_wait()
        return self.update_wait()

    cdef int update_wait(self) except -1:
        """Update `is_waiting` and the wait statistics after a change."""
        self.is_waiting = self.held or bool(self.works)
        self.wait.set_reason(WAIT_SEND_QUEUE if self.is_waiting else WAIT_NONE)
        return 0

    cdef bint has_posted(self, uint64_t number) except -1:
        """Return whether all work up to `number` has been posted or withdrawn."""
        return not self.is_waiting or next(iter(self.works.values()), number + 1) > number


@cython.final
cdef class Leftovers:
    """Work and receives of a broken rail, for the rail on which the session continues."""

    def __cinit__(self):
        self.posted, self.unposted, self.returned_receives, self.late_receives = [], [], [], []

    cdef int keep(self, WorkRequest work, bint was_posted, bint is_first) except -1:
        """Add work for another rail, behind the posted or the unposted work.

        With IS_FIRST, add it in front of that work.
        """
        work.kept = True
        if was_posted and is_first:
            self.posted.insert(0, work)
        elif was_posted or is_first:  # the first work that was not posted follows all posted work
            self.posted.append(work)
        else:
            self.unposted.append(work)
        return 0

    cdef list take_works(self, list unfinished):
        """Remove and return all work in posting order.

        `unfinished` is work of earlier leads that this rail had yet to post again. The
        session posts no new work before that is done, so this work comes before `unposted`.
        """
        works = [*(self.posted or ()), *unfinished, *(self.unposted or ())]
        self.posted = self.unposted = None
        return works

    cdef list take_receives(self):
        blocks = self.returned_receives + self.late_receives
        self.returned_receives, self.late_receives = [], []
        return blocks


FLUSHED = int(WCStatus.WR_FLUSH_ERR)
RETRY_EXCEEDED = int(WCStatus.RETRY_EXC_ERR)
# Completion statuses that indicate a failure of the peer or the path, not an error in the request.
RAIL_FAILURES: frozenset[WCStatus] = frozenset(
    {WCStatus.WR_FLUSH_ERR, WCStatus.RETRY_EXC_ERR, WCStatus.RNR_RETRY_EXC_ERR}
)
FATAL_EVENTS: frozenset[EventType] = frozenset(
    {
        EventType.QP_FATAL,
        EventType.CQ_ERR,
        EventType.SRQ_ERR,
        EventType.DEVICE_FATAL,
    }
)
REFUSALS: frozenset[EventType] = frozenset(  # the peer's request was rejected
    {EventType.QP_REQ_ERR, EventType.QP_ACCESS_ERR}
)
