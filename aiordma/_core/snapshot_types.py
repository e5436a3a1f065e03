"""The types of `aiordma.snapshot`. Their public names are in `aiordma.monitoring`.

Each object creates its own part of a snapshot in a method `figures`. If you add a field to a type,
add its value there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict, cast


class Traffic(TypedDict):
    """Counts of messages, their bytes, and operations on the peer's memory."""

    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    reads: int
    writes: int
    atomics: int
    bytes_read: int
    """The number of bytes that this side has read from the peer's memory, without messages."""
    bytes_written: int
    """The number of bytes that this side has written to the peer's memory."""
    peer_bytes_read: int
    """The number of bytes that the peer has read from this side's memory, without messages.

    0 on devices that do not count them.
    """
    peer_bytes_written: int
    """The number of bytes that the peer has written to this side's memory.

    0 on devices that do not count them.
    """


class ConnectionEvents(TypedDict):
    """Counts of connections since the process began."""

    begun: int
    """The number of connections that `connect` or `accept` returned."""
    ended: int
    """The number of these that were closed in order, by either side."""
    broken: int
    """The number of these that ended with an error."""
    failed: int
    """The number of failed attempts to connect and failed handshakes of peers."""


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
    """The cache for registrations of user memory; see `Connection.registration_statistics`."""

    registrations: int
    bytes: int
    found: int
    made: int


class CompletionQueueState(TypedDict):
    """A completion queue that several connections share."""

    entries: int
    """The number of completions that it can hold."""
    reserved: int
    """The number of entries reserved by queue pairs."""


class DeviceState(TypedDict):
    """A device in use by the connections of one event loop."""

    name: str
    loop: int
    """A number that identifies the event loop within the process."""
    connections: int
    """The number of queue pairs of connections, including those of handshakes in progress."""
    work_requests: int
    """The number of outstanding work requests: posted receives, sends and operations on memory."""
    completions: int
    """The number of completions since the device was opened."""
    pool: PoolState
    registration_cache: RegistrationCacheState
    completion_queues: list[CompletionQueueState]
    open: dict[str, int]
    """The number of objects that are open on the device, by class."""
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
    """A rail of a connection. The fields are those of `RailStatus`."""

    device: str
    state: str
    age: float
    """The number of seconds since the rail entered this state."""
    error: str | None
    """The error with its date and time, in UTC."""
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
    """The medium, as for `Connection.wire`. It is also None until the event loop has read it."""
    state: str
    """The name of a state in docs/design.md."""
    accepted: bool
    """Whether this is the listener's side."""
    local: str | None
    """The address of this side, as "host:port"."""
    peer: str | None
    """The address of the peer, as "host:port"."""
    qp_num: int
    age: float
    """The number of seconds since the connection was opened."""
    traffic: Traffic
    send_queue: int
    """The number of entries of the send queue."""
    outstanding: int
    """The number of work requests that have been posted or wait for entries of the send queue."""
    messages_waiting: int
    """The number of messages that wait for credits or memory."""
    waiting_for_credits: int
    """The number of these that wait until the peer receives."""
    waiting_for_send_queue: int
    """The number of work requests that wait for entries of the send queue."""
    messages_unread: int
    """The number of messages that have arrived but have not been received yet."""
    shared_regions: int
    """The number of regions of this side that the peer may use."""
    lent_bytes: int
    """The number of bytes that the peer has borrowed from this side."""
    remote_regions: int
    """The number of regions of the peer that this side holds."""
    rails: list[RailState]
    """The queue pairs, the lead first. There are several if `connect` was given several devices."""


class WaitState(TypedDict):
    """How often and how long connections or pools have waited for the same resource."""

    count: int
    seconds: float
    """The total time. Concurrent waits in one connection or pool count once."""


class Latencies(TypedDict):
    """The time from posting a request until its completion is processed, for every 17th request."""

    seconds: float
    """The sum of all measured times."""
    up_to: dict[str, int]
    """The number of requests that took at most as long as each bound, in seconds.

    "+Inf" is the number of all requests.
    """


class Snapshot(TypedDict):
    """The state of a process."""

    version: str
    """The version of aiordma. The fields may differ between versions."""
    pid: int
    time: float
    """The time of the snapshot, in seconds since the epoch."""
    traffic: Traffic
    """The sums over all connections since the process began, including those that have ended."""
    waits: dict[str, WaitState]
    """The waits since the process began, by resource.

    "credits" are waits until a peer receives, "send queue" waits for its entries, and "memory"
    waits for memory from a pool.
    """
    latencies: dict[str, Latencies]
    """The latencies since the process began, by operation.

    "send" is a frame with messages, or one that offers a long message. A "batch" is measured as a
    whole. Failed operations are not counted.
    """
    connection_events: ConnectionEvents
    """The counts of connections since the process began."""
    errors: dict[str, int]
    """The number of broken connections and failed attempts since the process began.

    The keys are the classes of the errors.
    """
    rail_failures: dict[str, int]
    """The number of rails that broke since the process began, by this side's device."""
    leads_moved: dict[str, int]
    """The number of leads that broke and moved to another device, by the device that they left."""
    objects: dict[str, int]
    """The number of open verbs objects on all devices, by class.

    This includes objects that were dropped without being closed.
    """
    devices: list[DeviceState]
    listeners: list[ListenerState]
    connections: list[ConnectionState]


def traffic(counts: Callable[[str], int]) -> Traffic:
    """Return the counts for all fields, using a function that returns the count for a name."""
    return cast("Traffic", {name: counts(name) for name in Traffic.__annotations__})
