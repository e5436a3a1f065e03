"""Detection of a silent peer, whose machine, network or process has failed.

An idle connection cannot notice these failures. If nothing has completed for a while, this side
posts a zero-byte RDMA write. The write needs no memory and no key (IBTA 9.4.3, C9-88), and the
peer's device acknowledges it. A program that computes for minutes therefore does not count as
silent, unlike a program that was stopped together with its embedded device.
"""

from __future__ import annotations

from collections.abc import Callable

from .. import verbs
from .._core.operations import OperationKind
from .._datapath.rail import SendQueue
from .._datapath.work_queue import WorkRequest
from .._event_loop.coarse_timers import CoarseTimers
from ..config import Config
from ..errors import ConnectionBrokenError


class Probe(WorkRequest):
    """A zero-byte write, posted only to see whether it completes."""

    __slots__ = ("on_done",)

    def __init__(self, on_done: Callable[[], None]) -> None:
        super().__init__(OperationKind.PROBE, int(verbs.WROpcode.RDMA_WRITE), 0, 0, 0)
        self.on_done = on_done

    def done(self, byte_len: int) -> None:
        self.on_done()

    def failed(self, error: BaseException) -> None:
        """Do nothing, because the queue pair's failure is reported to all waiters separately."""

    def release(self) -> None:
        """Do nothing, because a probe owns no memory."""


class KeepAlive:
    """A timer that probes the peer after `interval` seconds without a completion.

    If nothing completes within another `timeout` seconds, it breaks the rail.
    """

    def __init__(
        self, queue: SendQueue, timers: CoarseTimers, interval: float, timeout: float
    ) -> None:
        self._queue = queue
        self._interval = interval
        self._timeout = timeout
        self._timers = timers
        self._seen_completions = queue.completions
        self._timer = timers.call_later(interval, self._check)

    def _check(self) -> None:
        """Probe the peer if nothing has completed since the last check."""
        queue = self._queue
        if queue.completions != self._seen_completions:
            self._seen_completions = queue.completions
            self._timer = self._timers.call_later(self._interval, self._check)
            return
        # If the send queue is full, no probe is needed, because the outstanding work serves as one.
        if queue.free:
            queue.post_checked(Probe(self._restart))
        self._timer = self._timers.call_later(self._timeout, self._give_up)

    def _restart(self) -> None:
        self._timer.cancel()
        self._seen_completions = self._queue.completions
        self._timer = self._timers.call_later(self._interval, self._check)

    def _give_up(self) -> None:
        if self._queue.completions != self._seen_completions:
            self._restart()  # something else has completed
        else:
            self._queue.rail_broke(
                ConnectionBrokenError(
                    f"keep-alive timed out: nothing received from the peer's device for "
                    f"{self._interval + self._timeout:g} seconds (Config.keep_alive)"
                )
            )

    def stop(self) -> None:
        """Stop probing, because the connection has ended."""
        self._timer.cancel()


def start_keep_alive(queue: SendQueue, timers: CoarseTimers, config: Config) -> KeepAlive | None:
    """Start a keep-alive timer, or return None if `Config.keep_alive` is not set."""
    if config.keep_alive is None:
        return None
    return KeepAlive(queue, timers, config.keep_alive, config.keep_alive_timeout)
