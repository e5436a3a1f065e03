# The table of an event loop's outstanding work requests, and the dispatch of their completions.
#
# A failed completion defines only wr_id, status, qp_num and vendor_err (ibv_poll_cq(3)). The
# completion queue may also still contain completions of a destroyed queue pair. All posted work
# therefore occupies a slot, which its wr_id identifies:
#
#   bits 63..32  generation: the number of uses of the slot
#   bit  31      BEFORE_LAST: set unless the request is the last of a chain
#   bits 30..24  kind of operation
#   bits 23..0   index

from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.string cimport memset

cimport cython


from aiordma._core.operations import OperationKind
from aiordma._native import ffi, fork, lib


cdef extern from "<arpa/inet.h>" nogil:
    uint32_t htonl(uint32_t)

cdef enum:
    FIRST_SLOTS = 256
    MAX_SLOTS = 1 << 24
    BATCH = 128
    RELEASE_GIL = 4096   # bytes; posting a shorter request is faster than releasing the GIL
    NOT_MEASURED = -1

cdef int (*native_drain)(aiordma_drain *, aiordma_completion *, int, int *) noexcept nogil

cdef uintptr_t drain_address = int(ffi.cast("uintptr_t", ffi.addressof(lib, "aiordma_drain")))
native_drain = <int (*)(aiordma_drain *, aiordma_completion *, int, int *) noexcept nogil> drain_address

COMPLETIONS_PER_CALL = BATCH


# ---- work requests ---------------------------------------------------------------------------------

cdef class WorkRequest:
    """A work request for one piece of memory.

    A subclass defines what happens when it ends: `on_completion`, `on_error` and `free_memory` in
    Cython, or `done`, `failed` and `release` in Python.
    """

    def __cinit__(self):
        self.request_count = 1

    def __init__(
        self, kind: int, opcode: int, address: int, length: int, lkey: int,
        remote_address: int = 0, rkey: int = 0, imm: int = 0,
    ):
        self.kind, self.opcode, self.length, self.lkey = kind, opcode, length, lkey
        self.address, self.remote_address, self.rkey, self.imm = address, remote_address, rkey, imm

    cdef int on_completion(self, uint32_t byte_len) except -1:
        self.done(byte_len)
        return 0

    cdef int on_error(self, object error) except -1:
        """Handle a failure. The device may use the memory until `free_memory`."""
        self.failed(error)
        return 0

    cdef object reason_not_to_post(self):
        """Return why the work must not be posted after it has waited, or None.

        The reason is passed to `end_unposted`, which fails the work with it. The reason must then
        be an exception. A class whose `end_unposted` does not use the reason may return any object.
        """
        return None

    cdef int take_turn(self) except -1:
        """Return what the rail must do with this work, which is at the front of the backlog.

        This is called again if it returns TURN_STAY.
        """
        return TURN_POST

    cdef bint can_move(self, bint was_posted) noexcept:
        """Return whether another rail may do the work after its own rail broke.

        `was_posted` is NOT_POSTED or WAS_POSTED.
        """
        return self.kept

    cdef int end_unposted(self, object error) except -1:
        """Fail and release work that is not posted because of `error`."""
        self.on_error(error)
        return self.free_memory()

    cdef int free_memory(self) except -1:
        """Release the memory, which the device no longer uses."""
        self.release()
        return 0

    cdef str text(self, str peer):
        """Describe the work for errors: the operation, its bytes, the peer."""
        return f"{OperationKind(self.kind).text} of {self.length} bytes with {peer}"

    cdef int post_to(self, WorkQueues queue, uint64_t wr_id, uint32_t *posted) except -1:
        """Post the work. Returns 0 or an errno value, and the number of requests that were posted.
        """
        cdef ibv_sge[2] sges
        cdef aiordma_send send
        memset(&send, 0, sizeof(send))
        sges[0].addr, sges[0].length, sges[0].lkey = self.address, self.length, self.lkey
        sges[1] = self.second
        send.wr_id = wr_id
        send.opcode = self.opcode
        send.send_flags = IBV_SEND_SIGNALED
        send.remote_addr, send.rkey, send.imm_data = self.remote_address, self.rkey, self.imm
        send.num_sge = 2 if self.second.length else 1 if self.length else 0
        return post_sends(queue, &send, 1, sges, posted, <uint64_t> self.length + self.second.length)


