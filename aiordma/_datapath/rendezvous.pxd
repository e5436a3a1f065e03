# Rendezvous messages that this side offers, and their memory.

from libc.stdint cimport uint32_t

cimport cython

from .keys cimport ReadKeys
from .rail cimport SendQueue
from .sends cimport SendFuture
from .stripes cimport Lane
from .work_queue cimport FrameHandler, RailObserver, WorkRequest

cdef uint32_t rendezvous_size(SendFuture message) noexcept
cdef void write_request(unsigned char *to, SendFuture message, bytes seal) noexcept
cdef int open_keys(SendFuture message, ReadKeys keys) except -1
cdef int close_message(SendFuture message, uint32_t invalidated_key) noexcept

cdef enum:  # values of `invalidated`
    KEYS_VALID = 0
    KEYS_INVALIDATED = 1

cdef int close_keys(SendFuture message, ReadKeys keys, bint invalidated) noexcept


cdef class Opening(WorkRequest):
    cdef Offers offers
    cdef SendFuture message
    cdef SendQueue rail
    cdef uint32_t announced            # number of pieces whose keys the peer has
    cdef bint in_flight, end_requested
    cdef int begin(self) except -1
    cdef int end(self) except -1
    cdef int close(self, bint invalidated) except -1
    cdef bytes next_keys(self, uint32_t most)
    cdef int mark_announced(self, uint32_t most) except -1


@cython.final
cdef class Offers(RailObserver):
    cdef FrameHandler session          # None once it is closed
    cdef dict messages                 # by request number
    # (status, invalidated key) of each acknowledged message that is still open to other rails
    cdef dict ending
    cdef list unannounced              # Openings with keys that the peer has not been told
    cdef list to_reopen                # messages to open to the new lead, or None
    cdef Py_ssize_t max_messages       # maximum number of messages at a time
    cdef uint32_t max_pieces           # maximum number per message
    cdef uint32_t latest               # number of the latest request
    cdef int join_pieces(self, SendFuture message, uint32_t longest) except -1
    cdef int open_elsewhere(self, SendFuture message, list lanes) except -1
    cdef int reopen_messages(self, Lane lead) except -1
    cdef int on_opened(self, Opening opening) except -1
    cdef bint end_elsewhere(self, SendFuture message, uint32_t status,
                            uint32_t invalidated_key) except -1
    cdef int on_closed(self, Opening opening) except -1
    cdef int add(self, SendFuture message) except -1
    cdef int close(self, bint ended) except -1

    cdef inline bint is_full(self) noexcept:
        return len(self.messages) >= self.max_messages
