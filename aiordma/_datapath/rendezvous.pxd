# Rendezvous messages that this side offers, and their memory.

from libc.stdint cimport uint32_t

cimport cython

from .memory cimport BlockCache
from .sends cimport Piece, SendFuture
from .windows cimport Window
from .work_queue cimport ibv_mr

cdef uint32_t rendezvous_size(SendFuture message) noexcept
cdef void write_request(unsigned char *to, SendFuture message, bytes seal) noexcept


cdef class RendezvousMemory:
    cdef BlockCache pool
    cdef object pd
    cdef list windows                  # of this connection that are not bound
    cdef int forks                     # of the process, when the connection was made
    cdef int (*deregister)(ibv_mr *) noexcept nogil
    cdef int open_message(self, SendFuture message) except -1
    cdef int open_piece(self, Piece piece) except -1
    cdef ibv_mr *register(self, Piece piece, object owner, int access) except NULL
    cdef Window take_window(self)
    cdef int close_message(self, SendFuture message, uint32_t invalidated_key) noexcept
    cdef int end_windows(self, SendFuture message, uint32_t invalidated_key) noexcept
    cdef int close_spare_windows(self) except -1


@cython.final
cdef class Offers:
    cdef dict messages                 # by request
    cdef RendezvousMemory memory
    cdef Py_ssize_t most               # at a time
    cdef uint32_t max_pieces           # of a message
    cdef uint32_t latest               # request
    cdef int join_pieces(self, SendFuture message, uint32_t longest) except -1
    cdef int add(self, SendFuture message) except -1
    cdef int close(self) except -1

    cdef inline bint full(self) noexcept:
        return len(self.messages) >= self.most
