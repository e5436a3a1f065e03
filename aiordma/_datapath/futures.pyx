# Futures of work requests and messages, and how the drain wakes the tasks that await them.
#
# An asyncio.Future schedules its callbacks for the next loop iteration, which costs a handle and a
# system call. A drain that is called by the loop does not interrupt a task. Before it returns, it
# can therefore run the callbacks of the futures that it has settled. If a future is settled at any
# other time, the loop runs its callbacks as usual.

cimport cython
from cpython.object cimport PyObject, PyTypeObject

from asyncio import _get_running_loop as get_running_loop

import asyncio
import contextvars
import os
import warnings


cdef extern from "Python.h":
    ctypedef object (*PyCFunction)(object, object)
    PyTypeObject PyCFunction_Type
    PyTypeObject *Py_TYPE(object)
    PyCFunction PyCFunction_GetFunction(object)
    int PyContext_Enter(object) except -1
    void PyErr_Fetch(PyObject **, PyObject **, PyObject **) noexcept
    void PyErr_Restore(PyObject *, PyObject *, PyObject *) noexcept
    void PyErr_WriteUnraisable(object) noexcept
    int PyContext_Exit(object) except -1
    unsigned long PyThread_get_thread_ident() noexcept

cdef enum:
    MAX_POLLS = 16          # polls by tasks that are about to wait, per iteration of the loop
    MAX_SINGLE_POLLS = 255  # single polls between two spins that find nothing

# AIORDMA_NO_DIRECT_WAKE makes the loop run all callbacks, including those of futures that a drain
# has settled (see docs/completion.md).
cdef bint direct_wake = not os.environ.get("AIORDMA_NO_DIRECT_WAKE")
cdef PyCFunction task_wakeup = NULL  # asyncio's own function; NULL until it is first seen
cdef object copy_context = contextvars.copy_context


cdef bint is_task_wakeup(object callback) except -1:
    """Return whether this is the wake-up callback of asyncio's C tasks.

    The first one is recognized by its name, `task_wakeup`. All others have the same C function.
    """
    global task_wakeup
    cdef PyCFunction function
    if Py_TYPE(callback) != &PyCFunction_Type:
        return False
    function = PyCFunction_GetFunction(callback)
    if task_wakeup == NULL and callback.__name__ == "task_wakeup":
        task_wakeup = function
    return function == task_wakeup and function != NULL


# A C variable remains valid while the interpreter shuts down, unlike a Python global, which may
# already be None.
cdef object warn = warnings.warn


cdef int warn_never_awaited(str name) noexcept:
    """Warn about an awaitable that was never awaited, as Python does for a coroutine.

    Called from a finalizer.
    """
    cdef PyObject *kind = NULL
    cdef PyObject *value = NULL
    cdef PyObject *traceback = NULL
    PyErr_Fetch(&kind, &value, &traceback)
    try:
        warn(f"coroutine '{name}' was never awaited", RuntimeWarning, stacklevel=1)
    except BaseException:
        PyErr_WriteUnraisable(name)
    PyErr_Restore(kind, value, traceback)
    return 0


cdef int complete_waiter(object waiter, object error) except -1:
    """Complete any waiter that is not done, with `error` as its exception unless that is None."""
    if isinstance(waiter, OpFuture):
        (<OpFuture> waiter).settle(DONE if error is None else FAILED, error)
    elif not waiter.done():
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
    return 0


cdef object wrap_callback_error(object error):
    """Return the exception that an await raises after a user's callback has raised `error`.

    StopIteration and GeneratorExit would not reach the awaiting code unchanged, so a RuntimeError
    replaces them, as for generators (PEP 479). All other errors are returned as they are.
    """
    if not isinstance(error, (StopIteration, GeneratorExit)):
        return error
    raised = RuntimeError(f"the callback raised {type(error).__name__}")
    raised.__cause__ = error
    return raised


