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
    CONTROL_ENTRIES = 4  # of the send queue, for control frames alone
    CHAIN = 32           # receives that are posted with one call


cdef class SendQueue(WorkQueues):
    cdef public object qp  # type: QueuePair
    cdef public object error  # type: BaseException | None
    cdef public uint32_t number        # among the rails of its connection; 0: it offers the messages
    cdef public ReadKeys keys
    cdef Stripes stripes               # None: it is not the lead, or is closed
    cdef object owner
    cdef readonly uint64_t bytes_read  # of striped messages
    cdef Counts counts                 # of its connection
    cdef readonly Served served
    cdef readonly uint64_t transfer_bytes_read, transfer_bytes_written  # one-sided operations of the user
    cdef Leftovers left                # None: it is not suspended
    cdef bint expects_resume           # its first receive is for that, and not of the lead's
    cdef bint leaving                  # entries that become free are not for the messages
    cdef bint stopped                  # this side has taken the queue pair to ERR
    cdef bint messages_first           # of the two that wait for entries
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
        """For work of the user."""
        return self.free > CONTROL_ENTRIES

    @cython.final
    cdef inline bint has_room_for(self, uint32_t entries) noexcept:
        return self.free >= CONTROL_ENTRIES + entries
