# Frames that the peer may not have received.

from libc.stdint cimport uint32_t, uint64_t

cimport cython

from .message cimport Fifo
from .sends cimport Frame


@cython.final
cdef class Journal:
    cdef public bint is_enabled        # False if no other rail could post the frames again
    cdef readonly uint64_t sent        # number of frames sent
    cdef public uint64_t received      # number of the peer's frames that were handled here
    cdef uint64_t handled_by_peer      # the peer has handled all frames with lower numbers
    cdef Fifo data, control            # frames whose credits have not been returned, in order
    cpdef int add(self, Frame frame, bint carries_message) except -1
    cpdef int release_credited(self, uint32_t control, uint32_t data) except -1
    cpdef list missing_frames(self, uint64_t arrived)
    cdef list all(self)
    cdef int close(self) except -1
