"""Test each row of the failover's state table: next state, step taken, and time limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from aiordma import Config
from aiordma._transport.failover import (
    LIMITED,
    TRANSITIONS,
    Failover,
    FailoverEvent,
    FailoverState,
    PeerResume,
)
from tests.docs.connection_page import step_name

STATES = {
    "SETTLED": {"BROKE": "BROKEN", "RESUMED_ELSEWHERE": "SETTLED"},
    "BROKEN": {"CHOSEN": "MOVED", "NO_RAIL_YET": "WAITING", "NO_RAIL": "OVER"},
    "WAITING": {
        "RAIL_UP": "BROKEN",
        "RESUMED_ELSEWHERE": "BROKEN",
        "NO_RAIL": "OVER",
        "OVERDUE": "OVER",
    },
    "MOVED": {
        "BROKE": "BROKEN",
        "RESUMED": "SETTLED",
        "RESUMED_ELSEWHERE": "MOVED",
        "OVERDUE": "MOVED",
    },
    "OVER": {},
}
CAUSE = RuntimeError("a cable")


class Scene:
    """A failover with mock rails that record the calls they receive."""

    def __init__(self, state: FailoverState) -> None:
        self.rails, self.lost = Mock(config=Config(), observers=[Mock()]), Mock()
        self.failover = Failover(self.rails, self.lost)
        self.failover.broken_queue = Mock(error=CAUSE)
        self.failover.peer_resume = PeerResume(1, 7)
        self.failover.state = state

    def take(self, event: FailoverEvent) -> None:
        rail: Any = SimpleNamespace(number=2, queue=Mock())
        self.failover._apply(event, *[rail][: event is FailoverEvent.CHOSEN])

    @property
    def done(self) -> set[str]:
        """The names of the steps taken."""
        effects = {
            "stop_lead": self.rails.stop_lead,
            "change_lead": self.rails.messages.send_resume,
            "retransmit": self.rails.messages.continue_on_lead,
            "search_again": self.rails.owner.broken,
            "give_up": self.lost,
            "gives up the lead": self.rails.messages.lead.rail_broke,
        }
        return {name for name, effect in effects.items() if effect.called}


@pytest.mark.parametrize("event", FailoverEvent)
@pytest.mark.parametrize("state", FailoverState)
def test_failover_state_follows_the_transition_table(
    state: FailoverState, event: FailoverEvent
) -> None:
    scene = Scene(state)
    scene.take(event)
    following = "OVER" if event.name == "ENDED" else STATES[state.name].get(event.name, state.name)
    assert scene.failover.state.name == following
    assert ((state, event) in TRANSITIONS) == (event.name in {"ENDED", *STATES[state.name]})
    step = step_name(TRANSITIONS.get((state, event), (state, None))[1])
    step = "gives up the lead" if step in ("follow_peer", "leave_lead") else step
    assert scene.done == {step} - {""}
    assert scene.rails.call_later.called == (following != state.name and following in NAMES)


NAMES = {state.name for state in LIMITED}


@pytest.mark.parametrize("state", LIMITED)
def test_failover_gives_up_on_timeout_and_end_cancels_the_timer(state: FailoverState) -> None:
    scene = Scene(FailoverState.BROKEN)
    waits = state is FailoverState.WAITING
    scene.take(FailoverEvent.NO_RAIL_YET if waits else FailoverEvent.CHOSEN)
    (_, overdue), _ = scene.rails.call_later.call_args
    overdue()
    assert scene.done >= {"give_up" if waits else "gives up the lead"}
    scene.failover.end()
    scene.rails.call_later.return_value.cancel.assert_called()


def test_failover_follows_only_newer_resumes_from_working_rails() -> None:
    scene = Scene(FailoverState.MOVED)
    other, lead = Mock(failed=False), scene.rails.lead_rail.queue
    lead.failed = False
    scene.failover.peer_resume_number = 3
    scene.failover.on_peer_resume(other, 3, 0)
    scene.failover.on_peer_resume(Mock(failed=True), 4, 0)
    assert scene.done == set()
    scene.failover.on_peer_resume(other, 5, 0)
    assert scene.done == {"gives up the lead"}
    scene.failover.on_peer_resume(lead, 6, 11)
    scene.rails.messages.continue_on_lead.assert_called_with(11)
