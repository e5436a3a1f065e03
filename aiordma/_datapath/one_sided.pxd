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
    cdef object user                   # owner of the connection, for `Remote._user`
    cdef TransferFuture waiter
    cdef SendQueue rail                # rail to which it was posted last
    cdef uint64_t backlog_position     # latest work in the backlog when it was queued
    cdef uint32_t capacity
    cdef aiordma_send *sends           # array of `capacity` requests; `one_send` if `capacity` is 1
    cdef ibv_sge *sges
    cdef aiordma_send one_send
    cdef ibv_sge one_sge
    cdef list pins
    cdef StripedTransfer striped       # None if a single rail carries it, or if it is over
    cdef Remote region                 # target region
    cdef list regions                  # further target regions
    cdef aiordma_send *append(self, Pinned pinned, uint64_t address, uint32_t length,
                              uint32_t lkey) except NULL
    cdef bint move(self, SendQueue new_lead) except -1
    cdef int drop_writes(self) except -1
    cdef uint32_t count_of(self, uint32_t opcode) noexcept
    cdef aiordma_send *add(self, uint32_t opcode, Local local, Remote remote,
                           uint32_t right) except? NULL


cdef class TransferFuture(OpFuture):
    cdef SendQueue queue
    cdef Sender sender                 # sender of its last request, among the messages, or None
    cdef WRChain chain                 # None if it cannot be withdrawn
    cdef list parts                    # parts of the chain that precede it, or None
    cdef uint32_t parts_remaining      # number of parts remaining, including the chain
    cdef object progress
    cdef uint64_t bytes_done
    cdef bint has_undone_part          # a part was not posted or may have been lost
    cdef int on_part_completed(self, WRChain part) except -1
    cdef int add_progress(self, uint64_t length) except -1
    cdef int on_part_over(self) except -1


cdef class StripedTransfer(Striped):
    cdef WRChain chain
    cdef Stripes stripes
    cdef Pinned pinned
    cdef dict keys, lkeys              # keys of both memories, by rail number
    cdef uint64_t predecessor          # wr_id of the lead rail's work that must complete first
    cdef uint32_t chunks_in_flight
    cdef bint started
    cdef bint is_write(self) noexcept
    cdef SendQueue lead_rail(self)
    cdef uint32_t lkey(self, SendQueue rail) except? 0
    cdef int completed(self, Lane lane, uint64_t length) except -1
    cdef int on_chunk_failure(self, Lane lane, uint64_t start, uint64_t length) except -1
    cdef int fail(self, object error) except -1
    cdef int take_turn(self) except -1