cdef int post_sends(
    WorkQueues queue, const aiordma_send *sends, uint32_t count, const ibv_sge *sges,
    uint32_t *posted, uint64_t length,
) noexcept:
    """Post requests for `length` bytes. Returns 0 or an errno value."""
    cdef int code
    if length <= RELEASE_GIL:
        return aiordma_post_send(queue.native_qp, queue.extended, sends, count, sges, posted)
    with nogil:
        code = aiordma_post_send(queue.native_qp, queue.extended, sends, count, sges, posted)
    return code


cdef int post_recvs(
    WorkQueues queue, const aiordma_recv *receives, uint32_t count, const ibv_sge *sges,
    uint32_t *posted,
) noexcept:
    return aiordma_post_recv(queue.native_qp, NULL, receives, count, sges, posted)


# ---- statistics ------------------------------------------------------------------------------------

cdef enum:
    MEASURED_EVERY = 17  # posts; a prime number, so that no pattern of operations hides a kind
    KINDS = 10
    BOUNDS = 10

cdef double[BOUNDS] bounds = [5e-6, 10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 1e-3, 10e-3, 100e-3, 1]

# Process-wide counters, which all threads update with the GIL held.
cdef uint64_t[KINDS][BOUNDS + 1] latencies_within
cdef double[KINDS] latency_sums
cdef uint64_t[WAIT_MEMORY + 1] wait_counts
cdef double[WAIT_MEMORY + 1] wait_sums


cdef void count_latency(uint8_t kind, double seconds) noexcept:
    cdef int i = 0
    while i < BOUNDS and seconds > bounds[i]:
        i += 1
    latencies_within[kind][i] += 1
    latency_sums[kind] += seconds


def latencies() -> dict[str, tuple[float, dict[str, int]]]:
    """Return the latency statistics of each operation.

    Each value contains the total in seconds, and the number of requests that took at most each
    bound in seconds.
    """
    cdef int kind, i
    statistics = {}
    for kind in range(KIND_SEND, KIND_BATCH + 1):
        count, counts_by_bound = 0, {}
        for i in range(BOUNDS + 1):
            count += latencies_within[kind][i]
            counts_by_bound[f"{bounds[i]:g}" if i < BOUNDS else "+Inf"] = count
        statistics[OperationKind(kind).text] = (latency_sums[kind], counts_by_bound)
    return statistics


cdef class Wait:
    """A wait of one connection or pool, which counts towards the statistics of the process."""

    def __cinit__(self, Clock clock not None):
        self.clock = clock

    cdef void set_reason(self, int reason) noexcept:
        if reason != self.reason:
            self.settle()
            self.reason, self.started_at = reason, self.clock.time()
            wait_counts[reason] += 1

    cdef void settle(self) noexcept:
        """Add the current wait up to now to the statistics. The wait may continue."""
        cdef double now
        if self.reason:
            now = self.clock.time()
            wait_sums[self.reason] += now - self.started_at
            self.started_at = now

    def for_memory(self, waiting: bool):
        """Start or end a wait for memory, and count its time so far."""
        self.set_reason(WAIT_MEMORY if waiting else WAIT_NONE)
        self.settle()


def waits_so_far() -> dict[str, tuple[int, float]]:
    """Return the number and total seconds of all waits, by resource."""
    cdef int reason
    named = (("credits", WAIT_CREDITS), ("send queue", WAIT_SEND_QUEUE), ("memory", WAIT_MEMORY))
    return {name: (wait_counts[reason], wait_sums[reason]) for name, reason in named}


