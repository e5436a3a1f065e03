# Control messages that this side sends.

from libc.stdint cimport uint32_t, uint64_t

cimport cython

from .message cimport Fifo
from .outbox cimport Outbox
from .work_queue cimport FrameHandler, RailObserver


@cython.final
cdef class QueuedControl:
    cdef int kind                      # kind of its frame
    cdef bytes content
    cdef object waiter                 # None for a response
    cdef uint64_t backlog_position     # latest work in the backlog when it was queued, or 0
    cdef uint32_t window_key           # window of the peer that its frame invalidates, or 0


@cython.final
cdef class Controls(RailObserver):
    cdef Outbox outbox
    cdef FrameHandler session          # None once it is closed
    cdef Fifo waiting                  # QueuedControls
    cdef list spare_blocks
    cdef uint32_t latest_request
    cdef uint32_t responses, max_responses  # queued messages without a waiter, and their limit
    cdef int queue_response(
        self, int kind, bytes content, uint32_t window_key, bint is_goodbye=*
    ) except -1
    cdef int acknowledge(self, uint32_t request_id, uint32_t window_key) except -1
    cdef int flush(self) except -1
    cdef bint send_frame(
        self, int kind, bytes content, object waiter, uint32_t window_key=*
    ) except -1
