# The receives of a rail, and the size that the session has chosen for them.

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from .controls cimport Controls
from .memory cimport BlockCache, PoolBlock
from .rail cimport SendQueue


@cython.final
cdef class ReceiveSizes:
    cdef uint32_t size, smallest, largest
    cdef uint32_t missed, enough       # frames of late that need the largest, or not
    cdef uint64_t used_up              # receives, of all time
    cdef uint64_t all_fit_from         # number of a receive: those before may be smaller than `size`
    cdef uint32_t wanted(self) noexcept

    cdef inline uint64_t too_small(self) noexcept:
        """At most so many of the posted receives are shorter than `size`."""
        return self.all_fit_from - self.used_up if self.all_fit_from > self.used_up else 0

    cdef inline void used(self, uint64_t length) noexcept:
        """A frame has taken a receive; it has `length`, or would have if the peer had sent it
        eagerly."""
        self.used_up += 1
        if length <= self.smallest:
            self.enough += 1
        elif length <= self.largest:
            self.enough = 0
            self.missed += 1


@cython.final
cdef class Receives:
    cdef Controls controls             # None: it is closed
    cdef SendQueue queue               # of the lead, or of the one that broke while there is none
    cdef ReceiveSizes sizes            # of the session
    cdef object pool, source
    cdef uint64_t posted               # of all time
    cdef uint32_t count, refill        # posted again for so many frames at a time
    cdef uint32_t taken, to_repost     # frames: fewer than that; without a receive in their place
    cdef list larger                   # blocks for those that are too small
    cdef bint ended, retrying
    cdef int post(self, PoolBlock block) except -1
    cdef int repeat(self, PoolBlock block) except -1
    cdef int repost(self) except -1
    cdef int change_if_due(self) except -1
    cdef int move(self, SendQueue rail, BlockCache pool) except -1

    cdef inline int frame_taken(self) except -1:
        """The messages of a frame are the user's."""
        self.taken += 1
        if self.taken < self.refill:
            return 0
        self.to_repost += self.taken
        self.taken = 0
        return self.repost()
