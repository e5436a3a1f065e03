# Rendezvous messages that this side offers, and their memory.

from libc.stdint cimport uint32_t

cimport cython

from .keys cimport ReadKeys
from .rail cimport SendQueue
from .sends cimport SendFuture
from .stripes cimport Lane
from .work_queue cimport FrameHandler, WorkRequest

cdef uint32_t rendezvous_size(SendFuture message) noexcept
cdef void write_request(unsigned char *to, SendFuture message, bytes seal) noexcept
cdef int open_message(SendFuture message, ReadKeys keys) except -1
cdef int close_message(SendFuture message, uint32_t invalidated_key) noexcept

cdef int close_keys(SendFuture message, ReadKeys keys, bint invalidated) noexcept


cdef class Opening(WorkRequest):
    cdef Offers offers
    cdef SendFuture message
    cdef SendQueue rail
    cdef uint32_t told                 # pieces of which the peer has the key
    cdef bint under_way, ends
    cdef int begin(self) except -1
    cdef int end(self) except -1
    cdef int close(self, bint invalidated) except -1
    cdef bytes next_keys(self, uint32_t most)
    cdef int told_to(self, uint32_t most) except -1


@cython.final
cdef class Offers:
    cdef FrameHandler session          # None: it is closed
    cdef dict messages                 # by request
    cdef dict ending                   # acknowledged, and still open to other rails: status and key
    cdef list unsent                   # Openings whose keys the peer has not been told
    cdef list left                     # by a lead that broke, to be opened to the next one; None: none
    cdef Py_ssize_t most               # at a time
    cdef uint32_t max_pieces           # of a message
    cdef uint32_t latest               # request
    cdef int join_pieces(self, SendFuture message, uint32_t longest) except -1
    cdef int open_elsewhere(self, SendFuture message, list lanes) except -1
    cdef int open_left(self, Lane lead) except -1
    cdef int opened(self, Opening opening) except -1
    cdef bint end_elsewhere(self, SendFuture message, uint32_t status,
                            uint32_t invalidated_key) except -1
    cdef int closed(self, Opening opening) except -1
    cdef int rail_gone(self, SendQueue rail) except -1
    cdef int add(self, SendFuture message) except -1
    cdef int close(self, bint ended) except -1

    cdef inline bint full(self) noexcept:
        return len(self.messages) >= self.most
