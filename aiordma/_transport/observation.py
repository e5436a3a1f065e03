"""What the process remembers of its connections: counts, errors by kind, and the user's hooks.

Nothing here runs for a message: a connection is registered when it is made, counted when it begins
and when it ends, and its counts are added to those of the process when it is finalized.

The lock is reentrant, because a garbage collection inside it may finalize a connection.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from .._native import fork
from ..errors import ConnectionClosedError, RDMAError

if TYPE_CHECKING:
    from .connection import Connection, Statistics

logger = logging.getLogger("aiordma.connection")


@dataclass(frozen=True, slots=True)
class ConnectionChange:
    """What a hook is called with: a connection has begun or ended, or could not be made."""

    kind: Literal["begin", "end", "failure"]
    """"begin": it is open, and `connect` or `accept` is about to return it. "end": it was closed
    in order, by either side. "failure": it broke, or, without `connection`, an attempt to make it
    failed. A connection that has begun has exactly one "end" or "failure"."""
    accepted: bool
    """Whether this is the side of the listener."""
    peer: str | None
    """The peer as "host:port", as far as it is known."""
    connection: Connection | None
    """The connection; None for an attempt. After its end its `statistics` can still be read."""
    error: BaseException | None
    """Why it ended or failed; None for "begin"."""


ConnectionHook = Callable[[ConnectionChange], object]

_lock = threading.RLock()
_hooks: tuple[ConnectionHook, ...] = ()
# The counts of each connection, by the address of the object, until the connection is finalized:
# messages can still be received after its end.
_counted: dict[int, Statistics] = {}
_finalized: deque[int] = deque()
_past: Counter[str] = Counter()  # of connections that were finalized
_events: Counter[str] = Counter()
_errors: Counter[str] = Counter()


def add_connection_hook(hook: ConnectionHook) -> None:
    """Call `hook` with a `ConnectionChange` whenever a connection begins, ends or fails.

    It is called in the thread of the connection's event loop, for connections of every loop of the
    process, and must not block. Connections of a loop that was closed without its
    `shutdown_asyncgens` (asyncio.run calls it) end later, in any thread. What it raises is logged
    by "aiordma.connection", and changes nothing for the connection or other hooks. It stays until
    `remove_connection_hook`, and in the child of a fork. Any thread may add one.
    """
    global _hooks  # noqa: PLW0603 - replaced as a whole, so that a call under way has its own
    with _lock:
        _hooks = (*_hooks, hook)


def remove_connection_hook(hook: ConnectionHook) -> None:
    """Call it no more. ValueError for a hook that was not added."""
    global _hooks  # noqa: PLW0603 - as above
    with _lock:
        left = list(_hooks)
        try:
            left.remove(hook)
        except ValueError:
            raise ValueError(f"{hook!r} is not a connection hook") from None
        _hooks = tuple(left)


def _count(event: str, error: BaseException | None = None) -> None:
    with _lock:
        _events[event] += 1
        if error is not None:
            _errors[type(error).__name__] += 1


def _call_hooks(change: ConnectionChange) -> None:
    for hook in _hooks:
        try:
            hook(change)
        except Exception:
            logger.exception("the connection hook %r failed on %r", hook, change)


def begun(connection: Connection, peer: str, *, accepted: bool) -> None:
    """The connection is about to be given to the user."""
    _count("begun")
    if _hooks:
        _call_hooks(ConnectionChange("begin", accepted, peer or None, connection, None))


def ended(connection: Connection, peer: str, error: BaseException, *, accepted: bool) -> None:
    """The resources of a connection that had begun have been given back."""
    in_order = isinstance(error, ConnectionClosedError)
    _count("ended" if in_order else "broken", None if in_order else error)
    if _hooks:
        kind: Literal["end", "failure"] = "end" if in_order else "failure"
        _call_hooks(ConnectionChange(kind, accepted, peer or None, connection, error))


def failed(peer: str | None, error: BaseException, *, accepted: bool) -> None:
    """An attempt to connect, or the handshake of a peer, has failed.

    Cancellations and mistakes in arguments are no failures.
    """
    if isinstance(error, RDMAError | OSError):
        _count("failed", error)
        if _hooks:
            _call_hooks(ConnectionChange("failure", accepted, peer, None, error))


def register(statistics: Statistics) -> None:
    """The counts of a new connection belong to those of the process."""
    with _lock:
        _counted[id(statistics)] = statistics
        _add_finalized()


def finalized(statistics: Statistics) -> None:
    """Its connection counts no more. In any thread, at any time."""
    _finalized.append(id(statistics))


def _add_finalized() -> None:
    while _finalized:
        statistics = _counted.pop(_finalized.popleft(), None)
        if statistics is not None:
            _add(_past, statistics)


def _add(sums: Counter[str], statistics: Statistics) -> None:
    for field in fields(statistics):
        sums[field.name] += getattr(statistics, field.name)


@dataclass(frozen=True)
class ProcessCounts:
    """Counts since the process began, of open connections and of those that have ended."""

    traffic: Counter[str]
    """By the names of `Statistics`."""
    events: Counter[str]
    """Connections "begun", "ended" and "broken"; attempts that "failed"."""
    errors: Counter[str]
    """Failures by the class of the error."""


def counts() -> ProcessCounts:
    """A copy. Any thread may ask."""
    with _lock:
        _add_finalized()
        sums = _past.copy()
        for statistics in list(_counted.values()):
            _add(sums, statistics)
        return ProcessCounts(sums, _events.copy(), _errors.copy())


def _reset_after_fork() -> None:
    """The child counts its own connections."""
    global _lock  # noqa: PLW0603 - another thread may have held it while this one forked
    _lock = threading.RLock()
    for kept in (_counted, _finalized, _past, _events, _errors):
        kept.clear()


fork.reset_in_child(_reset_after_fork)
