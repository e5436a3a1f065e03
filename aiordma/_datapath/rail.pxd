# A rail: one queue pair, with its send queue and its receives.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

cimport cython

from .keys cimport ReadKeys
from .memory cimport PoolBlock
from .message cimport Counts, Served
from .stripes cimport Stripes
from .work_queue cimport (
    Wait,
    WorkQueues,
    WorkRequest,
    WorkRequestTable,
    aiordma_completion,
    ibv_qp,
    ibv_qp_ex,
)

cdef enum:
    CONTROL_ENTRIES = 4  # entries of the send queue reserved for control frames
    CHAIN = 32           # maximum number of receives posted with one call


@cython.final
cdef class Backlog:
    cdef object works                  # work in order, with its numbers
    cdef uint64_t latest               # number of the latest work
    cdef readonly bint is_waiting      # it is held or has work
    cdef bint held                     # nothing is posted until the new lead has taken over
    cdef Wait wait
    cdef int append(self, WorkRequest work) except -1
    cdef WorkRequest first(self)
    cdef bint remove(self, WorkRequest work) except -1
    cdef list take_all(self)
    cdef int take_over(self, Backlog previous) except -1
    cdef int update_wait(self) except -1
    cdef bint has_posted(self, uint64_t number) except -1


cdef enum:  # values of `is_first`
    IS_LAST = 0
    IS_FIRST = 1


@cython.final
cdef class Leftovers:
    cdef list posted, unposted         # work for another rail, in order; None once taken
    cdef list returned_receives        # receive blocks from before the rail broke
    cdef list late_receives            # receive blocks that it was to post afterwards
    cdef int keep(self, WorkRequest work, bint was_posted, bint is_first) except -1
    cdef list take_works(self, list unfinished)
    cdef list take_receives(self)


cdef class SendQueue(WorkQueues):
    cdef public object qp  # type: QueuePair
    cdef public object error  # type: BaseException | None
    cdef public uint32_t number        # number among the rails; 0 is the first rail
    cdef public ReadKeys keys
    cdef Stripes stripes               # None if it is closed or not the lead
    cdef object owner
    cdef readonly uint64_t bytes_read  # of messages read in chunks
    cdef Counts counts                 # counters of its connection
    cdef readonly Served served
    cdef readonly uint64_t transfer_bytes_read, transfer_bytes_written  # one-sided operations
    cdef Leftovers leftovers           # None unless it is suspended
    cdef bint expects_resume           # its first receive is for the Resume
    cdef bint retiring                 # it takes no more work and waits until it is empty
    cdef bint stopped                  # this side has moved the queue pair to ERR
    cdef bint messages_first           # messages get freed entries before the backlog
    cdef readonly Backlog backlog
    cpdef int post(self, WorkRequest work) except -1
    cdef int post_in_turn(self, WorkRequest work) except -1
    cpdef int post_checked(self, WorkRequest work) except -1
    cdef int post_backlog(self) except -1
    cdef uint32_t post_receives(self, list blocks, uint32_t length) except? 0xFFFFFFFF
    cdef list take_receives(self)
    cdef object error_of(self, WorkRequest work)
    cdef object unknown_outcome(self, WorkRequest work)

    @cython.final
    cdef inline void count_transfers(self, uint64_t bytes_read, uint64_t bytes_written) noexcept:
        """Count bytes of one-sided requests that this rail has completed."""
        self.transfer_bytes_read += bytes_read
        self.transfer_bytes_written += bytes_written
        self.counts.bytes_read += bytes_read
        self.counts.bytes_written += bytes_written

    @cython.final
    cdef inline bint has_room(self) noexcept:
        """Return whether there is room for work of the user."""
        return self.free > CONTROL_ENTRIES

    @cython.final
    cdef inline bint has_room_for(self, uint32_t entries) noexcept:
        return self.free >= CONTROL_ENTRIES + entries
