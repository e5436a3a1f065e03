# Outgoing messages.

from cpython.buffer cimport Py_buffer
from libc.stdint cimport uint32_t, uint64_t

from .futures cimport OpFuture
from .keys cimport Key, ReadKeys
from .memory cimport Local, PoolBlock
from .message cimport Counts
from .work_queue cimport RailObserver, WorkRequest, aiordma_send

cdef enum:
    COPIED_BELOW = 4096  # bytes; copying less is faster than looking up a key
    MAX_PIECES = 128     # maximum number in a rendezvous

cdef aiordma_send *prepare_binds(SendFuture message, ReadKeys keys, aiordma_send *send,
                                 uint64_t wr_id) noexcept
cdef void mark_windows_bound(SendFuture message, ReadKeys keys) noexcept
cdef uint32_t count_windows(SendFuture message, ReadKeys keys) noexcept
cdef Frame new_frame(PoolBlock block, uint32_t length)
cdef Frame init_frame(Frame frame, PoolBlock block, uint32_t length)
cdef Frame new_rendezvous_frame(PoolBlock block, uint32_t length, SendFuture message)
cdef uint32_t imm_of(object imm) except? 0xFFFFFFFF
cdef object cannot_send_error(Sender sender, MessageOwner owner)


cdef class MessageOwner:
    cdef str name                      # in errors


cdef class Sender(RailObserver):
    cdef uint32_t frames_in_flight     # frames with messages in flight
    cdef public Counts counts
    cdef MessageOwner message_owner    # owner of all messages, in both directions, or None
    cdef object ownership_error(self, MessageOwner owner, str attempt)
    cdef int write(self, WorkRequest chain) except -1
    cdef bint withdraw(self, object item) except -1
    cdef void delivered(self, SendFuture message) noexcept
    cdef int finish(self, SendFuture message, uint32_t status, uint32_t invalidated_key) except -1


cdef class Piece:
    cdef object source                 # object that keeps the bytes alive
    cdef object keeper                 # object that keeps the bytes in place, or None
    cdef Py_buffer buffer
    cdef bint has_buffer
    cdef const unsigned char *bytes
    cdef uint64_t length
    cdef Key key                       # key of the lead rail, linked to those of others, or None
    cdef Piece next
    cdef Key key_of(self, ReadKeys keys)
    cdef int open(self, object data) except -1
    cdef void close(self) noexcept


cdef class SendFuture(OpFuture):
    cdef Sender sender
    cdef Piece first                   # None once the bytes have been copied
    cdef uint64_t length               # total of all pieces
    cdef bint has_imm
    cdef uint32_t imm
    cdef uint64_t backlog_position     # latest work in the backlog when it was queued
    cdef uint32_t request_id           # of a rendezvous
    cdef uint32_t rail                 # number of the rail whose keys are in the offer
    cdef list openings                 # on rails other than the lead rail, or None
    cdef int open(self, object data) except -1
    cdef Piece last(self)
    cdef uint32_t count(self) noexcept
    cdef void copy_to(self, unsigned char *to, Piece until) noexcept
    cdef int join_pieces(self, uint64_t below) except -1
    cdef void close_payload(self) noexcept


cdef class Frame(WorkRequest):
    cdef PoolBlock block               # None once it has been returned
    cdef bint awaits_completion        # True from creation until `detach`
    cdef bint missing                  # not at the peer, and not posted again yet
    cdef uint64_t number               # number in the journal
    cdef Sender sender                 # None if there are no messages in it
    cdef SendFuture message            # its single message
    cdef list messages                 # its messages, if there are several
    cdef list spare_blocks             # list that gets the block back; None for the pool
    cdef object waiter                 # of a control message
    cdef void detach(self) noexcept
    cdef void release_block(self) noexcept
    cdef void release_from_journal(self) noexcept
    cdef int mark_arrived(self) except -1
    cdef int prepare_again(self) except -1
