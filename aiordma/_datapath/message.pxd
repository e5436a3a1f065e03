# A received message, an ordered queue of items, and the counters of a connection.

from libc.stdint cimport uint32_t, uint64_t

cimport cython

from .memory cimport PoolBlock

cdef Message new_message(PoolBlock block, uint64_t offset, uint64_t length)


cdef class Message:
    cdef PoolBlock block
    cdef uint64_t offset, length
    cdef uint32_t imm_value, bytes_written
    cdef bint has_imm, has_written, is_last_in_frame, fetched
    cdef void end_lease(self) noexcept


@cython.final
cdef class Fifo:
    cdef list items
    cdef Py_ssize_t head, count
    cdef Py_ssize_t place(self, Py_ssize_t i) noexcept
    cdef int grow(self) except -1
    cdef object first(self)
    cdef int append(self, object item) except -1
    cdef int appendleft(self, object item) except -1
    cdef object popleft(self)
    cdef bint remove(self, object item) except -1
    cdef bint replace(self, object item, object other) except -1
    cdef list take_all(self)
    cdef list all(self)

    cdef inline Py_ssize_t size(self) noexcept:
        return self.count


cdef extern from "verbs/boundary.h":
    struct aiordma_served:
        uint64_t bytes_read
        uint64_t bytes_written


cdef class Served:
    cdef const aiordma_served *counts  # NULL if the device does not count
    cdef void (*release)(const aiordma_served *) noexcept nogil


cdef class Counts:
    cdef public uint64_t messages_sent, messages_received, bytes_sent, bytes_received
    cdef public uint64_t reads, writes, atomics
    cdef public uint64_t bytes_read, bytes_written
    cdef uint64_t closed_read, closed_written  # bytes that the peer moved on closed rails
    cdef list served                   # counters of the open rails
    cdef int open_rail(self, Served served) except -1
    cdef int close_rail(self, Served served) except -1
