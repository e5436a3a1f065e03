# Long operations over several rails.

from libc.stdint cimport uint32_t, uint64_t

from .work_queue cimport RailObserver

cpdef list select_lanes(list lanes, uint64_t size)


cdef class Lane:
    cdef readonly object rail  # type: Any
    cdef readonly uint32_t chunks_in_flight
    cdef double recent_bytes           # recent bytes, which determine its share


cdef class Striped:
    cdef readonly uint64_t size, rest  # bytes in total; bytes that no rail has taken
    cdef list ranges                   # ranges of `rest`, as (first, end)
    cdef readonly uint32_t held_count  # number of its chunks in `Stripes.held_chunks`
    cdef readonly bint dropped
    cdef uint64_t movable_bytes(self, Lane lane, uint64_t start) except? 0xFFFFFFFFFFFFFFFF
    cdef int post(self, Lane lane, uint64_t start, uint64_t length) except -1
    cdef bint may_exceed_limit(self, Lane lane) except -1
    cdef int end_if_over(self) except -1
    cdef int connection_ended(self) except -1


cdef class Stripes(RailObserver):
    cdef readonly list lanes, operations
    cdef object lead_rail              # the lead, or the broken one until there is a new one
    cdef uint64_t last_repeated        # wr_id of the last work that the new lead had to repeat
    cdef object end_error              # error that ended the connection, or None
    cdef readonly list held_chunks     # in flight when lost: (lane, operation, start, length)
    cpdef int begin(self, Striped operation) except -1
    cpdef int finished(self, Lane lane, uint64_t length) except -1
    cpdef int requeue_chunk(self, Lane lane, Striped operation, uint64_t start, uint64_t length) except -1
    cdef int hold(self, Lane lane, Striped operation, uint64_t start, uint64_t length) except -1
    cpdef uint64_t drop(self, Striped operation) except? 0xFFFFFFFFFFFFFFFF
    cdef int serve(self) except -1
    cdef int close(self, object error) except -1
    cdef bint post_chunk(self, Lane lane, Striped operation) except -1
    cdef uint64_t chunk_size(self, Lane lane, uint64_t rest) noexcept
