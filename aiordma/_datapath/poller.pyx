# The poller drains an event loop's completions before a task waits and before the loop sleeps.

from asyncio import _get_running_loop as get_running_loop

from libc.stdint cimport uint32_t, uintptr_t

cimport cython

from .futures cimport Wakeups
from .work_queue cimport FOUND, MORE, WorkRequestTable, aiordma_drain

cdef enum:
    FIRST_SLICE_US = 2  # first slice of a spin that follows a poll without spinning

cdef enum:  # values of `polls_again`, see aiordma_drain
    NEVER = 0
    IF_FOUND = 1
    ALWAYS = 2


@cython.final
cdef class Poller:
    """The poller for the completions of one event loop.

    It drains completions when their channel is readable and when a task is about to wait. After
    finding completions, it polls again before the loop sleeps.
    """

    cdef readonly WorkRequestTable table
    cdef public bint closed
    cdef public bint polls_again       # the caller of the drain will poll again soon
    cdef public bint spin_scheduled, spin_found
    cdef public object spin  # type: Callable[[], object] | None
    cdef public uint32_t spin_us
    cdef uint32_t spun_us, slice_us    # of the current spin

    def __cinit__(self, WorkRequestTable table not None):
        self.table = table

    def serve(
        self, uintptr_t state, int limit, list entries_to_release,
        handle_rest: Callable[[int], object],
    ):
        """Drain at most `limit` completions of a readable channel.

        `handle_rest(outcome)` is the slow path. It handles an error, any further completions, and
        completion queues that wait in `entries_to_release` until they are empty.
        """
        self.serve_with(state, limit, entries_to_release, handle_rest, 0, NEVER)

    def spin_before_wait(
        self, uintptr_t state, int limit, list entries_to_release,
        handle_rest: Callable[[int], object], uint32_t spin_us,
    ):
        """Drain like `serve` for a task that is about to wait, spinning for up to `spin_us`.

        Callbacks are deferred to the loop, because the task is still running.
        """
        cdef Wakeups wakeups = self.table.wakeups
        if get_running_loop() is not wakeups.loop:
            return
        wakeups.defers_callbacks = True
        try:
            polls_again = IF_FOUND if self.polls_again or self.spin_scheduled else NEVER
            self.serve_with(state, limit, entries_to_release, handle_rest, spin_us, polls_again)
        finally:
            wakeups.defers_callbacks = False

    cdef int serve_with(
        self, uintptr_t state, int limit, list entries_to_release, object handle_rest,
        uint32_t spin_us, int polls_again,
    ) except -1:
        """Drain once, and call `handle_rest` only if there is more to do."""
        cdef int outcome
        if self.closed:
            return 0
        outcome = self.table.drain_once(<aiordma_drain *> state, limit, spin_us, polls_again)
        if outcome < 0 or outcome & MORE or entries_to_release:
            handle_rest(outcome)
        return 0

    def spin_soon(self):
        """Start spinning once more before the loop sleeps."""
        self.spun_us = self.slice_us = 0
        self.spin_slice_soon()

    cdef int spin_slice_soon(self) except -1:
        """Schedule the next slice of the spin in the loop, behind the callbacks that are ready."""
        if self.spin is not None:
            self.table.wakeups.loop.call_soon(self.spin)
            self.spin_scheduled = True
        return 0

    def spin_once(
        self, uintptr_t state, int limit, list entries_to_release,
        handle_rest: Callable[[int], object],
    ):
        """Run one slice of the spin, and schedule the next one for the loop's next iteration.

        The spin starts again as long as it finds completions.

        The loop runs other callbacks between the slices. The spin cannot know whether any will be
        ready, because a callback may schedule another one, as `asyncio.gather` does. To delay them
        only a little, a slice is at most slightly longer than all earlier slices together.
        """
        cdef bint previous_polls_again = self.polls_again
        cdef bint is_last = self.spun_us + self.slice_us >= self.spin_us
        cdef int outcome, after
        self.spin_scheduled = False
        if self.closed:
            return
        self.polls_again = True
        try:
            outcome = self.table.drain_once(
                <aiordma_drain *> state,
                limit,
                # Each drain announces to the device whether another poll follows soon. The last one
                # withdraws the announcement, which requires a spin of at least 1 microsecond.
                self.slice_us or is_last,
                IF_FOUND if is_last else ALWAYS,
            )
        finally:
            self.polls_again = previous_polls_again
        if outcome == 0 and not is_last and not entries_to_release:
            self.spun_us += self.slice_us
            self.slice_us = min(self.spun_us + FIRST_SLICE_US, self.spin_us - self.spun_us)
            self.spin_slice_soon()
        elif outcome != FOUND or entries_to_release:
            if outcome >= 0 and not outcome & FOUND and not is_last:
                # The last drain announced further polling to the device, but polling ends here.
                # Drain again to withdraw the announcement.
                after = self.table.drain_once(<aiordma_drain *> state, limit, 1, IF_FOUND)
                outcome = after if after < 0 else outcome | after
            handle_rest(outcome)
        else:
            self.spin_found = True
            self.spin_soon()
