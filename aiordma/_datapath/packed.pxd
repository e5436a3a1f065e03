# What a message in msgpack costs to read.

from libc.stdint cimport int64_t


cdef class Values:
    cdef const unsigned char *at
    cdef const unsigned char *end
    cdef int64_t work                  # that is left
    cdef int spend(self, int64_t cost) except -1
    cdef int skip(self, int depth, bint is_key) except -1