def forget_measured():
    memset(latencies_within, 0, sizeof(latencies_within))
    memset(latency_sums, 0, sizeof(latency_sums))
    memset(wait_counts, 0, sizeof(wait_counts))
    memset(wait_sums, 0, sizeof(wait_sums))


fork.reset_in_child(forget_measured)


# ---- queue pairs -----------------------------------------------------------------------------------

@cython.no_gc_clear
cdef class RailObserver:
    """A part of a connection that keeps state for each rail, or uses the lead.

    `rail_observers` in failover.py lists the observers in the order in which they are called.
    """

    def rail_up(self, rail: Any) -> None:
        """Start to use a rail, on which the first write was acknowledged."""

    def rail_removed(self, rail: Any) -> None:
        """Release everything that belongs to a rail.

        The queue pair is in ERR and is destroyed next. The rail may never have been up.
        """

    def lead_changed(self, lead: Any) -> None:
        """Use a new lead. The previous one has been removed, and its queue pair is destroyed."""


cdef class FrameHandler:
    """The consumer of a queue pair's frames, usually the session."""

    cdef int received(self, PoolBlock block, uint32_t length) except -1:
        raise NotImplementedError

    cdef int received_write(self, PoolBlock block, uint32_t length, uint32_t imm) except -1:
        raise NotImplementedError

    cdef int flush(self) except -1:
        raise NotImplementedError

    cdef bint begin_failover(self, WorkQueues rail, bint to_other_device=TO_ANY_DEVICE) except -1:
        """Let another rail take over the work and receives of a broken rail.

        With TO_OTHER_DEVICE, the other rail must be on another device. Returns False, without any
        effect, if there is no such rail.
        """
        return False


cdef class WorkQueues:
    """The send and receive queue of one queue pair, as the table uses them.

    `free` is the number of free entries in the send queue, which has `capacity` entries. A queue
    that has `failed` still gets completions, but is not told about freed entries.
    """

    cdef int open(self, ibv_qp *qp, ibv_qp_ex *extended, uint32_t capacity) except -1:
        self.native_qp, self.extended = qp, extended
        self.capacity = self.free = capacity
        self.sends.first = self.sends.last = NO_SLOT
        self.receives.first = self.receives.last = NO_SLOT
        return 0

    cdef int use_freed_entries(self) except -1:
        """Use entries that a drain has freed."""
        raise NotImplementedError

    cdef int on_error_completion(
        self, object work, uint8_t kind, const aiordma_completion *wc
    ) except -1:
        """Handle a failed request, or the completion of a request after the queue has failed."""
        raise NotImplementedError

    cdef uint64_t latest_posted(self) noexcept:
        """Return the wr_id of the outstanding work that was posted last, or 0."""
        return 0 if self.sends.last == NO_SLOT else self.table.wr_id(self.sends.last)

    def outstanding_work(self) -> list[WorkRequest]:
        """Return the outstanding work of the send queue, in the order of posting."""
        cdef list works = []
        cdef uint32_t index = self.sends.first
        while index != NO_SLOT:
            works.append(self.table.works[index])
            index = self.table.slots[index].next
        return works

    cdef object take_first(self, SlotList *in_flight):
        """Free the slot of the oldest work in a list, and return the work."""
        work = self.table.works[in_flight.first]
        self.table.free_slot(in_flight.first)
        return work


# ---- slots and completions -------------------------------------------------------------------------

