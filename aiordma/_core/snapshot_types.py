"""The types of `aiordma.snapshot`, whose public names are in `aiordma.monitoring`.

Each object creates its own part of a snapshot in its method `figures`, which must provide the value
of every new field of its type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict, cast


class Traffic(TypedDict):
    """The counters of messages, bytes and operations on the peer's memory."""

    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    reads: int
    writes: int
    atomics: int
    bytes_read: int
    """The bytes that this side has read from the peer's memory, excluding messages."""
    bytes_written: int
    """The bytes that this side has written to the peer's memory."""
    peer_bytes_read: int
    """The bytes that the peer has read from this side's memory, excluding messages.

    It is 0 on devices that do not count them.
    """
    peer_bytes_written: int
    """The bytes that the peer has written to this side's memory.

    It is 0 on devices that do not count them.
    """


class ConnectionEvents(TypedDict):
    """Connection counters by outcome."""

    begun: int
    """The number of connections that `connect` or `accept` returned."""
    ended: int
    """The number of connections that either side closed normally."""
    broken: int
    """The number of connections that ended with an error."""
    failed: int
    """The number of failed connection attempts, including failed handshakes from peers."""


class PoolState(TypedDict):
    """The state of a memory pool. `Connection.pool_statistics` describes the fields."""

    registered_bytes: int
    leased_bytes: int
    leases: int
    regions: int
    limit: int
    waiting: int
    huge_page_bytes: int


class RegistrationCacheState(TypedDict):
    """The state of a registration cache. `Connection.registration_statistics` describes it."""

    registrations: int
    bytes: int
    found: int
    made: int


class CompletionQueueState(TypedDict):
    """A completion queue shared by connections."""

    entries: int
    """The capacity of the queue in completions."""
    reserved: int
    """The number of entries that queue pairs have reserved."""


class DeviceState(TypedDict):
    """A device used by the connections of one event loop."""

    name: str
    loop: int
    """A number that identifies the event loop within the process."""
    connections: int
    """The number of queue pairs of connections and of handshakes."""
    work_requests: int
    """The number of work requests in progress: posted receives, sends and memory operations."""
    completions: int
    """The number of completions since the device was opened."""
    pool: PoolState
    registration_cache: RegistrationCacheState
    completion_queues: list[CompletionQueueState]
    open: dict[str, int]
    """The number of objects open on the device, by class."""
    failures: dict[str, int]
    """The number of failed completions since the device was opened, by status."""
    events: dict[str, int]
    """The number of asynchronous events since the device was opened, by type."""


class ListenerState(TypedDict):
    """A listener, which may belong to a server."""

    device: str
    loop: int
    addresses: list[str]
    """The addresses, each as "host:port"."""
    handshakes: int
    """The number of handshakes in progress."""
    waiting: int
    """The number of connections that wait for `accept`."""


class RailState(TypedDict):
    """A rail of a connection, with the fields of `RailStatus` from `Connection.rails`."""

    device: str
    state: str
    age: float
    """The number of seconds since the rail entered this state."""
    error: str | None
    """The last error, with its date and time in UTC."""
    bytes_sent: int
    bytes_received: int
    bytes_read: int
    bytes_written: int
    peer_bytes_read: int | None
    peer_bytes_written: int | None


class ConnectionState(TypedDict):
    """A connection that is open or being closed."""

    device: str
    loop: int
    wire: str | None
    """The value of `Connection.wire`, or None until the event loop has read it (see `snapshot`)."""
    state: str
    """The state, as in docs/design.md."""
    accepted: bool
    """Whether this is the listener's side."""
    local: str | None
    """The local address, as "host:port"."""
    peer: str | None
    """The peer's address, as "host:port"."""
    qp_num: int
    age: float
    """The number of seconds since `connect` or `accept` could return it."""
    traffic: Traffic
    send_queue: int
    """The number of entries of the send queue."""
    outstanding: int
    """The number of work requests that are posted or wait for entries."""
    messages_waiting: int
    """The number of messages that wait for credits or memory."""
    waiting_for_credits: int
    """The number of messages that wait for credits, until the peer receives."""
    waiting_for_send_queue: int
    """The number of work requests that wait for entries of the send queue."""
    messages_unread: int
    """The number of messages that have arrived but have not been received by the program."""
    shared_regions: int
    """The number of regions of this side that the peer may use."""
    lent_bytes: int
    """The number of bytes that the peer has borrowed from this side."""
    remote_regions: int
    """The number of regions of the peer that this side holds."""
    rails: list[RailState]
    """The rails, beginning with the lead. `connect` with several devices creates several rails."""


class WaitState(TypedDict):
    """Statistics on how often and how long tasks waited for a resource."""

    count: int
    seconds: float
    """The total time. Concurrent waits within one connection or pool are counted once."""


class Latencies(TypedDict):
    """Times from posting a request to reading its completion. Every 17th request is measured."""

    seconds: float
    """The sum of the times."""
    up_to: dict[str, int]
    """The cumulative count for each upper bound in seconds. "+Inf" counts all requests."""


class Snapshot(TypedDict):
    """The state of a process."""

    version: str
    """The version of aiordma. Other versions may have other fields."""
    pid: int
    time: float
    """The time, in seconds since the epoch."""
    traffic: Traffic
    """The sums over all connections of the process, including those that have ended."""
    waits: dict[str, WaitState]
    """The waits since the process began, by resource.

    "credits" counts waits for a peer to receive, "send queue" counts waits for send queue entries,
    and "memory" counts waits for pool memory.
    """
    latencies: dict[str, Latencies]
    """The latencies by operation, since the process began.

    "send" is a frame with messages, or with the offer of a long message. A "batch" is measured as a
    whole. Failed operations are not counted.
    """
    connection_events: ConnectionEvents
    """The counts of connections since the process began."""
    errors: dict[str, int]
    """Broken connections and failed attempts since the process began, by error class."""
    rail_failures: dict[str, int]
    """Rails that broke since the process began, by the local device."""
    leads_moved: dict[str, int]
    """Failovers of a lead to another device since the process began, by the device that failed."""
    objects: dict[str, int]
    """Open verbs objects on all devices by class, including those dropped without being closed."""
    devices: list[DeviceState]
    listeners: list[ListenerState]
    connections: list[ConnectionState]


def traffic(counts: Callable[[str], int]) -> Traffic:
    """Return the traffic counters. `counts(name)` must return the value of one counter."""
    return cast("Traffic", {name: counts(name) for name in Traffic.__annotations__})
