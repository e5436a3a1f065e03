"""The state of this process for operations: `snapshot`, and hooks for connections::

    print(json.dumps(aiordma.snapshot(), indent=2))

`aiordma.prometheus` and `aiordma.opentelemetry` make metrics of it, and `aiordma top` shows that of
another process. docs/monitoring.md describes all of them.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from asyncio import _get_running_loop
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import TypedDict, cast

from . import verbs
from ._loop import shutdown
from ._loop.driver import Driver
from ._transport import observation
from ._transport.observation import (
    ConnectionChange,
    add_connection_hook,
    remove_connection_hook,
)
from .errors import RDMAError, host_port
from .transport import Connection, Listener

__all__ = [
    "CompletionQueueState",
    "ConnectionChange",
    "ConnectionEvents",
    "ConnectionState",
    "DeviceState",
    "ListenerState",
    "PoolState",
    "RegistrationCacheState",
    "Snapshot",
    "Traffic",
    "add_connection_hook",
    "remove_connection_hook",
    "snapshot",
]


class Traffic(TypedDict):
    """Counts of messages, bytes of messages, and operations on the peer's memory."""

    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    reads: int
    writes: int
    atomics: int


class ConnectionEvents(TypedDict):
    """Counts of connections."""

    begun: int
    """Connections that `connect` or `accept` returned."""
    ended: int
    """Of these, those that were closed in order, by either side."""
    broken: int
    """Of these, those that ended with an error."""
    failed: int
    """Attempts to connect, and handshakes of peers, that failed."""


class PoolState(TypedDict):
    """The memory pool of an event loop and device; see `Connection.pool_statistics`."""

    registered_bytes: int
    leased_bytes: int
    leases: int
    regions: int
    limit: int
    waiting: int
    huge_page_bytes: int


class RegistrationCacheState(TypedDict):
    """Kept registrations of the program's memory; see `Connection.registration_statistics`."""

    registrations: int
    bytes: int
    found: int
    made: int


class CompletionQueueState(TypedDict):
    """A completion queue that connections share."""

    entries: int
    """Completions that it can hold."""
    reserved: int
    """Entries that queue pairs have set aside."""


class DeviceState(TypedDict):
    """A device that connections of one event loop use."""

    name: str
    loop: int
    """Tells the event loops of the process apart."""
    connections: int
    """Queue pairs of connections, those of handshakes included."""
    work_requests: int
    """Slots of work under way: posted receives, sends and operations on memory."""
    completions: int
    """Completions since the device was opened."""
    pool: PoolState
    registration_cache: RegistrationCacheState
    completion_queues: list[CompletionQueueState]
    open: dict[str, int]
    """Objects that are open on the device, by class."""
    failures: dict[str, int]
    """Failed completions since the device was opened, by status."""
    events: dict[str, int]
    """Asynchronous events since the device was opened, by type."""


class ListenerState(TypedDict):
    """A listener, also that of a server."""

    device: str
    loop: int
    addresses: list[str]
    """Each as "host:port"."""
    handshakes: int
    """Handshakes that are under way."""
    waiting: int
    """Connections that wait for `accept`."""


class ConnectionState(TypedDict):
    """An open connection, or one that is being closed."""

    device: str
    loop: int
    wire: str | None
    """As `Connection.wire`; None also until the event loop has read it: see `snapshot`."""
    state: str
    """A state of docs/connections.md."""
    accepted: bool
    """Whether this is the side of the listener."""
    local: str | None
    """This side, as "host:port"."""
    peer: str | None
    """The peer, as "host:port"."""
    qp_num: int
    age: float
    """Seconds since `connect` or `accept` could return it."""
    traffic: Traffic
    send_queue: int
    """Entries of the send queue."""
    outstanding: int
    """Work requests that are posted or wait for entries."""
    messages_waiting: int
    """Messages that wait for credits or memory."""
    messages_unread: int
    """Messages that have arrived and were not received yet."""
    shared_regions: int
    """Regions of this side that the peer may use."""
    lent_bytes: int
    """Bytes of this side that the peer has borrowed."""
    remote_regions: int
    """Regions of the peer that this side holds."""


class Snapshot(TypedDict):
    """The state of a process."""

    version: str
    """Of aiordma: another one may have other fields."""
    pid: int
    time: float
    """Seconds since the epoch."""
    traffic: Traffic
    """Of all connections since the process began, those that have ended included."""
    connection_events: ConnectionEvents
    """Since the process began."""
    errors: dict[str, int]
    """Connections that broke and attempts that failed since the process began, by the class of the
    error."""
    objects: dict[str, int]
    """Open objects of the verbs by class, on any device, also those that were dropped unclosed."""
    devices: list[DeviceState]
    listeners: list[ListenerState]
    connections: list[ConnectionState]


