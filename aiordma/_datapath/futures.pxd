# Futures that a drain settles, and how it wakes the tasks that await them.

from .work_queue cimport WorkRequestTable

cdef enum:
    PENDING = 0
    DONE = 1
    FAILED = 2
    CANCELLED = 3

cdef int never_awaited(str name) noexcept
cdef int complete_waiter(object waiter, object error) except -1


cdef class OpFuture:
    cdef WorkRequestTable table
    cdef object reason                 # of a failure or cancellation
    cdef object callback, context      # the first callback, nearly always the only one
    cdef list more_callbacks
    cdef int state
    cdef public bint _asyncio_future_blocking
    cdef int settle(self, int state, object reason) except -1
    cdef bint unregister(self) except -1
    cdef int run_callbacks(self, bint deferred) except -1
    cdef int run_callback(self, object callback, object context) except -1
    cdef int call_soon(self, object callback, object context) except -1
