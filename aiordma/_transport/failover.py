"""The failover of a connection: if the lead breaks, another rail becomes the lead.

docs/design.md ("When the lead breaks") lists all steps of a failover with their functions.
`TRANSITIONS` defines when `Failover` takes its steps, and `rail_observers` lists the parts of a
connection that adapt to a new lead.

The next lead is the rail over which the peer's latest Resume has arrived, or else the rail that
came up first. If a side has neither, it waits for the peer's Resume for as long as packets are
retransmitted. Until there is a lead again, rails can only break, and they came up in the same order
on both sides. Both sides therefore choose the same rail, or the connection ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from .._datapath.rail import SendQueue
from .._datapath.session import Session
from .._datapath.work_queue import RailObserver
from ..errors import ConnectionBrokenError
from .memory import Memory
from .rails import Rail, Rails, RailState
from .sharing import Sharing

ALIVE = (RailState.CONNECTING, RailState.UP)
LEFT = "the rail broke at the peer, and the peer continues on another rail"
MIN_WAIT = 1.0  # minimum time to wait for the peer's Resume, in seconds


class FailoverState(Enum):
    """The state of a failover. Each value is a description of the state."""

    SETTLED = "both sides send their frames on the lead"
    BROKEN = "the lead has broken, and the next lead has not been chosen yet"
    WAITING = "no rail can be the lead yet; waiting for a rail to come up or for the peer's Resume"
    MOVED = "this side has chosen a new lead and waits for the peer's Resume on it"
    OVER = "no rail is left, or the connection has ended"


class FailoverEvent(Enum):
    """An event that can change the failover state. Each value is a description of the event."""

    BROKE = "the lead has broken here"
    CHOSEN = "a rail was chosen as the next lead"
    NO_RAIL_YET = "no rail is up, but a rail is being connected"
    NO_RAIL = "no rail is left"
    RAIL_UP = "a rail has come up"
    RESUMED = "the peer's Resume has arrived on the lead"
    RESUMED_ELSEWHERE = "the peer's Resume has arrived on another rail"
    OVERDUE = "the peer's Resume has not arrived in time"
    ENDED = "the connection has ended"


_S, _E = FailoverState, FailoverEvent

LIMITED = (_S.WAITING, _S.MOVED)
"""The states with a time limit, after which OVERDUE occurs."""


def rail_observers(messages: Session, memory: Memory, sharing: Sharing) -> tuple[RailObserver, ...]:
    """Return the parts of a connection that follow its rails, in the order of their calls."""
    return (
        # First, because the work that moves must be posted before the work of the other parts. It
        # also refers to regions by their keys for the old lead, which `RemoteRegions` replaces.
        messages.outbox,
        messages.outbox.stripes,  # before the parts that use `Session.rails_up`
        messages.outbox.offers,
        messages.controls,
        memory,
        messages.inbox.fetcher,
        messages.receives,
        sharing.shares,
        sharing.remote_regions,
        sharing,
    )


class PeerResume(NamedTuple):
    """A Resume of the peer."""

    rail_number: int
    frames: int
    """The number of this side's frames that the peer has handled."""


