# Frames that the peer may not have.

from libc.stdint cimport uint32_t, uint64_t

cimport cython

from .message cimport Fifo
from .sends cimport Frame


@cython.final
cdef class Journal:
    cdef public bint keeps             # else no other rail can post them again, and none is here
    cdef readonly uint64_t sent        # frames, of all time
    cdef public uint64_t received      # frames of the peer that have been handled here
    cdef uint64_t first                # the peer has handled all frames before it
    cdef Fifo data, control            # those that no credit has come back for, in their order
    cpdef int add(self, Frame frame, bint carries_message) except -1
    cpdef int credited(self, uint32_t control, uint32_t data) except -1
    cpdef list after(self, uint64_t arrived)
    cdef list all(self)
    cdef int close(self) except -1
