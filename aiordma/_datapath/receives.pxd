# The receives of a rail, and the size that the session has chosen for them.

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from .controls cimport Controls
from .memory cimport BlockCache, PoolBlock
from .rail cimport SendQueue
from .work_queue cimport RailObserver


@cython.final
cdef class ReceiveSizes:
    cdef uint32_t size, smallest, largest
    cdef uint32_t large_frames, small_frames  # recent frames that need the largest size, or do not
    cdef uint64_t used_up              # number of receives used so far
    cdef uint64_t all_fit_from         # receives with lower numbers may be smaller than `size`
    cdef uint32_t preferred_size(self) noexcept

    cdef inline uint64_t too_small(self) noexcept:
        """Return the maximum number of posted receives that are smaller than `size`."""
        return self.all_fit_from - self.used_up if self.all_fit_from > self.used_up else 0

    cdef inline void count_frame(self, uint64_t length) noexcept:
        """Count a frame that has used a receive.

        `length` is its length, or for a rendezvous the length that it would have as an eager frame.
        """
        self.used_up += 1
        if length <= self.smallest:
            self.small_frames += 1
        elif length <= self.largest:
            self.small_frames = 0
            self.large_frames += 1


@cython.final
cdef class Receives(RailObserver):
    cdef Controls controls             # None once it is closed
    cdef SendQueue queue               # of the lead, or of the broken one until it is replaced
    cdef ReceiveSizes sizes            # shared with the session
    cdef object pool, block_source
    cdef uint64_t posted               # number of receives posted so far
    cdef uint32_t count, repost_after  # number of receives; frames taken before a repost
    cdef uint32_t taken_frames, to_repost  # frames taken since the last repost; receives missing
    cdef list larger_blocks            # blocks that will replace smaller ones
    cdef bint ended, retrying
    cdef int post(self, PoolBlock block) except -1
    cdef int repost_block(self, PoolBlock block) except -1
    cdef int repost(self) except -1
    cdef int update_size(self) except -1

    cdef inline int frame_taken(self) except -1:
        """Count a frame whose messages the user has taken."""
        self.taken_frames += 1
        if self.taken_frames < self.repost_after:
            return 0
        self.to_repost += self.taken_frames
        self.taken_frames = 0
        return self.repost()
