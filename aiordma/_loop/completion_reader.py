"""Handling of completions in an event loop, and polling for more."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from .._datapath.poller import Poller
from .._datapath.work_queue import COMPLETIONS_PER_CALL, WorkRequestTable
from .adaptive_polling import AdaptivePolling

if TYPE_CHECKING:
    from .. import verbs
    from .._datapath.rail import SendQueue

# The maximum number of drains per iteration of the loop. With COMPLETIONS_PER_CALL, it limits how
# long a busy device can delay other tasks. Both values are judgements, not measurements.
ROUNDS = 8

# A task spins for this number of microseconds before it waits, which is about the cost of a loop
# iteration.
BRIEF_SPIN_US = 3


class CompletionReader:
    """The handler of completions that the `Poller` of a driver's channel leaves to Python.

    Completions are handled when the channel is readable and when a task is about to wait. After
    other completions, the loop also polls for `spin_us` microseconds before it sleeps. If the
    channel fails, each queue in `sinks` fails too.
    """

    def __init__(
        self,
        channel: verbs.CompletionChannel,
        table: WorkRequestTable,
        sinks: dict[verbs.QueuePair, SendQueue],
        spin_us: int,
    ) -> None:
        self._channel = channel
        self._sinks = sinks
        self._drain = channel._drain_to
        self._poller: Poller = Poller(table)
        self._polling = AdaptivePolling(spin_us)
        self._coming_back = False  # whether a call for the remaining completions is scheduled
        wakeups = table.wakeups
        wakeups.brief_spin_us = min(BRIEF_SPIN_US, self._polling.spin_us)
        if wakeups.brief_spin_us:
            brief_spin = channel._reader(COMPLETIONS_PER_CALL, self._brief_spin)
            wakeups.brief_spin = partial(self._poller.spin_before_wait, *brief_spin)
            keep = channel._reader(COMPLETIONS_PER_CALL, self._on_spin_end)
            self._poller.spin = partial(self._poller.spin_once, *keep)

    def callback(self) -> tuple[Any, ...]:
        """Return a function and its arguments, to call when the channel is readable."""
        if self._polling.spin_us:
            return (self.on_completions,)
        # Without polling before sleep, wake-ups need not be recorded.
        otherwise = partial(self._handle, False)
        return self._poller.serve, *self._channel._reader(COMPLETIONS_PER_CALL, otherwise)

    def close(self) -> None:
        """Stop handling completions, and drop the references to this object."""
        self._poller.closed = True
        self._poller.table.wakeups.brief_spin = self._poller.spin = None

    def poll(self) -> bool:
        """Handle pending completions, whose tasks run later; return False if there are none."""
        wakeups = self._poller.table.wakeups
        around, wakeups.defers_callbacks = wakeups.defers_callbacks, True
        try:
            return self._handle(False)
        finally:
            wakeups.defers_callbacks = around

    def _brief_spin(self, drained: int) -> None:
        """Continue `Poller.spin_before_wait` on its slow path, when a task is about to wait."""
        self._handle(self._poller.polls_again or self._poller.spin_scheduled, drained)

    def on_completions(self) -> None:
        if self._poller.spin_scheduled:
            return  # a poll is scheduled for when the tasks have run; now it would delay them
        spin = self._polling.is_due()
        before = self._channel._peer_wakeups()
        if self._handle(spin):
            if spin or self._channel._wrote_to_polling_peers(before):
                self._spin_soon()
            else:
                self._polling.skipped()

    def _spin_soon(self) -> None:
        """Schedule a poll that runs just before the loop sleeps."""
        self._poller.spin_us = self._polling.spin_us
        self._poller.spin_soon()

    def _on_spin_end(self, drained: int) -> None:
        """Continue `Poller.spin_once` on its slow path: the last poll of a spin, after hits."""
        found, self._poller.spin_found = self._poller.spin_found, False
        again = self._handle(True, drained)
        if found or again:
            self._polling.hit()
        if again:
            self._spin_soon()
        else:
            self._polling.missed()

    def _handle(self, polls_again: bool, drained: int | None = None) -> bool:
        """Handle pending completions; return False if there is no reason to poll again soon.

        `drained` is the result of the first drain, if that has already been done.
        """
        poller, table = self._poller, self._poller.table
        if poller.closed:
            return False  # it was closed since `call_soon`
        around, poller.polls_again = poller.polls_again, polls_again
        try:
            if drained is None:
                found, more = self._drain(table, COMPLETIONS_PER_CALL, polls_again)
            else:
                found, more = self._channel._drained(drained)
            rounds = 1
            # A task that was woken by the drain may close this object.
            while more and rounds < ROUNDS and not poller.closed:
                some, more = self._drain(table, COMPLETIONS_PER_CALL, polls_again)
                found = found or some
                rounds += 1
        except OSError as error:  # the channel has failed, so nothing more will complete
            for sink in list(self._sinks.values()):
                sink.rail_broke(error)
            return False
        finally:
            poller.polls_again = around
        if not more:
            return found
        # The events of the remaining completions are taken, so the fd may not fire for them.
        if not self._coming_back:
            self._coming_back = True
            table.wakeups.loop.call_soon(self._come_back)
        return found

    def _come_back(self) -> None:
        self._coming_back = False
        self.on_completions()