cdef class WorkRequestTable:
    """The outstanding work of one event loop, in slots, and the drain of its completions."""

    def __cinit__(self, loop: AbstractEventLoop, Clock clock not None):
        self.wakeups, self.clock = Wakeups(loop), clock
        self.free = NO_SLOT
        self.works, self.queues = [], []
        self.until_measured = 1

    def __dealloc__(self):
        PyMem_Free(self.slots)

    def __len__(self) -> int:
        return self.slots_in_use

    cdef int grow(self) except -1:
        cdef uint32_t count = self.count * 2 if self.count else FIRST_SLOTS, i
        if count > MAX_SLOTS:
            raise MemoryError("all slots for work requests are in use")
        cdef Slot *slots = <Slot *> PyMem_Realloc(self.slots, count * sizeof(Slot))
        if slots == NULL:
            raise MemoryError
        self.slots = slots  # the old array has already been freed
        memset(slots + self.count, 0, (count - self.count) * sizeof(Slot))
        for i in range(self.count, count):
            slots[i].generation = 1
            slots[i].next = i + 1 if i + 1 < count else NO_SLOT
        self.works.extend([None] * (count - self.count))
        self.queues.extend([None] * (count - self.count))
        self.free, self.count = self.count, count
        return 0

    cdef uint32_t take_slot(
        self, WorkQueues queue, uint8_t kind, object work, uint32_t entries
    ) except? 0xFFFFFFFF:
        if self.free == NO_SLOT:
            self.grow()
        cdef uint32_t index = self.free
        cdef Slot *slot = &self.slots[index]
        cdef SlotList *in_flight = &queue.receives if kind == KIND_RECV else &queue.sends
        self.free = slot.next
        self.slots_in_use += 1
        self.works[index] = work
        self.queues[index] = queue
        slot.in_use, slot.kind, slot.entries, slot.posted_at = True, kind, entries, NOT_MEASURED
        if kind != KIND_RECV:
            self.until_measured -= 1
            if not self.until_measured:
                self.until_measured = MEASURED_EVERY
                slot.posted_at = self.clock.time()
        slot.next, slot.previous = NO_SLOT, in_flight.last
        if in_flight.last == NO_SLOT:
            in_flight.first = index
        else:
            self.slots[in_flight.last].next = index
        in_flight.last = index
        return index

    cdef uint64_t wr_id(self, uint32_t index) noexcept:
        return <uint64_t> self.slots[index].generation << 32 | (
            <uint64_t> self.slots[index].kind << 24 | index
        )

    cdef bint is_in_flight(self, uint64_t wr_id) noexcept:
        """Return whether `wr_id` identifies a slot that is in use, in its current generation."""
        cdef uint32_t index = wr_id & (MAX_SLOTS - 1)
        return index < self.count and self.slots[index].in_use and self.wr_id(index) == wr_id

    cdef void free_slot(self, uint32_t index) noexcept:
        """Free a slot. The caller must hold references to its work and its queue."""
        cdef Slot *slot = &self.slots[index]
        cdef WorkQueues queue = <WorkQueues> self.queues[index]
        cdef SlotList *in_flight = &queue.receives if slot.kind == KIND_RECV else &queue.sends
        if slot.previous == NO_SLOT:
            in_flight.first = slot.next
        else:
            self.slots[slot.previous].next = slot.next
        if slot.next == NO_SLOT:
            in_flight.last = slot.previous
        else:
            self.slots[slot.next].previous = slot.previous
        if slot.kind != KIND_RECV:
            queue.free += slot.entries
        slot.in_use = False
        slot.generation += 1
        slot.next = self.free
        self.free = index
        self.slots_in_use -= 1
        self.works[index] = None
        self.queues[index] = None

    # ---- a drain ----

    cdef int drain_once(
        self, aiordma_drain *state, int most, uint32_t spin_us, int polls_again
    ) except? -10000:
        """Dispatch completions.

        `polls_again` tells the device whether another poll follows soon: NEVER, IF_FOUND or ALWAYS.
        Returns FOUND if there were some, MORE if there may be more, or a negative errno value.
        """
        cdef aiordma_completion[BATCH] completions
        cdef list freed = None
        cdef WorkQueues queue = None
        cdef int more = 0, count, i
        if not 1 <= most <= BATCH:
            raise ValueError(f"the number of completions to drain must be between 1 and {BATCH}, "
            f"not {most}")
        state.spin_us = spin_us
        state.polls_again = polls_again
        with nogil:
            count = native_drain(state, completions, most, &more)
        self.wakeups.begin_drain()
        for i in range(count):
            queue = dispatch(self, &completions[i])
            if queue is not None:
                if freed is None:
                    freed = []
                freed.append(queue)
        if freed is not None:
            for queue in freed:
                queue.entries_freed = False
                if not queue.failed:
                    try:
                        queue.use_freed_entries()
                    except BaseException as error:
                        self.report_error(queue, error)
        self.wakeups.end_drain()
        if count < 0:
            return count
        return (FOUND if count > 0 or state.busy else 0) | (MORE if more else 0)

    cdef int report_error(self, WorkQueues queue, object error) except -1:
        """Report an error in handling one queue pair, so that others still get completions."""
        if isinstance(error, Exception):
            queue.driver.report(queue, error)
            return 0
        return self.wakeups.defer_error(error)

    def drain(self, uintptr_t state, int most, bint polls_again) -> int:
        return self.drain_once(<aiordma_drain *> state, most, 0, polls_again)


