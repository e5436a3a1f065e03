"""The table of a failover: what it has can happen, and what it names is there."""

from __future__ import annotations

from aiordma._transport.failover import LIMITED, TRANSITIONS, Failover, FailoverEvent, FailoverState


def test_each_state_is_reached_and_ends() -> None:
    reached = {FailoverState.SETTLED}
    for _ in FailoverState:
        reached |= {after for (before, _), (after, _) in TRANSITIONS.items() if before in reached}
    assert reached == set(FailoverState)
    left = {before for (before, _), (after, _) in TRANSITIONS.items() if after is not before}
    assert left == set(FailoverState) - {FailoverState.OVER}


def test_each_event_and_step() -> None:
    assert {event for _, event in TRANSITIONS} == set(FailoverEvent)
    steps = {step for _, step in TRANSITIONS.values()} - {""}
    assert all(hasattr(Failover, f"_{step}") for step in steps)
    assert {state for state, event in TRANSITIONS if event is FailoverEvent.OVERDUE} == set(LIMITED)
