"""Monitoring of this process: `snapshot`, and hooks for connections.

For example, print a snapshot::

    print(json.dumps(aiordma.snapshot(), indent=2))

`aiordma.prometheus` and `aiordma.opentelemetry` export snapshots as metrics. `aiordma top` shows
the snapshots of other processes. See docs/monitoring.md for details.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from asyncio import _get_running_loop
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import cast

from . import verbs
from ._core.snapshot_types import (
    CompletionQueueState,
    ConnectionEvents,
    ConnectionState,
    DeviceState,
    Latencies,
    ListenerState,
    PoolState,
    RailState,
    RegistrationCacheState,
    Snapshot,
    Traffic,
    WaitState,
    traffic,
)
from ._datapath.work_queue import latencies, waits_so_far
from ._event_loop import shutdown
from ._event_loop.driver import Driver
from ._transport import observation
from ._transport.observation import ConnectionChange, add_connection_hook, remove_connection_hook
from .transport import Connection, Listener

__all__ = [
    "CompletionQueueState",
    "ConnectionChange",
    "ConnectionEvents",
    "ConnectionState",
    "DeviceState",
    "Latencies",
    "ListenerState",
    "PoolState",
    "RailState",
    "RegistrationCacheState",
    "Snapshot",
    "Traffic",
    "WaitState",
    "add_connection_hook",
    "remove_connection_hook",
    "snapshot",
]


def snapshot() -> Snapshot:
    """Return the state of this process as plain data that can be converted to JSON.

    Any thread can call this function, whether or not the thread runs an event loop. The function
    does not wait for event loops or access devices, so it works even if a loop is stuck. For a loop
    in another thread, the values may not all be from the same instant. A call takes about 10
    microseconds per open connection.

    A connection's wire can be queried only in the thread of the connection's event loop. If a
    connection belongs to another loop, the snapshot contains the result of that loop's last query.
    If the wire has not been queried yet, the snapshot contains None, and the loop is asked to query
    the wire.
    """
    connections = open_connections()
    refresh_wires(connections)
    # Collect these figures before calling `waits_so_far`, because the methods that return them add
    # the waits still in progress to the totals.
    devices = [driver.figures() for driver in Driver.all()]
    states = [connection._figures() for connection in connections]
    counts = observation.counts()
    return {
        "version": _version(),
        "pid": os.getpid(),
        "time": time.time(),
        "traffic": traffic(counts.traffic.__getitem__),
        "waits": {
            name: {"count": count, "seconds": waited}
            for name, (count, waited) in waits_so_far().items()
        },
        "latencies": {
            name: {"seconds": sum_of_all, "up_to": up_to}
            for name, (sum_of_all, up_to) in latencies().items()
        },
        "connection_events": cast(
            "ConnectionEvents",
            {name: counts.events[name] for name in ConnectionEvents.__annotations__},
        ),
        "errors": dict(sorted(counts.errors.items())),
        "rail_failures": dict(sorted(counts.rail_failures.items())),
        "leads_moved": dict(sorted(counts.leads_moved.items())),
        "objects": verbs.live(),
        "devices": devices,
        "listeners": [
            thing._figures() for thing in shutdown.all_open() if isinstance(thing, Listener)
        ],
        "connections": states,
    }


def open_connections() -> list[Connection]:
    """Return the established connections in all event loops. Internal to the library."""
    things = shutdown.all_open()
    return [thing for thing in things if isinstance(thing, Connection) and thing._start_info]


def refresh_wires(connections: list[Connection], seconds: float = 0.0) -> None:
    """Ask each event loop to look up its connections' wires, skipping wires already known.

    Wait up to `seconds` for all loops to finish. Internal to the library.
    """
    pending: dict[asyncio.AbstractEventLoop, list[Connection]] = {}
    for connection in connections:
        if (loop := connection._request_wire()) is not None:
            pending.setdefault(loop, []).append(connection)
    running = _get_running_loop()
    events = []
    for loop, loop_connections in pending.items():
        if loop is running:
            read_wires(loop_connections)
        elif not loop.is_closed():
            events.append(event := threading.Event())
            with suppress(RuntimeError):  # the loop has just been closed
                loop.call_soon_threadsafe(read_wires, loop_connections, event)
    deadline = time.monotonic() + seconds
    for event in events:
        event.wait(max(0.0, deadline - time.monotonic()))


def read_wires(connections: list[Connection], done: threading.Event | None = None) -> None:
    """Look up the wires of the current event loop's connections, and then set `done`.

    Internal to the library.
    """
    for connection in connections:
        connection._read_wire()
    if done is not None:
        done.set()


@cache
def _version() -> str:
    try:
        return version("aiordma")
    except PackageNotFoundError:  # used from a checkout, without being installed
        return "unknown"