@cython.final
cdef class Wakeups:
    """The state for waking the tasks of one event loop that await OpFutures.

    A drain wakes the tasks at its end. A task that is about to wait may poll first.
    """

    def __cinit__(self, loop: AbstractEventLoop):
        self.loop, self.settled = loop, []
        self.polls_left = MAX_POLLS

    cdef bint is_in_loop(self) except -1:
        """Return whether the caller runs in this loop, or in a callback that a drain is running."""
        if self.calling_back and self.drain_thread == PyThread_get_thread_ident():
            return True
        return get_running_loop() is self.loop

    cdef int begin_drain(self) except -1:
        # Drains on behalf of a running task defer callbacks. Any other drain is called by the loop,
        # which has started a new iteration.
        if not self.defers_callbacks:
            self.polls_left = MAX_POLLS
        self.draining = True
        return 0

    cdef int end_drain(self) except -1:
        self.draining = False
        call_back(self)
        if self.first_raised is not None:
            error, self.first_raised = self.first_raised, None
            raise error
        return 0

    cdef int defer_error(self, object error) except -1:
        """Keep an error, such as KeyboardInterrupt. The drain raises the first error at its end."""
        if self.first_raised is None:
            self.first_raised = error
        return 0

    cdef object get_done_future(self):
        """Return a finished asyncio.Future, which `run_callback` passes to tasks."""
        if self.done_future is None:
            self.done_future = self.loop.create_future()
            self.done_future.set_result(None)
        return self.done_future

    cdef int poll_before_wait(self, OpFuture future) except -1:
        """Poll or spin briefly for a task that is about to wait, if few other tasks are waiting.

        This costs less than an iteration of the loop.
        """
        if not self.polls_left or self.waiting > 1 or self.draining or self.poll_for is None:
            return 0
        self.polls_left -= 1
        if self.single_polls_left:
            self.single_polls_left -= 1
            self.poll_for(0)
            return 0
        self.poll_for(self.brief_spin_us)
        # While spins find nothing, about double the number of single polls before the next spin.
        if future.state != PENDING:
            self.single_polls = 0
        else:
            self.single_polls = min(2 * self.single_polls + 1, MAX_SINGLE_POLLS)
        self.single_polls_left = self.single_polls
        return 0


cdef int call_back(Wakeups wakeups) except -1:
    """Run the callbacks of the futures that this drain has settled."""
    cdef list settled = wakeups.settled
    cdef OpFuture future
    cdef Py_ssize_t i = 0
    if not settled or wakeups.calling_back:  # the outer drain runs the callbacks
        return 0
    # Deferred callbacks are only scheduled here. The loop runs them later.
    wakeups.calling_back = not wakeups.defers_callbacks
    wakeups.drain_thread = PyThread_get_thread_ident()
    while i < len(settled):  # a callback may settle more futures
        future = <OpFuture> settled[i]
        i += 1
        try:
            run_callbacks(future, wakeups.defers_callbacks)
        except BaseException as error:
            wakeups.defer_error(error)
    settled.clear()
    wakeups.calling_back = False
    return 0


