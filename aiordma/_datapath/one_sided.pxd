# Chains of one-sided work requests.

from libc.stdint cimport uint32_t, uint64_t

from .futures cimport OpFuture
from .memory cimport Local, Pinned, Remote
from .rail cimport SendQueue
from .sends cimport Sender
from .stripes cimport Lane, Striped, Stripes
from .work_queue cimport WorkRequest, aiordma_send, ibv_sge

cdef uint64_t MAX_TRANSFER


cdef TransferFuture begin_transfer(SendQueue queue, uint32_t kind, Sender sender, Local local,
                                   Remote remote, object imm, object progress)


cdef class WRChain(WorkRequest):
    cdef object user
    cdef TransferFuture waiter
    cdef SendQueue rail                # that it was posted to last
    cdef uint64_t behind               # the latest work in the backlog when it was queued
    cdef uint32_t room
    cdef aiordma_send *sends           # `room` of them; a chain of one has them in itself
    cdef ibv_sge *sges
    cdef aiordma_send one_send
    cdef ibv_sge one_sge
    cdef list pins
    cdef StripedTransfer striped       # None: one rail carries it, or it is over
    cdef Remote region                 # that it is aimed at
    cdef list regions                  # those that it is aimed at besides
    cdef aiordma_send *append(self, Pinned pinned, uint64_t address, uint32_t length,
                              uint32_t lkey) except NULL
    cdef bint move(self, SendQueue lead) except -1
    cdef int drop_writes(self) except -1
    cdef uint32_t count_of(self, uint32_t opcode) noexcept
    cdef aiordma_send *add(self, uint32_t opcode, Local local, Remote remote,
                           uint32_t right) except? NULL


cdef class TransferFuture(OpFuture):
    cdef SendQueue queue
    cdef Sender sender                 # in which its last request takes its turn, or None
    cdef WRChain chain                 # None: it is not to be withdrawn
    cdef list parts                    # of the chain, before it; None: there are none
    cdef uint32_t left                 # of these and the chain
    cdef object progress
    cdef uint64_t bytes_done
    cdef bint undone                   # a part was not posted, or may have been lost
    cdef int advance(self, WRChain part) except -1
    cdef int moved(self, uint64_t length) except -1
    cdef int part_over(self) except -1


cdef class StripedTransfer(Striped):
    cdef WRChain chain
    cdef Stripes stripes
    cdef Pinned pinned
    cdef dict keys, lkeys              # of both memories, by the number of the rail
    cdef uint64_t after                # the wr_id of what the lead had to do before
    cdef uint32_t under_way            # chunks
    cdef bint begun
    cdef bint writes(self) noexcept
    cdef SendQueue lead(self)
    cdef uint32_t lkey(self, SendQueue rail) except? 0
    cdef int completed(self, Lane lane, uint64_t length) except -1
    cdef int let_go(self, Lane lane, uint64_t start, uint64_t length) except -1
    cdef int fail(self, object error) except -1
    cdef int take_turn(self) except -1
