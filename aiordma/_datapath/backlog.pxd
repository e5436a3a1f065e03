# What waits for room on a rail, and what one that broke leaves.

from libc.stdint cimport uint64_t

cimport cython

from .work_queue cimport Wait, WorkRequest


@cython.final
cdef class Backlog:
    cdef object works                  # in order, with their numbers
    cdef uint64_t latest               # number
    cdef readonly bint waits           # it has work, or is held
    cdef bint held                     # the rail becomes the lead: what is new waits behind what is moved
    cdef Wait wait
    cdef int append(self, WorkRequest work) except -1
    cdef WorkRequest first(self)
    cdef bint remove(self, WorkRequest work) except -1
    cdef list take_all(self)
    cdef int note(self) except -1
    cdef bint has_posted(self, uint64_t number) except -1


@cython.final
cdef class Leftovers:
    cdef list posted, unposted         # work that can go on elsewhere, in its order; None: it is taken
    cdef list returned, late           # blocks of receives from before the rail broke, and since then
    cdef int keep(self, WorkRequest work, bint was_posted, bint is_first) except -1
    cdef list take_works(self, list between)
    cdef list take_receives(self)
