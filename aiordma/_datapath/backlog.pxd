# Work that waits for room on a rail, and work left over from a rail that broke.

from libc.stdint cimport uint64_t

cimport cython

from .work_queue cimport Wait, WorkRequest


@cython.final
cdef class Backlog:
    cdef object works                  # work in order, with its numbers
    cdef uint64_t latest               # number of the latest work
    cdef readonly bint is_waiting      # it is held or has work
    cdef bint held                     # nothing is posted until the new lead rail has taken over
    cdef Wait wait
    cdef int append(self, WorkRequest work) except -1
    cdef WorkRequest first(self)
    cdef bint remove(self, WorkRequest work) except -1
    cdef list take_all(self)
    cdef int take_over(self, Backlog previous) except -1
    cdef int update_wait(self) except -1
    cdef bint has_posted(self, uint64_t number) except -1


cdef enum:  # values of `is_first`
    IS_LAST = 0
    IS_FIRST = 1


@cython.final
cdef class Leftovers:
    cdef list posted, unposted         # work for another rail, in order; None once taken
    cdef list returned_receives        # receive blocks from before the rail broke
    cdef list late_receives            # receive blocks that it was to post afterwards
    cdef int keep(self, WorkRequest work, bint was_posted, bint is_first) except -1
    cdef list take_works(self, list unfinished)
    cdef list take_receives(self)
