"""Tests that the table of connection states is complete and leads to one final state."""

from __future__ import annotations

import pytest

from aiordma._core.connection_states import (
    CLOSING,
    IGNORED,
    LIMITED,
    TRANSITIONS,
    Cause,
    ConnectionState,
    LifecycleEvent,
)

FINAL_STATES = {ConnectionState.ENDED, ConnectionState.CLOSED}
OF_ONE_STATE = {
    LifecycleEvent.ESTABLISHED,
    LifecycleEvent.KEY_REQUIRED,
    LifecycleEvent.PROVED,
    LifecycleEvent.RELEASED,
}


def test_transition_and_ignored_tables_are_disjoint() -> None:
    assert not TRANSITIONS.keys() & IGNORED


def test_only_transitions_to_ended_have_a_cause() -> None:
    for (state, event), row in TRANSITIONS.items():
        assert (row.next is ConnectionState.ENDED) == (row.cause is not None)
        if state in FINAL_STATES:
            assert (state, event) == (ConnectionState.ENDED, LifecycleEvent.RELEASED)


@pytest.mark.parametrize("state", [state for state in ConnectionState if state not in FINAL_STATES])
@pytest.mark.parametrize("event", [LifecycleEvent.BROKEN, LifecycleEvent.ABORTED])
def test_every_live_state_ends_on_break_or_abort(
    state: ConnectionState, event: LifecycleEvent
) -> None:
    assert TRANSITIONS[state, event].next is ConnectionState.ENDED


def test_peer_is_the_recorded_cause_after_it_closes() -> None:
    left = {ConnectionState.PEER_CLOSED, ConnectionState.BOTH_CLOSING}
    for (state, event), row in TRANSITIONS.items():
        if row.cause is not None:
            assert (row.cause is Cause.PEER) == (state in left)
        elif state not in FINAL_STATES:
            comes = state in left or event is LifecycleEvent.PEER_GOODBYE
            assert (row.next in left) == comes


def test_closing_states_lead_to_closing_states() -> None:
    for (state, event), row in TRANSITIONS.items():
        if row.cause is None and state not in FINAL_STATES:
            closes = state in CLOSING or event is LifecycleEvent.CLOSE
            assert (row.next in CLOSING) == closes


def test_finished_event_is_valid_only_in_time_limited_states() -> None:
    finishing = {state for state, event in TRANSITIONS if event is LifecycleEvent.FINISHED}
    assert finishing == LIMITED
    assert CLOSING < LIMITED
    for (state, _), row in TRANSITIONS.items():
        if state in LIMITED:  # the timer that was started runs until the end
            assert row.next in LIMITED | {ConnectionState.ENDED}


def test_late_events_are_allowed_after_a_state_change() -> None:
    """An event that arrives after another one has changed the state is not a bug."""
    known = TRANSITIONS.keys() | IGNORED
    for (before, first), row in TRANSITIONS.items():
        for late in {*LifecycleEvent} - OF_ONE_STATE - {first}:
            assert (before, late) not in known or (row.next, late) in known
