"""The memory that the process has of its connections: counts, errors by kind, and the user's hooks.

Nothing here runs for a message: a connection is registered when it is made, counted when it begins
and when it ends, and its counts are added to those of the process when it is finalized.

No thread waits for another one here: the collector can run a destructor at any step, and that may
wait for a thread that counts.  What threads share is changed by single steps of the interpreter.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Literal

from .. import _transport
from .._core.arguments import refusal
from .._datapath.message import Counts
from .._loop.shutdown import EXITS
from .._native import fork
from ..errors import ConnectionClosedError, RDMAError

logger = logging.getLogger("aiordma.connection")


@dataclass
class Statistics(Counts):
    """Counts since the connection was made."""

    # Each is a member of Counts: a plain default here would stand before it.
    messages_sent: int = field(default_factory=int)
    messages_received: int = field(default_factory=int)
    bytes_sent: int = field(default_factory=int)
    bytes_received: int = field(default_factory=int)
    reads: int = field(default_factory=int)
    writes: int = field(default_factory=int)
    atomics: int = field(default_factory=int)
    bytes_read: int = field(default_factory=int)
    bytes_written: int = field(default_factory=int)
    peer_bytes_read: int = field(init=False)
    peer_bytes_written: int = field(init=False)


@dataclass(frozen=True, slots=True)
class ConnectionChange:
    """The argument of a hook: a connection has begun or ended, or could not be made."""

    kind: Literal["begin", "end", "failure"]
    """"begin": it is open, and `connect` or `accept` is about to return it. "end": it was closed
    in order, by either side. "failure": it broke, or, without `connection`, an attempt to make it
    failed. A connection that has begun has exactly one "end" or "failure"."""
    accepted: bool
    """Whether this is the side of the listener."""
    peer: str | None
    """The peer as "host:port", as far as it is known."""
    connection: _transport.Connection | None
    """The connection; None for an attempt. After its end its `statistics` can still be read."""
    error: BaseException | None
    """Why it ended or failed; None for "begin"."""


ConnectionHook = Callable[[ConnectionChange], object]

_hooks: list[ConnectionHook] = []


@dataclass(frozen=True)
class _Event:
    """Something that is counted once: in which parts of ProcessCounts, and by which name."""

    names: dict[str, str]


@dataclass(frozen=True)
class _Past:
    """The sums of what was finalized. Replaced as a whole."""

    counts: ProcessCounts
    included: dict[int, Statistics | _Event]
    """The counts in the sums that are still in `_counted`."""


# The counts of each connection, by the address of the object, until the connection is finalized:
# messages can still be received after its end.
_counted: dict[int, Statistics | _Event] = {}
_finalized: deque[int] = deque()
_adding = threading.Lock()  # no thread waits for it
MOST_FINALIZED = 64


def add_connection_hook(hook: ConnectionHook) -> None:
    """Call `hook` with a `ConnectionChange` whenever a connection begins, ends or fails.

    It is called in the thread of the connection's event loop, for connections of every loop of the
    process, and must not block. Connections of a loop that was closed without its
    `shutdown_asyncgens` (asyncio.run calls it) end later, in any thread. What it raises is logged
    by "aiordma.connection", and changes nothing for the connection or other hooks. It stays until
    `remove_connection_hook`, and in the child of a fork. Any thread may add one. TypeError for a
    hook that cannot be called.
    """
    if not callable(hook):
        raise TypeError(refusal("hook", "a function of a ConnectionChange", hook))
    _hooks.append(hook)


def remove_connection_hook(hook: ConnectionHook) -> None:
    """Call it no more. ValueError for a hook that was not added."""
    try:
        _hooks.remove(hook)
    except ValueError:
        raise ValueError(f"{hook!r} is not a connection hook") from None


def _count_end(event: str, error: BaseException | None) -> None:
    errors = {} if error is None else {"errors": type(error).__name__}
    _count(events=event, **errors)


def _count(**names: str) -> None:
    it = _Event(names)
    register(it)
    finalized(it)


def _call_hooks(change: ConnectionChange) -> None:
    for hook in tuple(_hooks):
        try:
            hook(change)
        except EXITS:
            raise
        except BaseException:
            logger.exception("the connection hook %r failed on %r", hook, change)


def begun(connection: _transport.Connection, peer: str, *, accepted: bool) -> None:
    """The connection is about to be given to the user."""
    _count(events="begun")
    if _hooks:
        _call_hooks(ConnectionChange("begin", accepted, peer or None, connection, None))


def ended(
    connection: _transport.Connection, peer: str, error: BaseException, *, accepted: bool
) -> None:
    """The resources of a connection that had begun have been given back."""
    in_order = isinstance(error, ConnectionClosedError)
    _count_end("ended" if in_order else "broken", None if in_order else error)
    if _hooks:
        kind: Literal["end", "failure"] = "end" if in_order else "failure"
        _call_hooks(ConnectionChange(kind, accepted, peer or None, connection, error))


def failed(peer: str | None, error: BaseException, *, accepted: bool) -> None:
    """An attempt to connect, or the handshake of a peer, has failed.

    Cancellations and mistakes in arguments are no failures.
    """
    if isinstance(error, RDMAError | OSError):
        _count_end("failed", error)
        if _hooks:
            _call_hooks(ConnectionChange("failure", accepted, peer, None, error))


def rail_broke(device: str) -> None:
    """Here, or as the peer has said."""
    _count(rail_failures=device)


def lead_moved(device: str) -> None:
    """From there to another device."""
    _count(leads_moved=device)


def register(counted: Statistics | _Event) -> None:
    """What a new connection counts, or an event, belongs to the counts of the process."""
    _counted[id(counted)] = counted
    if len(_finalized) >= MOST_FINALIZED:
        _add_finalized()


def finalized(counted: Statistics | _Event) -> None:
    """It counts no more. In any thread, at any time."""
    _finalized.append(id(counted))


def _add_finalized() -> None:
    """Adds to the sums what counts no more, in one thread at a time: another one leaves it."""
    global _past  # noqa: PLW0603 - replaced as a whole
    if not _adding.acquire(blocking=False):
        return
    try:
        ids = [_finalized.popleft() for _ in range(len(_finalized))]
        included = {key: _counted[key] for key in ids if key in _counted}
        _past = _Past(_past.counts.plus(included.values()), included)
        for key in included:
            del _counted[key]
        _past = _Past(_past.counts, {})
    finally:
        _adding.release()


@dataclass(frozen=True)
class ProcessCounts:
    """Counts since the process began, of open connections and of those that have ended."""

    traffic: Counter[str] = field(default_factory=Counter)
    """By the names of `Statistics`."""
    events: Counter[str] = field(default_factory=Counter)
    """Connections "begun", "ended" and "broken"; attempts that "failed"."""
    errors: Counter[str] = field(default_factory=Counter)
    """Failures by the class of the error."""
    rail_failures: Counter[str] = field(default_factory=Counter)
    """By the device."""
    leads_moved: Counter[str] = field(default_factory=Counter)
    """By the device that broke."""

    def plus(self, counted: Iterable[Statistics | _Event]) -> ProcessCounts:
        sums = ProcessCounts(*(getattr(self, part.name).copy() for part in fields(self)))
        for one in counted:
            if isinstance(one, _Event):
                for part, name in one.names.items():
                    getattr(sums, part)[name] += 1
            else:
                for each in fields(one):
                    sums.traffic[each.name] += getattr(one, each.name)
        return sums


_past = _Past(ProcessCounts(), {})


def counts() -> ProcessCounts:
    """A copy. Any thread may ask."""
    _add_finalized()
    while True:
        past = _past
        counted = list(_counted.items())
        if past is _past:  # else another thread has added something between the two
            break
    return past.counts.plus(one for key, one in counted if key not in past.included)


def _reset_after_fork() -> None:
    """The child counts its own connections."""
    global _adding, _past  # noqa: PLW0603 - another thread may have been at it in the parent
    _adding = threading.Lock()
    _past = _Past(ProcessCounts(), {})
    _counted.clear()
    _finalized.clear()


fork.reset_in_child(_reset_after_fork)
