# The receives of one connection.

from libc.stdint cimport uint32_t, uint64_t

from .channel cimport MessageChannel
from .memory cimport PoolBlock
from .rail cimport SendQueue

cdef int release_all(list blocks) except -1


cdef class ReceiveQueue:
    cdef MessageChannel channel
    cdef SendQueue queue
    cdef object pool, source
    cdef uint32_t count, size, smallest, largest
    cdef uint64_t posted, used_up      # of all time
    cdef uint32_t missed, enough, too_small, to_repost
    cdef list larger
    cdef bint ended, retrying
    cdef int used(self, uint32_t posted, uint64_t length) except -1
    cdef uint32_t wanted(self) noexcept
    cdef int post(self, PoolBlock block) except -1
    cdef int repeat(self, PoolBlock block) except -1
    cdef int repost(self) except -1
    cdef int retry_later(self) except -1
    cdef int change_if_due(self) except -1
