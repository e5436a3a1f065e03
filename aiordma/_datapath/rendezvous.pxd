# Rendezvous messages that this side offers, and their memory.

from libc.stdint cimport uint32_t

cimport cython

from .keys cimport ReadKeys
from .sends cimport SendFuture

cdef uint32_t rendezvous_size(SendFuture message) noexcept
cdef void write_request(unsigned char *to, SendFuture message, bytes seal) noexcept
cdef int open_message(SendFuture message, ReadKeys keys) except -1
cdef int close_message(SendFuture message, uint32_t invalidated_key) noexcept


@cython.final
cdef class Offers:
    cdef dict messages                 # by request
    cdef Py_ssize_t most               # at a time
    cdef uint32_t max_pieces           # of a message
    cdef uint32_t latest               # request
    cdef int join_pieces(self, SendFuture message, uint32_t longest) except -1
    cdef int add(self, SendFuture message) except -1
    cdef int close(self) except -1

    cdef inline bint full(self) noexcept:
        return len(self.messages) >= self.most
