# Chains of one-sided work requests.

from libc.stdint cimport uint32_t, uint64_t

from .memory cimport Pinned, Remote
from .work_queue cimport SendQueue, WorkRequest, aiordma_send, ibv_sge

cdef uint64_t MAX_TRANSFER


cdef class WRChain(WorkRequest):
    cdef public object user, waiter
    cdef public bint partial
    cdef uint32_t room
    cdef aiordma_send *sends           # `room` of them; a chain of one has them in itself
    cdef ibv_sge *sges
    cdef aiordma_send one_send
    cdef ibv_sge one_sge
    cdef list pins
    cdef Remote region                 # that it is aimed at
    cdef list regions                  # those that it is aimed at besides
    cdef int reserve(self, uint32_t room) except -1
    cdef aiordma_send *append(self, Pinned pinned, uint64_t address, uint32_t length,
                              uint32_t lkey) except NULL
    cdef int aim_at(self, Remote region) except -1
    cdef bint add_transfer(self, object local_memory, object remote_memory, uint32_t opcode) except -1
