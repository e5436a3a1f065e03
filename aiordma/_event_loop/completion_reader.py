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

# Maximum number of drains per loop iteration. Together with COMPLETIONS_PER_CALL, it limits how
# long a busy device can delay other tasks. Neither value is based on measurements.
MAX_DRAINS = 8

# Number of microseconds for which a task spins before it waits. An iteration of the loop would cost
# about the same.
BRIEF_SPIN_US = 3


class CompletionReader:
    """The slow path of a driver's completion handling, to which its `Poller` falls back.

    Completions are handled when the channel is readable and when a task is about to wait. After
    handling a readable channel, the loop may also poll for `spin_us` microseconds before it sleeps.
    If the channel fails, all send queues in `send_queues` fail too.
    """

    def __init__(
        self,
        channel: verbs.CompletionChannel,
        table: WorkRequestTable,
        send_queues: dict[verbs.QueuePair, SendQueue],
        spin_us: int,
    ) -> None:
        self._channel = channel
        self._send_queues = send_queues
        self._drain = channel._drain_to
        self._poller: Poller = Poller(table)
        self._polling = AdaptivePolling(spin_us)
        self._continue_scheduled = False  # whether `_continue_draining` is scheduled
        # A task spins briefly before it waits, and the loop spins for longer before it sleeps.
        wakeups = table.wakeups
        wakeups.brief_spin_us = min(BRIEF_SPIN_US, self._polling.spin_us)
        if wakeups.brief_spin_us:
            brief_spin = channel._poller_arguments(COMPLETIONS_PER_CALL, self._on_brief_spin)
            wakeups.poll_for = partial(self._poller.spin_before_wait, *brief_spin)
            long_spin = channel._poller_arguments(COMPLETIONS_PER_CALL, self._on_spin_end)
            self._poller.spin = partial(self._poller.spin_once, *long_spin)

    def callback(self) -> tuple[Any, ...]:
        """Return the callback for a readable channel, followed by its arguments."""
        if self._polling.spin_us:
            return (self.on_completions,)
        # Wake-ups need not be recorded if `spin_us` is 0, because the loop then never polls before
        # it sleeps.
        slow_path = partial(self._handle, polls_again=False)
        return self._poller.serve, *self._channel._poller_arguments(COMPLETIONS_PER_CALL, slow_path)

    def close(self) -> None:
        """Stop handling completions, and drop all references to this object."""
        self._poller.closed = True
        self._poller.table.wakeups.poll_for = self._poller.spin = None

    def poll(self) -> bool:
        """Handle pending completions for a running task; return False if there were none.

        The completions' callbacks are deferred to the loop, because the task is still running.
        """
        wakeups = self._poller.table.wakeups
        previous, wakeups.defers_callbacks = wakeups.defers_callbacks, True
        try:
            return self._handle(polls_again=False)
        finally:
            wakeups.defers_callbacks = previous

    def _on_brief_spin(self, drained: int) -> None:
        """Handle the slow path of `Poller.spin_before_wait`, for a task that is about to wait."""
        # Another poll follows if the caller of the drain that woke the task polls again, or if a
        # spin is scheduled.
        polls_again = self._poller.polls_again or self._poller.spin_scheduled
        self._handle(drained, polls_again=polls_again)

    def on_completions(self) -> None:
        """Handle completions after a wake-up, and let the loop spin if more are likely soon.

        More are likely if a spin is due, or if handling the completions led to writes to peers that
        are polling, because these peers will respond quickly.
        """
        if self._poller.spin_scheduled:
            return  # a poll is already scheduled; polling now would delay the tasks
        spin = self._polling.is_due()
        wakeups_before = self._channel._peer_wakeups()
        if self._handle(polls_again=spin):
            if spin or self._channel._wrote_to_polling_peers(wakeups_before):
                self._spin_soon()
            else:
                self._polling.skipped()

    def _spin_soon(self) -> None:
        """Schedule a poll that runs just before the loop sleeps."""
        self._poller.spin_us = self._polling.spin_us
        self._poller.spin_soon()

    def _on_spin_end(self, drained: int) -> None:
        """Handle the slow path of `Poller.spin_once`, and record the result of the spin."""
        found, self._poller.spin_found = self._poller.spin_found, False
        again = self._handle(drained, polls_again=True)
        # Every spin ends with a miss. If it has found anything, the misses before it do not count.
        if found or again:
            self._polling.hit()
        if again:
            self._spin_soon()
        else:
            self._polling.missed()

    def _handle(self, drained: int | None = None, *, polls_again: bool) -> bool:
        """Handle pending completions; return whether to expect more of them soon.

        More are expected if this call found completions or the device made progress, but not if the
        reader has been closed or the channel has failed.

        Args:
            drained: The result of the first drain if the caller has already done it.
            polls_again: Whether the caller will poll again soon if this call finds completions.
                Peers need not notify this loop until then.
        """
        poller, table = self._poller, self._poller.table
        if poller.closed:
            return False  # it was closed since `call_soon`
        previous, poller.polls_again = poller.polls_again, polls_again
        try:
            if drained is None:
                found, more = self._drain(table, COMPLETIONS_PER_CALL, polls_again)
            else:
                found, more = self._channel._drained(drained)
            rounds = 1
            # The drain may have woken a task that closed this object.
            while more and rounds < MAX_DRAINS and not poller.closed:
                found_some, more = self._drain(table, COMPLETIONS_PER_CALL, polls_again)
                found = found or found_some
                rounds += 1
        except OSError as error:  # the channel has failed, so nothing more will complete
            for send_queue in list(self._send_queues.values()):
                send_queue.rail_broke(error)
            return False
        finally:
            poller.polls_again = previous
        if not more:
            return found
        # Continue in the next iteration. The events for the remaining completions have already been
        # consumed, so the descriptor may not become readable again.
        if not self._continue_scheduled:
            self._continue_scheduled = True
            table.wakeups.loop.call_soon(self._continue_draining)
        return found

    def _continue_draining(self) -> None:
        self._continue_scheduled = False
        self.on_completions()
