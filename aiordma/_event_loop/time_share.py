"""A bounded share of an event loop's time, for work that strangers may request without end."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any

from .._core.finalizers import finalizer
from .._datapath.memory import Clock

# The work may use 1/SHARE of the loop's time. Its real cost is about twice as high, because loop
# overhead and garbage collection are not charged. A handshake took 1.1 ms, of which 0.5 ms were
# charged. This value and the following values are estimates.
SHARE = 16
# Number of seconds of work that may be done in a burst.
BURST = 0.1
# Maximum wait in seconds, even after a very long step.
MAX_WAIT = 1.0


class TimeShare:
    """A budget that limits one kind of work to 1/SHARE of the loop's time.

    Times are in seconds. In a virtual loop, work takes no time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._earned_at = clock.now()  # when the share covers the time used so far

    def wait(self) -> float:
        """Return the number of seconds to wait before more work may begin."""
        return max(0.0, self._earned_at - self._clock.now() - BURST * SHARE)

    def now(self) -> float:
        return self._clock.now()

    def use(self, seconds: float) -> None:
        """Charge the time of work that has just been done. A negative time is a refund."""
        now = self._clock.now()
        earned_at = max(self._earned_at, now) + seconds * SHARE
        self._earned_at = min(earned_at, now + BURST * SHARE + MAX_WAIT)


class Timed(Coroutine[Any, Any, bool]):
    """A coroutine that charges the time of its steps to a time share.

    If the wrapped work returns True, all of its time is refunded. `used` is the time that has been
    charged for the same work before.
    """

    def __init__(
        self, share: TimeShare, work: Coroutine[Any, Any, bool], used: float = 0.0
    ) -> None:
        self._share, self._work = share, work
        self._used = used  # the time charged for the work so far
        self._started = False
        self.__qualname__ = getattr(work, "__qualname__", "")  # shown as the name of the task

    def send(self, value: Any) -> Any:
        return self._step(self._work.send, value)

    def throw(self, error: Any, *more: Any) -> Any:
        try:
            return self._step(self._work.throw, error)
        finally:
            del error  # its traceback refers to this frame, which would be a reference cycle

    def close(self) -> None:
        self._work.close()

    @finalizer
    def __del__(self) -> None:
        if not self._started:
            self.close()  # nothing else closes it if the task never began

    def __await__(self) -> Generator[Any, Any, bool]:
        raise NotImplementedError  # a task calls send() and throw() directly

    def _step(self, step: Callable[[Any], Any], argument: Any) -> Any:
        """Run the work until it next waits, and charge the time or, at the end, refund it."""
        began = self._share.now()
        self._started = True
        is_refunded = False
        try:
            return step(argument)
        except StopIteration as end:
            is_refunded = end.value
            raise
        finally:
            used = self._share.now() - began
            self._share.use(-self._used if is_refunded else used)
            self._used += used
            del step, argument  # the traceback of an error refers to this frame
