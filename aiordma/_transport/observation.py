"""Process-wide counts of connections, errors by class, and user hooks.

This code never runs per message. A connection is registered when it is created and counted when it
begins and ends. Its counts are added to the process counts when it is finalized.

This code never waits for another thread, because the garbage collector can run a finalizer at any
point, even while another thread is counting. Shared data is therefore changed only by atomic
operations of the interpreter.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Literal

from .. import _transport
from .._core.arguments import callback
from .._datapath.message import Counts
from .._event_loop.shutdown import EXITS
from .._native import fork
from ..errors import ConnectionClosedError, RDMAError

logger = logging.getLogger("aiordma.connection")


@dataclass
class Statistics(Counts):
    """The counts of a connection since it was created."""

    # `Counts` implements these attributes. Plain default values would become class attributes that
    # hide the implementation, so use factories.
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
    """The argument of a connection hook: a connection began, ended or failed."""

    kind: Literal["begin", "end", "failure"]
    """The kind of change.

    - "begin": The connection is open, and `connect` or `accept` is about to return it.
    - "end": It was closed in order, by either side.
    - "failure": It broke. If `connection` is None, an attempt to create it failed.

    A connection that has begun gets exactly one "end" or "failure".
    """
    accepted: bool
    """Whether this is the listener's side."""
    peer: str | None
    """The peer as "host:port", if it is known."""
    connection: _transport.Connection | None
    """The connection, or None for an attempt. After its end, `statistics` can still be read."""
    error: BaseException | None
    """The reason why it ended or failed; None for "begin"."""


ConnectionHook = Callable[[ConnectionChange], object]

_hooks: list[ConnectionHook] = []


@dataclass(frozen=True)
class _Event:
    """An event to count. `names` maps each counter in ProcessCounts to the key to increment."""

    names: dict[str, str]


@dataclass(frozen=True)
class _FinalizedSums:
    """The sums of all finalized counts.

    Each update creates a new object, so that `counts` can detect a concurrent update.
    """

    counts: ProcessCounts
    included: dict[int, Statistics | _Event]
    """The counts that are included in the sums but still in `_counted`."""


# Events and connection counts that are not in the sums yet, keyed by `id`. Connections stay here
# until they are finalized, because messages can still be received after a connection has ended.
_counted: dict[int, Statistics | _Event] = {}
_finalized: deque[int] = deque()
_adding = threading.Lock()  # only acquired without blocking
MAX_FINALIZED = 64


def add_connection_hook(hook: ConnectionHook) -> None:
    """Call `hook` whenever a connection begins, ends or fails.

    The hook is called in the thread of the connection's event loop, for the connections of all
    loops of the process. It must not block. If it raises, the exception is logged by
    "aiordma.connection", and the connection and other hooks are not affected.

    If a loop was closed without its `shutdown_asyncgens` (`asyncio.run` calls it), its connections
    end later, and the hook may be called in any thread.

    A hook stays until `remove_connection_hook`, and is inherited by the child of a fork. This
    function is thread-safe.

    Args:
        hook: The function to call with a `ConnectionChange`.
    """
    callback("hook", hook, "a ConnectionChange")
    _hooks.append(hook)


def remove_connection_hook(hook: ConnectionHook) -> None:
    """Stop calling `hook`.

    Args:
        hook: A hook that was passed to `add_connection_hook`.

    Raises:
        ValueError: If the hook was not added.
    """
    try:
        _hooks.remove(hook)
    except ValueError:
        raise ValueError(f"{hook!r} is not a connection hook") from None


def _count_end(event: str, error: BaseException | None) -> None:
    errors = {} if error is None else {"errors": type(error).__name__}
    _count(events=event, **errors)


def _count(**names: str) -> None:
    event = _Event(names)
    register(event)
    connection_finalized(event)


def _call_hooks(change: ConnectionChange) -> None:
    for hook in tuple(_hooks):
        try:
            hook(change)
        except EXITS:
            raise
        except BaseException:
            logger.exception("the connection hook %r failed on %r", hook, change)


def connection_began(connection: _transport.Connection, peer: str, *, accepted: bool) -> None:
    """Report a new connection just before the user gets it."""
    _count(events="begun")
    if _hooks:
        _call_hooks(ConnectionChange("begin", accepted, peer or None, connection, None))