cdef WorkQueues dispatch(WorkRequestTable table, const aiordma_completion *wc):
    """Complete the work of one slot.

    Returns the queue if this frees its first entries in the current drain, or else None.
    """
    cdef uint32_t index = wc.wr_id & (MAX_SLOTS - 1)
    if not table.is_in_flight(wc.wr_id):
        error_before_last(table, wc)
        return None
    cdef uint8_t kind = table.slots[index].kind
    cdef bint in_turn = kind == KIND_RECV or table.slots[index].previous == NO_SLOT
    cdef WorkQueues queue = <WorkQueues> table.queues[index]
    cdef object work = table.works[index]
    cdef double posted_at = table.slots[index].posted_at
    table.free_slot(index)
    try:
        if not in_turn:
            raise RuntimeError(
                f"the completion of wr_id {wc.wr_id:#x} arrived out of order"
            )
        elif wc.status or queue.failed:
            queue.on_error_completion(work, kind, wc)
        else:
            queue.completions += 1
            if posted_at != NOT_MEASURED:
                count_latency(kind, table.clock.time() - posted_at)
            if kind != KIND_RECV:
                (<WorkRequest> work).on_completion(wc.byte_len)
            elif queue.frame_handler is None:
                raise TypeError("a receive needs a channel")
            elif not wc.wc_flags & (IBV_WC_WITH_IMM | IBV_WC_WITH_INV):
                queue.frame_handler.received(<PoolBlock> work, wc.byte_len)
            elif wc.wc_flags & IBV_WC_WITH_IMM:
                queue.frame_handler.received_write(<PoolBlock> work, wc.byte_len, wc.imm_data)
            else:
                # A key is in host byte order, but `imm_data` was converted like immediate data.
                queue.frame_handler.invalidated_key = htonl(wc.imm_data)
                queue.frame_handler.received(<PoolBlock> work, wc.byte_len)
                queue.frame_handler.invalidated_key = 0
    except BaseException as error:
        table.report_error(queue, error)
    if kind == KIND_RECV or queue.entries_freed or queue.failed:
        return None
    queue.entries_freed = True
    return queue


cdef int error_before_last(WorkRequestTable table, const aiordma_completion *wc) except -1:
    """Handle the failure of a request that is not the last of its chain.

    Any other completion without a slot in use is counted as a stray.
    """
    cdef uint64_t wr_id = wc.wr_id ^ BEFORE_LAST
    cdef uint32_t index = wr_id & (MAX_SLOTS - 1)
    if not wc.wr_id & BEFORE_LAST or not wc.status or not table.is_in_flight(wr_id):
        table.stray_completions += 1
        return 0
    cdef WorkQueues queue = <WorkQueues> table.queues[index]
    try:
        queue.on_error_completion(table.works[index], table.slots[index].kind, wc)
    except BaseException as error:
        table.report_error(queue, error)
    return 0