@dataclass(eq=False)
class Failover:
    """The state machine that chooses a connection's lead."""

    rails: Rails
    on_no_rail: Callable[[BaseException], object]
    """Called when no rail is left."""
    state: FailoverState = _S.SETTLED
    resume_number: int = 0
    """The number of lead changes on this side, which is the number of its latest Resume."""
    peer_resume_number: int = 0
    """The number of the peer's latest Resume."""
    peer_resume: PeerResume | None = None
    """The peer's latest Resume; None once it is processed."""
    broken_queue: SendQueue | None = None
    """The latest lead that broke."""
    _timer: asyncio.Handle | None = None
    """The timer for a state with a time limit. It may have fired or been cancelled."""

    def _apply(self, event: FailoverEvent, *arguments: Rail) -> None:
        following, step = TRANSITIONS.get((self.state, event), (self.state, None))
        if following is not self.state:
            self.state = following
            if self._timer is not None:
                self._timer.cancel()
            if following in LIMITED:
                config = self.rails.config
                # The peer needs this long to detect a broken rail, because a device may wait four
                # times the timeout before each retransmission (`Config.ack_timeout`).
                detection_time = 4 * config.ack_timeout * (1 + config.retry_count)
                overdue = partial(self._apply, _E.OVERDUE)
                self._timer = self.rails.call_later(max(MIN_WAIT, detection_time), overdue)
        if step is not None:
            step(self, *arguments)

    def can_fail_over(self, to_other_device: bool) -> bool:
        """Return whether another rail could become the lead.

        If `to_other_device` is True, only rails on other devices count.
        """
        lead = self.rails.lead_rail
        return any(
            self._is_alive(rail) and not (to_other_device and rail.device == lead.device)
            for rail in self.rails.rails
            if rail is not lead
        )

    @staticmethod
    def _is_alive(rail: Rail) -> bool:
        return rail.state in ALIVE and rail.queue is not None and not rail.queue.failed

    def fail_over(self, lead: SendQueue) -> None:
        """Choose another lead after `lead` has broken, or give up if no rail is left.

        Calling this again for the same lead repeats the search, for example after a rail has come
        up. Do not call this from within a drain.
        """
        if self.broken_queue is not lead:
            self.broken_queue = lead
            self._apply(_E.BROKE)
        if self.state is not _S.BROKEN and self.can_fail_over(to_other_device=False):
            return  # WAITING goes on as long as a rail may still come up
        alive = [rail for rail in self.rails.rails if self._is_alive(rail)]
        chosen_by_peer = [
            rail
            for rail in alive
            if self.peer_resume and rail.number == self.peer_resume.rail_number
        ]
        # If the peer has not chosen a rail yet, choose the rail that came up first. A rail whose
        # RailReady was lost with the lead is up on one side only. If it were chosen because of its
        # lower number, the two sides would choose different rails.
        queues = self.rails.messages.rails_up
        up = [rail for queue in queues for rail in alive if rail.queue is queue]
        if candidates := chosen_by_peer + up:
            self._apply(_E.CHOSEN, candidates[0])
        else:
            self._apply(_E.NO_RAIL_YET if alive else _E.NO_RAIL)

    def on_peer_resume(self, queue: SendQueue, number: int, frames: int) -> None:
        """Process a Resume, which says that the peer has moved to `queue` as its lead.

        `frames` is the number of frames that the peer has handled. Called from within a drain.
        """
        if number <= self.peer_resume_number:
            return  # outdated: a newer Resume arrived earlier over a faster rail
        self.peer_resume_number = number
        self.peer_resume = PeerResume(queue.number, frames)
        if not queue.failed:  # otherwise, the peer will notice and move to this side's lead
            by_lead = queue is self.rails.lead_rail.queue
            self._apply(_E.RESUMED if by_lead else _E.RESUMED_ELSEWHERE)

    def on_rail_up(self) -> None:
        """Repeat an ongoing search for a lead, because a rail has come up."""
        self._apply(_E.RAIL_UP)

    def end(self) -> None:
        """Stop the failover, because the connection has ended."""
        self._apply(_E.ENDED)

    # ---- steps, which TRANSITIONS refers to ----------------------------------------------

    def _stop_lead(self) -> None:
        self.rails.stop_lead()
        self.rails.probe()

    def _change_lead(self, rail: Rail) -> None:
        """Make `rail` the lead, and send this side's Resume on it."""
        queue = rail.queue
        assert queue is not None
        self.rails.set_lead(rail)
        for observer in self.rails.observers:
            observer.lead_changed(queue)
        # The peer may send as soon as it has the Resume, so the receives are posted before.
        self.resume_number += 1
        self.rails.messages.send_resume(self.resume_number)
        # The peer may have chosen this rail first, so that its Resume is already here.
        peer_resume = self.peer_resume
        if peer_resume and peer_resume.rail_number == rail.number and not queue.failed:
            self._apply(_E.RESUMED)

    def _retransmit(self) -> None:
        assert self.peer_resume is not None
        frames, self.peer_resume = self.peer_resume.frames, None
        self.rails.log_lead_change(self.rails.messages.continue_on_lead(frames))

    def _search_again(self) -> None:
        self.rails.owner.broken(self._cause)

    def _give_up(self) -> None:
        self.on_no_rail(self._cause)

    @property
    def _cause(self) -> BaseException:
        """The error that broke the lead."""
        assert self.broken_queue is not None
        assert self.broken_queue.error is not None
        return self.broken_queue.error

    def _follow_peer(self) -> None:
        self.rails.lead_rail.left_by_peer = True
        self._leave_lead(LEFT)

    def _leave_lead(
        self, why: str = "the peer does not continue on another rail after one broke"
    ) -> None:
        self.rails.messages.lead.rail_broke(ConnectionBrokenError(why))


Next = tuple[FailoverState, Callable[..., None] | None]

TRANSITIONS: Mapping[tuple[FailoverState, FailoverEvent], Next] = MappingProxyType(
    {
        (_S.SETTLED, _E.BROKE): (_S.BROKEN, Failover._stop_lead),
        (_S.SETTLED, _E.RESUMED_ELSEWHERE): (_S.SETTLED, Failover._follow_peer),
        (_S.BROKEN, _E.CHOSEN): (_S.MOVED, Failover._change_lead),
        (_S.BROKEN, _E.NO_RAIL_YET): (_S.WAITING, None),
        (_S.BROKEN, _E.NO_RAIL): (_S.OVER, Failover._give_up),
        (_S.WAITING, _E.RAIL_UP): (_S.BROKEN, Failover._search_again),
        (_S.WAITING, _E.RESUMED_ELSEWHERE): (_S.BROKEN, Failover._search_again),
        (_S.WAITING, _E.NO_RAIL): (_S.OVER, Failover._give_up),
        (_S.WAITING, _E.OVERDUE): (_S.OVER, Failover._give_up),
        (_S.MOVED, _E.BROKE): (_S.BROKEN, Failover._stop_lead),
        (_S.MOVED, _E.RESUMED): (_S.SETTLED, Failover._retransmit),
        (_S.MOVED, _E.RESUMED_ELSEWHERE): (_S.MOVED, Failover._follow_peer),
        (_S.MOVED, _E.OVERDUE): (_S.MOVED, Failover._leave_lead),
        **{(state, _E.ENDED): (_S.OVER, None) for state in _S},
    }
)
"""The next state, and the step on entering it. Other combinations have no effect."""