def snapshot() -> Snapshot:
    """The state of this process as plain data: numbers, texts, lists and dictionaries, for JSON.

    Any thread may call it, with or without an event loop. It waits for no event loop and calls no
    device, so it also works when a loop is stuck; numbers of another thread's loop may be from
    slightly different moments. Its cost grows with the number of open connections, about 10
    microseconds for each. Only the thread of a connection's loop can ask for its wire: of another
    loop it is the one that was seen last, and None the first time, when that loop is asked to
    read it.
    """
    connections = open_connections()
    refresh_wires(connections)
    counts = observation.counts()
    return {
        "version": _version(),
        "pid": os.getpid(),
        "time": time.time(),
        "traffic": _traffic(counts.traffic.__getitem__),
        "connection_events": {
            "begun": counts.events["begun"],
            "ended": counts.events["ended"],
            "broken": counts.events["broken"],
            "failed": counts.events["failed"],
        },
        "errors": dict(sorted(counts.errors.items())),
        "objects": verbs.live(),
        "devices": [_device(driver) for driver in Driver.all()],
        "listeners": [
            _listener(thing) for thing in shutdown.all_open() if isinstance(thing, Listener)
        ],
        "connections": [_connection(connection) for connection in connections],
    }


def open_connections() -> list[Connection]:
    """Those that have begun, of every loop. Internal to the library."""
    things = shutdown.all_open()
    return [thing for thing in things if isinstance(thing, Connection) and thing._begun]


def refresh_wires(connections: list[Connection], seconds: float = 0.0) -> None:
    """Have each loop read the wires that were not seen yet, and wait so long for the answers.

    Internal to the library.
    """
    unseen: dict[asyncio.AbstractEventLoop, list[Connection]] = {}
    for connection in connections:
        if connection._wire_seen is None and not connection._wire_requested:
            unseen.setdefault(connection._loop, []).append(connection)
    running = _get_running_loop()
    events = []
    for loop, of_loop in unseen.items():
        if loop is running:
            read_wires(of_loop)
        elif not loop.is_closed():
            for connection in of_loop:
                connection._wire_requested = True  # a loop that is stuck is asked once
            events.append(event := threading.Event())
            with suppress(RuntimeError):  # it has just been closed
                loop.call_soon_threadsafe(read_wires, of_loop, event)
    deadline = time.monotonic() + seconds
    for event in events:
        event.wait(max(0.0, deadline - time.monotonic()))


def read_wires(connections: list[Connection], done: threading.Event | None = None) -> None:
    """In the loop of these connections. Internal to the library."""
    for connection in connections:
        connection._wire_requested = False
        with suppress(RDMAError, OSError):  # its device has failed
            connection._wire_seen = connection.wire
    if done is not None:
        done.set()


@cache
def _version() -> str:
    try:
        return version("aiordma")
    except PackageNotFoundError:  # it is used from its folder, without an installation
        return "unknown"


def _traffic(counts: Callable[[str], int]) -> Traffic:
    return cast("Traffic", {name: counts(name) for name in Traffic.__annotations__})


def _device(driver: Driver) -> DeviceState:
    statistics = driver.context.statistics()
    return {
        "name": driver.context.name,
        "loop": id(driver.loop),
        "connections": len(driver._sinks),
        "work_requests": len(driver.operations),
        "completions": driver.channel.statistics().completions,
        "pool": cast("PoolState", driver.pool.statistics()._asdict()),
        "registration_cache": cast(
            "RegistrationCacheState", driver.registrations.counts()._asdict()
        ),
        "completion_queues": [
            {"entries": cq.cqe, "reserved": cq.reserved} for cq in list(driver._cqs)
        ],
        "open": dict(statistics.open),
        "failures": dict(statistics.failures),
        "events": dict(statistics.events),
    }


def _listener(listener: Listener) -> ListenerState:
    acceptor = listener._acceptor
    return {
        "device": listener.device,
        "loop": id(listener._affinity.loop),
        "addresses": [host_port(address) for address in listener.addresses],
        "handshakes": len(acceptor._handshakes) if acceptor is not None else 0,
        "waiting": len(listener._ready),
    }


def _connection(connection: Connection) -> ConnectionState:
    assert connection._begun is not None
    queue, sharing = connection._queue, connection._sharing
    figures = connection._messages.figures()
    local = connection.local_address
    return {
        "device": connection.device,
        "loop": id(connection._loop),
        "wire": connection._wire_seen,
        "state": connection._state.name,
        "accepted": connection._begun.accepted,
        "local": host_port(local) if local is not None else None,
        "peer": queue.peer or None,
        "qp_num": queue.qp.qp_num,
        "age": time.monotonic() - connection._begun.since,
        "traffic": _traffic(partial(getattr, connection._statistics)),
        "send_queue": queue.capacity,
        "outstanding": queue.outstanding,
        "messages_waiting": figures["messages_waiting"],
        "messages_unread": figures.get("arrived", 0),
        "shared_regions": len(sharing._shares),
        "lent_bytes": sharing._lent_bytes,
        "remote_regions": len(sharing._used),
    }
