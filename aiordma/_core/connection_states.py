"""The state machine of a connection.

It drives :mod:`aiordma._transport.lifecycle`, and the diagram and the states in ``docs/design.md``
are generated from it. A connection ends once: the first event that leads to ENDED determines the
error that all waiters get, and later events are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from aiordma.errors import InternalError


class ConnectionState(Enum):
    """The state of a connection. The values are descriptions."""

    CONNECTING = "the queue pair exists, and the handshake is in progress"
    AUTHENTICATING = (
        "the handshake has reached START, and both sides are proving that they have the key; "
        "skipped after a TCP bootstrap, which contains the proof"
    )
    OPEN = "messages and operations on memory are possible"
    DRAINING = "`close` was called; work in progress continues, but new work is refused"
    GOODBYE_SENT = "all work is done; the goodbye was sent but not acknowledged yet"
    PEER_CLOSED = "the peer's goodbye has arrived; some earlier work has not completed yet"
    BOTH_CLOSING = "`close` was called and the peer's goodbye has arrived"
    ENDED = "all waiters have the error; the loop's next iteration releases the resources"
    CLOSED = "the resources have been released"


class LifecycleEvent(Enum):
    """An event that may change the state of a connection. The values are descriptions."""

    ESTABLISHED = "the handshake has reached START, and no proof of a key has to follow"
    KEY_REQUIRED = "the handshake has reached START, and the proof of the key has to follow"
    PROVED = "the peer has proved that it has the key"
    CLOSE = "the user calls `close`"
    DRAINED = "all work that was started before `close` is done"
    PEER_GOODBYE = "the peer's goodbye arrives"
    FINISHED = "the last completion has arrived, or `close_timeout` has passed"
    BROKEN = "a disconnect, a silent peer or a failed work request"
    ABORTED = (
        "`abort`, a dropped connection, a failed handshake, a protocol error, a device event, "
        "the loop's end"
    )
    RELEASED = "the resources have been released"


class Cause(Enum):
    """The error that waiters get when the connection ends."""

    GIVEN = "the error of the event"
    CLOSED = "ConnectionClosedError, because the break is the peer's response to the goodbye"
    PEER = "the error of the peer's goodbye"


class Transition(NamedTuple):
    """The state that follows an event. ``cause`` is set only if the connection ends."""

    next: ConnectionState
    cause: Cause | None = None


_S, _E, _C = ConnectionState, LifecycleEvent, Cause


def _broken_or_aborted(broken: Cause, aborted: Cause) -> dict[LifecycleEvent, Transition]:
    return {_E.BROKEN: Transition(_S.ENDED, broken), _E.ABORTED: Transition(_S.ENDED, aborted)}


def _finished_broken_or_aborted(broken: Cause, other: Cause) -> dict[LifecycleEvent, Transition]:
    """Return the transitions for all ends. `other` is the cause for FINISHED and ABORTED."""
    return {_E.FINISHED: Transition(_S.ENDED, other), **_broken_or_aborted(broken, other)}


_ROWS: dict[ConnectionState, dict[LifecycleEvent, Transition]] = {
    _S.CONNECTING: {
        _E.ESTABLISHED: Transition(_S.OPEN),
        _E.KEY_REQUIRED: Transition(_S.AUTHENTICATING),
        **_broken_or_aborted(_C.GIVEN, _C.GIVEN),
    },
    _S.AUTHENTICATING: {
        _E.PROVED: Transition(_S.OPEN),
        _E.PEER_GOODBYE: Transition(_S.PEER_CLOSED),
        **_broken_or_aborted(_C.GIVEN, _C.GIVEN),
    },
    _S.OPEN: {
        _E.CLOSE: Transition(_S.DRAINING),
        _E.PEER_GOODBYE: Transition(_S.PEER_CLOSED),
        **_broken_or_aborted(_C.GIVEN, _C.GIVEN),
    },
    _S.DRAINING: {
        _E.DRAINED: Transition(_S.GOODBYE_SENT),
        _E.PEER_GOODBYE: Transition(_S.BOTH_CLOSING),
        **_finished_broken_or_aborted(_C.GIVEN, _C.GIVEN),
    },
    _S.GOODBYE_SENT: {
        _E.PEER_GOODBYE: Transition(_S.BOTH_CLOSING),
        **_finished_broken_or_aborted(_C.CLOSED, _C.GIVEN),
    },
    _S.PEER_CLOSED: {
        _E.CLOSE: Transition(_S.BOTH_CLOSING),
        **_finished_broken_or_aborted(_C.PEER, _C.PEER),
    },
    _S.BOTH_CLOSING: _finished_broken_or_aborted(_C.PEER, _C.PEER),
    _S.ENDED: {_E.RELEASED: Transition(_S.CLOSED)},
    _S.CLOSED: {},
}

TRANSITIONS: Mapping[tuple[ConnectionState, LifecycleEvent], Transition] = MappingProxyType(
    {(state, event): row for state, rows in _ROWS.items() for event, row in rows.items()}
)
"""The transition for each state and event.

A pair that is missing both here and in IGNORED indicates a bug in the library.
"""

_IGNORED_AFTER_END = (_E.CLOSE, _E.DRAINED, _E.PEER_GOODBYE, _E.FINISHED, _E.BROKEN, _E.ABORTED)

IGNORED: frozenset[tuple[ConnectionState, LifecycleEvent]] = frozenset(
    {
        *((state, _E.CLOSE) for state in (_S.DRAINING, _S.GOODBYE_SENT, _S.BOTH_CLOSING)),
        *((state, _E.PEER_GOODBYE) for state in (_S.PEER_CLOSED, _S.BOTH_CLOSING)),
        (_S.BOTH_CLOSING, _E.DRAINED),  # no goodbye is sent to a peer that has left
        *((state, event) for state in (_S.ENDED, _S.CLOSED) for event in _IGNORED_AFTER_END),
    }
)
"""Events that may occur in a state but have no effect there."""

CLOSING = frozenset({_S.DRAINING, _S.GOODBYE_SENT, _S.BOTH_CLOSING})
"""The states in which `close` has been called, so that new work is refused."""

LIMITED = CLOSING | {_S.PEER_CLOSED}
"""The states that together last for at most `Config.close_timeout` seconds."""


def transition(state: ConnectionState, event: LifecycleEvent) -> Transition | None:
    """Return the transition for an event, or None if the event is ignored.

    Raises:
        InternalError: If the event cannot occur in this state.
    """
    row = TRANSITIONS.get((state, event))
    if row is None and (state, event) not in IGNORED:
        raise InternalError(f"invalid event {event.name} in connection state {state.name}")
    return row
