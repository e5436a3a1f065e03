# Futures that a drain settles, and how it wakes the tasks that await them.

from libc.stdint cimport uint32_t

cimport cython

cdef enum:
    PENDING = 0
    DONE = 1
    FAILED = 2
    CANCELLED = 3

cdef int warn_never_awaited(str name) noexcept
cdef int complete_waiter(object waiter, object error) except -1
cdef object wrap_callback_error(object error)


@cython.final
cdef class Wakeups:
    cdef readonly object loop  # type: AbstractEventLoop
    cdef list settled                  # futures to call back at the end of this drain
    cdef readonly uint32_t waiting     # pending futures with a callback
    cdef bint draining
    cdef public bint calling_back      # a drain is calling back waiting tasks
    cdef public bint defers_callbacks  # callbacks go through the loop while a task is running
    cdef unsigned long drain_thread    # thread of the drain that calls back
    cdef object done_future
    cdef object first_raised           # first error to raise at the end of the drain
    cdef public object poll_for  # type: Callable[[int], object] | None
    cdef public uint32_t brief_spin_us
    cdef uint32_t polls_left, single_polls, single_polls_left
    cdef bint is_in_loop(self) except -1
    cdef int begin_drain(self) except -1
    cdef int end_drain(self) except -1
    cdef int defer_error(self, object error) except -1
    cdef object get_done_future(self)
    cdef int poll_before_wait(self, OpFuture future) except -1


cdef class OpFuture:
    cdef Wakeups wakeups
    cdef object reason                 # error of a failure, or message of a cancellation
    cdef object callback, context      # the first callback, which is usually the only one
    cdef list more_callbacks
    cdef int state
    cdef public bint _asyncio_future_blocking
    cdef int settle(self, int state, object reason) except -1
    cdef bint withdraw(self) except -1
    cdef int call_soon(self, object callback, object context) except -1
