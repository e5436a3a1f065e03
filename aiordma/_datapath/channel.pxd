# The two-sided messages of one connection.

from libc.stdint cimport uint32_t, uint64_t

from .controls cimport Controls
from .frames cimport Credits, PeerRoom
from .inbox cimport Inbox, PendingRendezvous
from .memory cimport BlockCache, PoolBlock
from .message cimport Fifo
from .rail cimport FrameHandler, SendQueue
from .receives cimport Receives, ReceiveSizes
from .rendezvous cimport Offers
from .sealing cimport Sealing
from .one_sided cimport WRChain
from .sends cimport Frame, SendFuture
from .work_queue cimport Wait, WorkRequest, WorkRequestTable

cdef uint32_t imm_of(object imm) except? 0xFFFFFFFF


cdef class Counts:
    cdef public uint64_t messages_sent, messages_received, bytes_sent, bytes_received
    cdef public uint64_t reads, writes, atomics


cdef class MessageChannel(FrameHandler):
    cdef object __weakref__
    cdef SendQueue queue
    cdef WorkRequestTable table
    cdef readonly Credits credits
    cdef PeerRoom room                 # None before the start, as the credits
    cdef readonly Inbox inbox
    cdef ReceiveSizes sizes            # of this side's receives
    cdef Receives receives
    cdef object owner, source, config
    cdef BlockCache pool
    cdef Fifo waiting                  # messages and writes, in their order
    cdef Wait wait
    cdef readonly Controls controls
    cdef readonly Offers offers
    cdef list early_frames, drain_waiters
    cdef Counts counts
    cdef object ended_by
    cdef uint32_t frames_under_way
    cdef readonly uint64_t max_message
    cdef uint64_t max_received         # bytes of a message; `max_message`: what the peer takes
    cdef readonly bint started
    cdef public bint closing
    cdef public bint peer_has_left     # it has said goodbye: whatever else comes does not count
    cdef public bint awaiting_auth     # of the peer's key: it may send no message
    cdef public bint awaiting_admission  # by this side's application: neither
    cdef readonly Sealing sealing  # type: Sealing | None; None: frames travel in clear
    # Re-entrancy guard: the end of a buffer, and the cycle collector, can run the user's code, whose
    # sends queue while this is set, behind the message that is being sent and counts on a credit.
    cdef bint sending
    cdef bint awaits_memory            # `on_memory` will be called
    cdef bint collecting
    cdef int check_affinity(self) except -1
    cdef object send_error(self, SendFuture message)
    cdef bint begin_sending(self) noexcept
    cdef PoolBlock frame_block(self, uint64_t size)
    cdef SendFuture start_message(self, object data, object imm)
    cdef int enqueue(self, SendFuture message) except -1
    cdef int append(self, object item) except -1
    cdef int note_wait(self) except -1
    cdef int collect_soon(self) except -1
    cdef bint send_alone(self, SendFuture message) except -1
    cdef bint send_eager(self, SendFuture message) except -1
    cdef bint send_bundle(self, list messages, uint64_t size) except -1
    cdef bint send_rendezvous(self, SendFuture message) except -1
    cdef int write(self, WRChain chain) except -1
    cdef bint withdraw(self, object item) except -1
    cdef bint send_first(self) except -1
    cdef int post_frame(self, Frame frame, int kind, bint has_imm, uint32_t imm) except -1
    cdef object seal_message(self, SendFuture message)
    cdef int rendezvous_over(self, uint32_t request_id, uint32_t status) except -1
    cdef int acknowledge(self, PendingRendezvous pending) except -1
    cdef str too_early(self)
    cdef bint takes_now(self, PoolBlock block, uint32_t length, object imm) except -1
    cdef int take_frame(self, PoolBlock block, uint32_t length) except -1
    cdef int take_bundle(self, PoolBlock block, uint32_t count) except -1
    cdef int take_rendezvous(self, PoolBlock block, uint32_t length) except -1
    cdef int take_control(self, PoolBlock block, int kind, uint32_t length) except -1
    cdef void count_delivered(self, SendFuture message) noexcept
    cdef void count_received(self, uint64_t length) noexcept
    cdef int check_drained(self) except -1
