"""The failover of a connection whose lead breaks: another rail becomes the lead.

1. The queue pair is stopped and destroyed; what has arrived by then is final.
2. The next lead is the rail by which the peer's latest Resume has come, else the one that came up
   first.  It gets the receives of the one before, and then this side's Resume, which says how many
   frames have been handled.
3. The peer's Resume on that rail says which frames are to be posted again.

A side without such a rail waits for the peer's Resume as long as packets are sent again.  Until
there is a lead again rails only break, and they have come up in the same order at both sides, so
both come to the same one, or the connection ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from .._datapath.rail import SendQueue
from ..errors import ConnectionBrokenError
from .rails import Rail, Rails, RailState

ALIVE = (RailState.CONNECTING, RailState.UP)
LEAST_WAIT = 1.0  # seconds, for the peer's Resume


@dataclass(eq=False)
class Failover:
    """Chooses the lead of one connection.  It does not know the connection."""

    rails: Rails
    moved: Callable[[Rail], object]
    """A rail is the lead now."""
    give_up: Callable[[BaseException], object]
    """No rail is left."""
    leads: int = 0
    """The number of changes of the lead here, and so the number of this side's latest Resume."""
    latest: int = 0
    """The number of the peer's latest Resume,"""
    resume: tuple[int, int] | None = None
    """and what it says, until it is acted on: the rail, and the frames that the peer has."""
    waits: asyncio.Handle | None = None
    broken: SendQueue | None = None
    """The latest lead that broke."""

    def __post_init__(self) -> None:
        self.rails.on_up = self._look_again

    def _look_again(self) -> None:
        """There may be a lead, which this waits for."""
        self._end_wait()
        self.rails.owner.broken(self._cause)

    @property
    def _cause(self) -> BaseException:
        """Why the lead broke."""
        assert self.broken is not None
        assert self.broken.error is not None
        return self.broken.error

    def may_go_on(self, elsewhere: bool) -> bool:
        """Whether there may be another lead, `elsewhere` on another device."""
        lead = self.rails.lead
        return any(
            self._alive(rail) and not (elsewhere and rail.device == lead.device)
            for rail in self.rails.rails
            if rail is not lead
        )

    @staticmethod
    def _alive(rail: Rail) -> bool:
        return rail.state in ALIVE and rail.queue is not None and not rail.queue.failed

    def go_on(self, lead: SendQueue) -> None:
        """The lead has broken; again does nothing.  Not from within a drain."""
        if self.broken is not lead:
            self.broken = lead
            self._end_wait()
            self.rails.lead_broke()
            self.rails.probe()
        if self.waits is None or not self.may_go_on(elsewhere=False):
            self._choose()

    def _choose(self) -> None:
        alive = [rail for rail in self.rails.rails if self._alive(rail)]
        resumed = [rail for rail in alive if self.resume and rail.number == self.resume[0]]
        # In the order of coming up, not of their numbers: if the lead lost a RailReady, the sides
        # would choose differently.
        up = [rail for queue in self.rails.messages.rails for rail in alive if rail.queue is queue]
        if candidates := resumed + up:
            self._lead_on(candidates[0])
        elif alive:
            self._wait()
        else:
            self.give_up(self._cause)

    def _lead_on(self, rail: Rail) -> None:
        assert rail.queue is not None
        self._wait()
        self.rails.lead_on(rail)
        self.leads += 1
        # First, by the keys that its work has.
        self.rails.messages.lead_on(rail.queue, self.leads)
        self.moved(rail)
        self._accept(rail)

    def _accept(self, rail: Rail) -> None:
        resume, queue = self.resume, rail.queue
        if resume and resume[0] == rail.number and queue is not None and not queue.failed:
            self.resume = None
            self._end_wait()
            self.rails.messages.resumed(resume[1])

    def resumed(self, queue: SendQueue, number: int, frames: int) -> None:
        """The peer's Resume has come by that rail; in a drain."""
        if number <= self.latest:
            return  # the peer has left that rail: a later one came by a faster rail
        self.latest, self.resume = number, (queue.number, frames)
        lead = self.rails.lead
        if lead.queue is queue:
            self._accept(lead)
        elif queue.failed:
            return  # as the peer will find: it comes to this side's lead
        elif self.waits is not None and self.rails.lead_is_down:
            self._look_again()
        else:  # the lead has broken at the peer
            self.rails.messages.lead.rail_broke(
                ConnectionBrokenError("the peer goes on by another rail: this one broke there")
            )

    def _wait(self) -> None:
        self._end_wait()
        config = self.rails.config
        again = 4 * config.ack_timeout * (1 + config.retry_count)
        self.waits = self.rails.later(max(LEAST_WAIT, again), self._over)

    def _end_wait(self) -> None:
        if self.waits is not None:
            self.waits.cancel()
            self.waits = None

    def _over(self) -> None:
        self.waits = None
        if self.rails.lead_is_down:
            self.give_up(self._cause)
        else:
            self.rails.messages.lead.rail_broke(
                ConnectionBrokenError("the peer does not go on by another rail, after one broke")
            )

    def stop(self) -> None:
        """The connection has ended."""
        self._end_wait()
