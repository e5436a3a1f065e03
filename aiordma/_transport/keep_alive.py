"""Finding a peer that has fallen silent: its machine, its network or its process has failed.

A connection that nothing is sent on cannot know.  So when nothing has completed for a while, an
RDMA write of no bytes is posted: it needs no memory and no key (IBTA 9.4.3, C9-88), and the peer's
*device* answers it.  A program that computes for minutes is not silent in this sense; one that was
stopped, together with its embedded device, is.
"""

from __future__ import annotations

from collections.abc import Callable

from .. import verbs
from .._core.operations import OperationKind
from .._datapath.rail import SendQueue
from .._datapath.work_queue import WorkRequest
from .._loop.coarse_timers import CoarseTimers
from ..config import Config
from ..errors import ConnectionBrokenError


class Probe(WorkRequest):
    """A write of nothing; that it completes is all that counts."""

    __slots__ = ("answered",)

    def __init__(self, answered: Callable[[], None]) -> None:
        super().__init__(OperationKind.PROBE, int(verbs.WROpcode.RDMA_WRITE), 0, 0, 0)
        self.answered = answered

    def done(self, byte_len: int) -> None:
        self.answered()

    def failed(self, error: BaseException) -> None:
        """The queue pair has failed, which all waiters are told."""

    def release(self) -> None:
        """There is no memory."""


class KeepAlive:
    """Asks after `interval` seconds without a completion; the rail breaks after `timeout` more."""

    def __init__(
        self, queue: SendQueue, timers: CoarseTimers, interval: float, timeout: float
    ) -> None:
        self._queue = queue
        self._interval = interval
        self._timeout = timeout
        self._timers = timers
        self._heard = queue.completions
        self._timer = timers.call_later(interval, self._look)

    def _look(self) -> None:
        """Has anything completed since the last time?"""
        queue = self._queue
        if queue.completions != self._heard:
            self._heard = queue.completions
            self._timer = self._timers.call_later(self._interval, self._look)
            return
        if queue.free:
            queue.post_checked(Probe(self._answered))
        # Else the send queue is full of unanswered work, which serves as a probe.
        self._timer = self._timers.call_later(self._timeout, self._give_up)

    def _answered(self) -> None:
        self._timer.cancel()
        self._heard = self._queue.completions
        self._timer = self._timers.call_later(self._interval, self._look)

    def _give_up(self) -> None:
        if self._queue.completions != self._heard:
            self._answered()  # something else came
        else:
            self._queue.rail_broke(
                ConnectionBrokenError(
                    f"the peer's device has not been heard for {self._interval + self._timeout:g} "
                    f"seconds and does not answer (Config.keep_alive)"
                )
            )

    def stop(self) -> None:
        """The connection has ended."""
        self._timer.cancel()


def keep_alive_of(queue: SendQueue, timers: CoarseTimers, config: Config) -> KeepAlive | None:
    """The one that `Config.keep_alive` asks for, from now on."""
    if config.keep_alive is None:
        return None
    return KeepAlive(queue, timers, config.keep_alive, config.keep_alive_timeout)
