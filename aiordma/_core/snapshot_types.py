"""The types of `aiordma.snapshot`; `aiordma.monitoring` has their public names.

Each object makes its own part of a snapshot, in a method `figures`: a new field of a type has its
value there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict, cast


class Traffic(TypedDict):
    """Counts of messages, bytes of messages, and operations on the peer's memory."""

    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    reads: int
    writes: int
    atomics: int
    bytes_read: int
    """Bytes that this side has read from the peer's memory, without those of messages."""
    bytes_written: int
    """Bytes that this side has written to the peer's memory."""
    peer_bytes_read: int
    """Bytes that the peer has read from this side's memory, without those of messages; 0 on devices
    that do not count them."""
    peer_bytes_written: int
    """Bytes that the peer has written to this side's memory; 0 on devices that do not count
    them."""


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


class RailState(TypedDict):
    """A rail of a connection, as `RailStatus` of `Connection.rails`."""

    device: str
    state: str
    age: float
    """Seconds since it came into that state."""
    error: str | None
    """With its date and time, in UTC."""
    bytes_sent: int
    bytes_received: int
    bytes_read: int
    bytes_written: int
    peer_bytes_read: int | None
    peer_bytes_written: int | None


class ConnectionState(TypedDict):
    """An open connection, or one that is being closed."""

    device: str
    loop: int
    wire: str | None
    """As `Connection.wire`; None also until the event loop has read it: see `snapshot`."""
    state: str
    """A state of docs/design.md."""
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
    waiting_for_credits: int
    """Of these, those that wait until the peer receives."""
    waiting_for_send_queue: int
    """Work requests that wait for entries of the send queue."""
    messages_unread: int
    """Messages that have arrived and were not received yet."""
    shared_regions: int
    """Regions of this side that the peer may use."""
    lent_bytes: int
    """Bytes of this side that the peer has borrowed."""
    remote_regions: int
    """Regions of the peer that this side holds."""
    rails: list[RailState]
    """Its queue pairs, the lead first; others where `connect` was given several devices."""


class WaitState(TypedDict):
    """The number and length of the waits of connections or pools for the same thing."""

    count: int
    seconds: float
    """Of one connection or pool, however many messages, operations or tasks waited in it."""


class Latencies(TypedDict):
    """Times from the post of a request until its completion was taken, of every 17th request."""

    seconds: float
    """Their sum."""
    up_to: dict[str, int]
    """The number that took no longer than each bound, in seconds; "+Inf": all."""


class Snapshot(TypedDict):
    """The state of a process."""

    version: str
    """The version of aiordma: another one may have other fields."""
    pid: int
    time: float
    """Seconds since the epoch."""
    traffic: Traffic
    """The sums of all connections since the process began, those that have ended included."""
    waits: dict[str, WaitState]
    """For "credits", until a peer receives; for entries of the "send queue"; for "memory" of a
    pool. Since the process began."""
    latencies: dict[str, Latencies]
    """By operation, since the process began: "send" is a frame with messages, or with the offer of
    a long one; a "batch" is measured as a whole. Failed ones are not counted."""
    connection_events: ConnectionEvents
    """Since the process began."""
    errors: dict[str, int]
    """Connections that broke and attempts that failed since the process began, by the class of the
    error."""
    rail_failures: dict[str, int]
    """Rails that broke since the process began, by this side's device."""
    leads_moved: dict[str, int]
    """Leads that broke and moved to another device, by that which they left."""
    objects: dict[str, int]
    """Open objects of the verbs by class, on any device, also those that were dropped unclosed."""
    devices: list[DeviceState]
    listeners: list[ListenerState]
    connections: list[ConnectionState]


def traffic(counts: Callable[[str], int]) -> Traffic:
    """By the function that gives the count of a name."""
    return cast("Traffic", {name: counts(name) for name in Traffic.__annotations__})
