# Keys with which the peer reads the memory of messages. Each key belongs to one rail.

from libc.stdint cimport uint32_t, uint64_t

from .memory cimport BlockCache, Pinned
from .windows cimport Window
from .work_queue cimport ibv_mr

cdef enum:
    NOT_INVALIDATED = 0                # an `invalidated_key` of a window that is still bound

cdef bint has_no_holes(object owner) noexcept


cdef class Key:
    cdef ReadKeys keys                 # keys of its rail
    cdef ibv_mr *mr                    # region for this message only, or NULL
    cdef Window window                 # window for the peer; None if `mr` has the key
    cdef uint64_t region               # address of the ibv_mr that the window is bound to
    cdef Key next                      # key of another rail for the same memory
    cdef uint32_t next_rkey(self) noexcept
    cdef uint32_t bound_rkey(self) noexcept
    cdef uint32_t flags(self) noexcept


cdef class ReadKeys:
    cdef BlockCache pool
    cdef object pd
    cdef list windows                  # unbound windows for reuse
    cdef int fork_generation           # fork generation in which the rail was created
    cdef int (*deregister)(ibv_mr *) noexcept nogil
    # excludes a key from the counts of bytes that the peer reads; NULL if the device does not count
    cdef void (*exclude_from_counts)(uint32_t) noexcept nogil
    cdef Key open(self, object source, const unsigned char *bytes, uint64_t length)
    cdef ibv_mr *register(self, object owner, const unsigned char *bytes, uint64_t length,
                          int access) except NULL
    cdef Window new_window(self)
    cdef int end_window(self, Key key, uint32_t invalidated_key) noexcept
    cdef int close(self, Key key, uint32_t invalidated_key) noexcept
    cpdef uint32_t local_key(self, Pinned memory) except? 0
