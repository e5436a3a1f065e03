# The protocol of one connection, over one rail or several.

from libc.stdint cimport uint32_t, uint64_t

cimport cython

from .controls cimport Controls
from .inbox cimport Inbox
from .memory cimport PoolBlock
from .outbox cimport Outbox
from .rail cimport SendQueue
from .receives cimport Receives, ReceiveSizes
from .work_queue cimport FrameHandler, WorkQueues


@cython.final
cdef class Session(FrameHandler):
    cdef object __weakref__
    cdef readonly Outbox outbox
    cdef readonly Controls controls
    cdef readonly Inbox inbox
    cdef ReceiveSizes sizes            # of this side's receives
    cdef Receives receives             # of the lead
    cdef object owner, config
    cdef list early_frames, drain_waiters
    cdef readonly set batches          # type: set[WRChain]; they collect operations, by the keys of the lead
    cdef public object failover  # type: Any
    cdef public bint peer_has_left     # it has said goodbye: whatever else comes does not count
    cdef public bint awaiting_auth     # of the peer's key: it may send no message
    cdef public bint awaiting_admission  # by this side's application: neither
    cdef bint takes_now(self, PoolBlock block, uint32_t length, object imm) except -1
    cdef int take_frame(self, PoolBlock block, uint32_t length) except -1
    cdef int take_bundle(self, PoolBlock block, uint32_t count) except -1
    cdef int take_rendezvous(self, PoolBlock block, uint32_t length) except -1
    cdef int take_control(self, PoolBlock block, int kind, uint32_t length) except -1
    cdef str too_early(self)
    cdef int take_written(self, PoolBlock block, uint32_t length, uint32_t imm) except -1
    cdef int tell_of_write(self, PoolBlock block, uint32_t length, uint32_t imm) except -1
    cdef int send_keys(self) except -1
    cdef int check_drained(self) except -1


cdef class RailFrames(FrameHandler):
    cdef Session session
    cdef SendQueue rail