def connection_ended(
    connection: _transport.Connection, peer: str, error: BaseException, *, accepted: bool
) -> None:
    """Report the end of a connection that has begun. Its resources must have been released."""
    in_order = isinstance(error, ConnectionClosedError)
    _count_end("ended" if in_order else "broken", None if in_order else error)
    if _hooks:
        kind: Literal["end", "failure"] = "end" if in_order else "failure"
        _call_hooks(ConnectionChange(kind, accepted, peer or None, connection, error))


def connection_failed(peer: str | None, error: BaseException, *, accepted: bool) -> None:
    """Report a failed attempt to connect or a failed handshake with a peer.

    Cancellations and invalid arguments do not count as failures.
    """
    if isinstance(error, RDMAError | OSError):
        _count_end("failed", error)
        if _hooks:
            _call_hooks(ConnectionChange("failure", accepted, peer, None, error))


def rail_broke(device: str) -> None:
    """Count a broken rail, which this side detected or the peer reported."""
    _count(rail_failures=device)


def lead_moved(device: str) -> None:
    """Count a failover from `device` to another device."""
    _count(leads_moved=device)


def register(counted: Statistics | _Event) -> None:
    """Include an event or the counts of a new connection in the process counts."""
    _counted[id(counted)] = counted
    if len(_finalized) >= MAX_FINALIZED:
        _add_finalized()


def connection_finalized(counted: Statistics | _Event) -> None:
    """Mark counts as final. May be called in any thread, at any time."""
    _finalized.append(id(counted))


def _add_finalized() -> None:
    """Add finalized counts to the sums, unless another thread is already doing so."""
    global _finalized_sums  # noqa: PLW0603 - replaced as a whole
    if not _adding.acquire(blocking=False):
        return
    try:
        ids = [_finalized.popleft() for _ in range(len(_finalized))]
        included = {key: _counted[key] for key in ids if key in _counted}
        # While the counts are in both places, `included` keeps `counts` from adding them twice.
        _finalized_sums = _FinalizedSums(_finalized_sums.counts.plus(included.values()), included)
        for key in included:
            del _counted[key]
        _finalized_sums = _FinalizedSums(_finalized_sums.counts, {})
    finally:
        _adding.release()


@dataclass(frozen=True)
class ProcessCounts:
    """Counts of open and ended connections since the process started."""

    traffic: Counter[str] = field(default_factory=Counter)
    """Traffic counts by `Statistics` field name."""
    events: Counter[str] = field(default_factory=Counter)
    """Connections that have "begun", "ended" or "broken", and attempts that "failed"."""
    errors: Counter[str] = field(default_factory=Counter)
    """Failures by error class."""
    rail_failures: Counter[str] = field(default_factory=Counter)
    """Rails that broke, by device."""
    leads_moved: Counter[str] = field(default_factory=Counter)
    """Leads that moved, by the device that broke."""

    def plus(self, counted: Iterable[Statistics | _Event]) -> ProcessCounts:
        """Return these counts plus the given events and connection counts."""
        sums = ProcessCounts(*(getattr(self, counter.name).copy() for counter in fields(self)))
        for item in counted:
            if isinstance(item, _Event):
                for counter_name, key in item.names.items():
                    getattr(sums, counter_name)[key] += 1
            else:
                for count in fields(item):
                    sums.traffic[count.name] += getattr(item, count.name)
        return sums


_finalized_sums = _FinalizedSums(ProcessCounts(), {})


def counts() -> ProcessCounts:
    """Return a copy of the process counts. Thread-safe."""
    _add_finalized()
    while True:
        sums = _finalized_sums
        counted = list(_counted.items())
        if sums is _finalized_sums:  # otherwise, another thread has added counts in the meantime
            break
    return sums.counts.plus(item for key, item in counted if key not in sums.included)


def _reset_after_fork() -> None:
    """Reset all counts in the child process."""
    global _adding, _finalized_sums  # noqa: PLW0603 - the parent's threads may have used them
    _adding = threading.Lock()
    _finalized_sums = _FinalizedSums(ProcessCounts(), {})
    _counted.clear()
    _finalized.clear()


fork.reset_in_child(_reset_after_fork)
