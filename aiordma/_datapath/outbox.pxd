# The outgoing messages of a session, in order.

from libc.stdint cimport uint32_t, uint64_t

cimport cython

from .frames cimport Credits, PeerRoom
from .memory cimport BlockCache, PoolBlock
from .journal cimport Journal
from .message cimport Fifo
from .one_sided cimport WRChain
from .rail cimport SendQueue
from .rendezvous cimport Offers
from .sealing cimport Sealing
from .sends cimport Frame, Sender, SendFuture
from .stripes cimport Stripes
from .work_queue cimport FrameHandler, Wait

cdef enum:  # bits of `flags`
    NOT_STARTED = 1
    ENDED = 2
    # This is a guard against re-entrancy. Releasing a buffer and the cycle collector can run user
    # code. While the flag is set, sends from that code wait behind the message that is being sent,
    # which relies on its credit.
    SENDING = 4
    AWAITS_MEMORY = 8  # `on_memory` will be called
    SWITCHING = 16  # the lead broke and another rail is taking over
    RESUMED = 64  # the peer has reported what arrived; `unfinished_work` is to be posted again
    BLOCKED = NOT_STARTED | ENDED | SENDING | AWAITS_MEMORY | SWITCHING
    COLLECTING = 32  # `collect` will be called

cdef int require_open(Outbox outbox) except -1


@cython.final
cdef class Outbox(Sender):
    cdef FrameHandler session          # None once it is closed
    cdef SendQueue lead_rail
    cdef object owner, block_source
    cdef BlockCache pool
    cdef readonly Credits credits
    cdef PeerRoom peer_room            # None before the start, like `credits`
    cdef public Sealing sealing  # type: Sealing | None; None if frames are not encrypted
    cdef readonly Offers offers
    cdef readonly Journal journal
    cdef list unfinished_work          # unfinished work of leads that broke
    cdef readonly set batches          # type: set[WRChain]; being filled, with the lead's keys
    cdef readonly Stripes stripes
    cdef Fifo waiting                  # messages and writes, in order
    cdef Wait wait
    cdef public bint closing           # new messages are rejected; waiting messages are sent
    cdef uint32_t flags
    cdef object end_error
    cdef SendFuture start_message(self, object data, object imm)
    cdef bint begin_sending(self) noexcept
    cdef int on_rendezvous_ack(
        self, uint32_t request_id, uint32_t status, uint32_t invalidated_key
    ) except -1
    cdef int repost_missing(self, uint64_t frames) except -1
    cdef int post_again(self) except -1
    cdef int flush(self) except -1
    cdef int post_frame(self, Frame frame, int kind, bint has_imm, uint32_t imm) except -1
    cdef int close(self) except -1