# The cycle collector must not clear a future, because `__dealloc__` uses `wakeups` to decrement the
# number of waiting futures. The collector can break a cycle at another object instead, such as the
# task that awaits the future.
@cython.no_gc_clear
@cython.freelist(64)
cdef class OpFuture:
    """An awaitable future that a drain completes."""

    def __cinit__(self, Wakeups wakeups not None):
        self.wakeups = wakeups

    # ---- for a task and for asyncio's functions ----

    def __await__(self) -> Generator[Any]:
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Self:
        """Yield this future to the task that awaits it, unless it is already settled."""
        if self.state == PENDING:
            self.wakeups.poll_before_wait(self)
        if self.state == PENDING:
            self._asyncio_future_blocking = True
            return self
        if self.state != DONE:
            raise self.exception_to_raise()
        raise StopIteration

    cdef bint withdraw(self) except -1:
        """Leave the queue on cancellation. Returns False if the future is no longer queued."""
        return False

    def result(self):
        if self.state != DONE:
            raise self.exception_to_raise()

    def exception(self) -> BaseException | None:
        if self.state == FAILED:
            return self.reason
        self.result()  # raises unless the future is done without an error

    def exception_to_raise(self) -> BaseException:
        if self.state == FAILED:
            return self.reason
        if self.state == CANCELLED:
            return self._make_cancelled_error()
        return asyncio.InvalidStateError()

    def _make_cancelled_error(self) -> BaseException:
        return asyncio.CancelledError(*(() if self.reason is None else (self.reason,)))

    @property
    def _cancel_message(self) -> object:
        return self.reason

    def done(self) -> bool:
        return self.state != PENDING

    def cancelled(self) -> bool:
        return self.state == CANCELLED

    def cancel(self, msg=None) -> bool:
        if self.state != PENDING:
            return False
        self.settle(CANCELLED, msg)
        self.withdraw()
        return True

    def set_result(self, result: None):
        self.settle(DONE, None)

    def set_exception(self, error: BaseException):
        self.settle(FAILED, error)

    def get_loop(self) -> AbstractEventLoop:
        return self.wakeups.loop

    def add_done_callback(
        self, callback: Callable[[Self], object], *, context: Context | None = None
    ):
        if context is None:
            context = copy_context()
        if self.state != PENDING:
            self.call_soon(callback, context)
        elif self.callback is None:
            self.callback, self.context = callback, context
            self.wakeups.waiting += 1
        else:
            if self.more_callbacks is None:
                self.more_callbacks = []
            self.more_callbacks.append((callback, context))

    def remove_done_callback(self, callback: Callable[[Self], object]) -> int:
        cdef list all = self.more_callbacks or []
        if self.callback is None:
            return 0
        all.insert(0, (self.callback, self.context))
        cdef list kept = [each for each in all if each[0] != callback]
        cdef Py_ssize_t removed = len(all) - len(kept)
        if not kept:
            self.callback = self.context = self.more_callbacks = None
            self.wakeups.waiting -= self.state == PENDING
        else:
            self.callback, self.context = kept.pop(0)
            self.more_callbacks = kept
        return removed

    def __dealloc__(self):
        if self.callback is not None and self.state == PENDING and self.wakeups is not None:
            self.wakeups.waiting -= 1

    # ---- for the drain ----

    cdef int settle(self, int state, object reason) except -1:
        if self.state != PENDING:
            return 0
        self.state = state
        self.reason = reason
        if self.callback is None:
            return 0
        self.wakeups.waiting -= 1
        # A drain runs the callbacks at its end, which is faster than scheduling them in the loop.
        if direct_wake and self.wakeups.draining and state != CANCELLED:
            self.wakeups.settled.append(self)
            return 0
        return run_callbacks(self, deferred=True)

    cdef int call_soon(self, object callback, object context) except -1:
        cdef object loop = self.wakeups.loop
        if loop is None:  # the cycle collector has cleared the Wakeups
            return 0
        try:
            loop.call_soon(callback, self, context=context)
        except RuntimeError:
            if not loop.is_closed():
                raise
            # A closed loop runs no callbacks, so there is no task to wake.
        return 0

cdef int run_callbacks(OpFuture future, bint deferred) except -1:
    """Run the callbacks of a settled future, or schedule them in the loop if `deferred`."""
    cdef object callback = future.callback, context = future.context
    cdef list more = future.more_callbacks
    future.callback = future.context = future.more_callbacks = None
    if callback is not None:
        future.call_soon(callback, context) if deferred else run_callback(future, callback, context)
    if more is not None:
        for callback, context in more:
            future.call_soon(callback, context) if deferred else run_callback(future, callback, context)
    return 0


cdef int run_callback(OpFuture future, object callback, object context) except -1:
    """Run a callback immediately, in the same way as the loop would."""
    cdef object passed_future = future
    # A woken task calls `result()` of the future that is passed to its callback. For a future of
    # another class, this takes twenty times as long as for an asyncio.Future. Pass a finished
    # asyncio.Future instead.
    if future.state == DONE and is_task_wakeup(callback):
        passed_future = future.wakeups.get_done_future()
    PyContext_Enter(context)
    try:
        callback(passed_future)
    except (SystemExit, KeyboardInterrupt) as error:  # the drain raises it at its end
        future.wakeups.defer_error(error)
    except BaseException as error:
        future.wakeups.loop.call_exception_handler(
            {"message": "exception in a done callback of an aiordma future", "exception": error}
        )
    finally:
        PyContext_Exit(context)
    return 0
