# A rail: one queue pair, with its send queue and its receives.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

cimport cython

from .backlog cimport Backlog, Leftovers
from .keys cimport ReadKeys
from .memory cimport PoolBlock
from .message cimport Counts, Served
from .stripes cimport Stripes
from .work_queue cimport (
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


cdef class SendQueue(WorkQueues):
    cdef public object qp  # type: QueuePair
    cdef public object error  # type: BaseException | None
    cdef public uint32_t number        # number among the rails; 0 is the first rail
    cdef public ReadKeys keys
    cdef Stripes stripes               # None if it is closed or not the lead rail
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
