# Memory windows of type 2, whose keys only one queue pair accepts.

from libc.stdint cimport uint32_t, uint64_t

from .work_queue cimport aiordma_send, ibv_mw


cdef class Window:
    cdef object window                 # a verbs.MemoryWindow
    cdef ibv_mw *mw
    cdef uint32_t next_key(self) noexcept
    cdef void mark_bound(self) noexcept
    cdef void prepare_bind(self, aiordma_send *send, uint64_t region, uint64_t address,
                           uint64_t length, uint32_t access) noexcept
    cdef void prepare_invalidation(self, aiordma_send *send) noexcept
