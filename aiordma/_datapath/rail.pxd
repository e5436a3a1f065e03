# A rail: one queue pair, with its send queue and its receives.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

cimport cython

from .keys cimport ReadKeys
from .memory cimport BlockCache, PoolBlock
from .stripes cimport Stripes
from .work_queue cimport (
    Wait,
    WorkRequest,
    WorkRequestTable,
    aiordma_completion,
    ibv_qp,
    ibv_qp_ex,
)

cdef enum:
    CONTROL_ENTRIES = 4  # of the send queue, for control frames alone

cdef struct SlotList:
    uint32_t first, last


cdef class FrameHandler:
    """The consumer of the frames of a queue pair: its message channel."""
    cdef uint32_t invalidated_key      # by the frame that is being taken; 0: by none
    cdef int received(self, PoolBlock block, uint32_t length) except -1
    cdef int received_write(self, PoolBlock block, uint32_t length, uint32_t imm) except -1
    cdef int flush(self) except -1
    cdef int reposted(self, uint32_t count) except -1
    cdef bint tell_size(self, uint64_t first, uint32_t size) except -1
    cdef int check_drained(self) except -1
    cdef bint goes_on(self, SendQueue rail, bint elsewhere=*) except -1


@cython.final
cdef class Leftovers:
    cdef list posted, unposted         # work that can go on elsewhere, in its order; None: it is taken
    cdef list returned, late           # blocks of receives from before the rail broke, and since then
    cdef int keep(self, WorkRequest work, bint was_posted, bint is_first) except -1
    cdef list take_works(self, list between)
    cdef list take_receives(self)


cdef class SendQueue:
    cdef object __weakref__
    cdef public WorkRequestTable table
    cdef public object user            # the owner of remote memory
    cdef public FrameHandler frame_handler  # type: FrameHandler | None
    cdef public object qp  # type: QueuePair
    cdef public object error  # type: BaseException | None
    cdef public str peer               # its name, for errors
    cdef public uint32_t number        # among the rails of its connection; 0: it offers the messages
    cdef public ReadKeys keys
    cdef Stripes stripes               # of the lead; None: there has been one rail alone
    cdef readonly object driver  # type: Driver
    cdef object owner
    cdef ibv_qp *native_qp
    cdef ibv_qp_ex *extended
    cdef public uint32_t capacity
    cdef readonly uint32_t free
    cdef readonly uint64_t completions
    cdef readonly uint64_t bytes_read  # of striped messages
    cdef SlotList sends, receives
    cdef public bint failed
    cdef Leftovers left                # None: it is not suspended
    cdef bint holds_back               # it becomes the lead: what is new waits behind what is moved
    cdef bint expects_resume           # its first receive is for that, and not of the lead's
    cdef public bint foreign           # the pool of its messages is another device's
    cdef bint leaving                  # entries that become free are not for the messages
    cdef bint stopped                  # this side has taken the queue pair to ERR
    cdef readonly bint backlogged
    cdef bint entries_freed            # by the drain that goes on
    cdef bint messages_first           # of the two that wait for entries
    cdef object backlog                # work, in order, with its number
    cdef Wait wait
    cdef uint64_t latest_backlogged    # number
    cdef bint has_posted(self, uint64_t number) except -1
    cdef int post_or_wait(self, WorkRequest work) except -1
    cdef int post_in_turn(self, WorkRequest work) except -1
    cdef bint keeps_works(self) noexcept
    cdef uint64_t latest_posted(self) noexcept
    cdef int post_now(self, WorkRequest work) except -1
    cdef int post_checked(self, WorkRequest work) except -1
    cdef int post_backlog(self) except -1
    cdef int note_backlog(self) except -1
    cdef int fail_work(self, WorkRequest work) except -1
    cdef uint32_t post_receives(self, list blocks, uint32_t length) except? 0xFFFFFFFF
    cdef uint32_t post_cached(self, BlockCache pool, uint32_t most,
                              uint32_t length) except? 0xFFFFFFFF
    cdef int post_block(self, PoolBlock block, uint32_t length) except -1
    cdef bint suspend(self, object error, WorkRequest failed=*) except -1
    cdef int set_aside(self, WorkRequest work, bint was_posted, bint is_first=*) except -1
    cdef object take_backlog(self)
    cdef int take_over(self, object backlog, uint64_t latest) except -1
    cdef int hold_back(self, bint holds_back) except -1
    cdef int take_back(self, PoolBlock block) except -1
    cdef list take_works(self, list between)
    cdef list take_receives(self)
    cdef int drain_receives(self) except -1
    cdef uint32_t lkey_of(self, PoolBlock block) except? 0
    cdef int on_error_completion(self, object work, uint8_t kind, const aiordma_completion *wc,
                                 bint before_last) except -1
    cdef object error_of(self, WorkRequest work)
    cdef object unknown_outcome(self, WorkRequest work)
    cdef object take_first(self, SlotList *order)
    cdef int use_room(self) except -1
    cdef int give_room_to_messages(self) except -1

    @cython.final
    cdef inline bint has_room(self) noexcept:
        """For work of the user."""
        return self.free > CONTROL_ENTRIES

    @cython.final
    cdef inline bint has_room_for(self, uint32_t entries) noexcept:
        return self.free >= CONTROL_ENTRIES + entries
