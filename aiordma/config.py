"""The settings of a connection: limits on the peer's demands, memory and timeouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, TypeVar

from ._core.arguments import choice, integer, seconds, truth
from ._core.region import Rights
from ._core.timers import ack_seconds

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

Encrypt = bool | Literal["messages"]
"""The values of `encrypt=`."""


T = TypeVar("T")


def _ranged(default: T, low: float, high: float) -> T:
    """A field whose values are within two limits."""
    return field(default=default, metadata={"range": (low, high)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of a connection.  Sizes in bytes, times in seconds.

    Each side has its own settings; the handshake exchanges what the peer must know.  A connection
    takes `(data_receives + control_receives) * eager_size` of registered memory for its receives,
    and at most `send_queue * eager_size` for messages being sent; with `max_eager_size` instead
    while messages of that size are sent.
    """

    eager_size: int = _ranged(8 * KIB, KIB, GIB)
    """Size of a receive.  A longer message is sent by rendezvous: the receiver reads it by RDMA."""
    max_eager_size: int = _ranged(128 * KIB, KIB, GIB)
    """Size that the receives grow to while the peer sends messages that would then fit.  They do
    not grow if it is at most `eager_size`, or if it would leave less than half of the pool."""
    data_receives: int = _ranged(24, 1, 0xFFFF)
    """Frames of messages that the peer may have in flight before the program here takes one: the
    data credits of flow control.  Small messages that are sent together share a frame."""
    control_receives: int = _ranged(8, 4, 0xFF)
    """Receives kept for control messages; at least 4."""
    send_queue: int = _ranged(64, 8, 0xFFFF)
    """Work requests that this side may have outstanding, besides a few internal ones; further ones
    are queued."""
    max_message: int = _ranged(GIB, 0, 1 << 62)
    """The longest message that this side accepts."""
    fetch_ahead: int = _ranged(32 * MIB, 0, 1 << 62)
    """Bytes of rendezvous messages that are read before the program calls `recv`."""
    lend_quota: int = _ranged(64 * MIB, 0, 1 << 62)
    """Total memory that this side lends for the peer's `request_region`; memory that the peer has
    handed over counts until `recv_buffer` takes it."""
    max_regions: int = _ranged(256, 1, 1 << 20)
    """Regions that the peer may share with this side, or borrow from it, at a time."""
    lease: float | None = _ranged(60.0, 0.001, 4294967)
    """Seconds for which memory is shared, or borrowed, where the call names no `lease`.  None:
    without an end, as long as the connection lives.  A call says the same with `lease=None`."""
    max_lease: float | None = _ranged(None, 0.001, 4294967)
    """The longest lease of memory that the peer borrows or renews: it gets this where it asks for
    more, or for one without an end.  None: no limit."""
    max_rights: Rights = Rights.READ | Rights.WRITE | Rights.ATOMIC
    """The rights that the peer may have on memory that it borrows; a request for others is
    refused."""
    pool_limit: int = _ranged(4 * GIB, MIB, 1 << 62)
    """Registered memory of the pool, shared by all connections of the event loop and device;
    the first connection's value counts."""
    huge_pages: bool = False
    """Has the pool on huge pages: on free ones of the system (`nr_hugepages`); where too few are
    free that is logged, and the kernel is asked for transparent ones.  Shared as `pool_limit`."""
    cached_registrations: int = _ranged(64, 0, 1 << 20)
    """Registrations of the user's own memory in the registration cache, which keeps them for the
    next operation while the user holds a memoryview of that memory; 0: none.  The least recently
    used go first, also where they cover more than 256 MiB together.  Shared as `pool_limit`."""
    polling: float = _ranged(200e-6, 0, 1)
    """Adaptive polling: the time that the event loop busy-polls for the next completion before it
    sleeps, while polling finds completions; 0: it sleeps at once.  A task polls for a few
    microseconds itself before it waits.  Shared as `pool_limit`."""
    connect_timeout: float = 10.0
    """Seconds from `connect` until the peer must have answered the handshake."""
    handshake_timeout: float = 10.0
    """Seconds that an accepted peer may take for its handshake.  An accepted socket may stay silent
    before that for a fifth of them (`via="tcp"`; the connection manager has a limit of its own)."""
    max_handshakes: int = _ranged(256, 1, 1 << 20)
    """Handshakes in progress at a listener at a time, as many requests over existing connections,
    and as many sockets that are silent before their handshake.  When a further peer comes, one
    is dropped, by lot; of the network that has most, if it has more than an eighth.  Each is
    at most an eighth of the descriptors that the process may have."""
    max_connections: int | None = _ranged(None, 1, 1 << 62)
    """Connections of a listener at a time, including those in their handshake; with `auth`, those
    that have proved the key.  Further peers are rejected with the reason (RejectedError).  None: no
    limit."""
    max_connections_per_host: int | None = _ranged(None, 1, 1 << 62)
    """The same limit for each host: an IPv4 address, or an IPv6 /64 network."""
    in_band: bool = True
    """Connection reuse for connecting: open and accept further connections to the same address and
    port in-band, over an existing connection (`via="tcp"` without TLS).  It is faster than another
    TCP bootstrap; the connections share the first one's socket and addresses.  False: each
    connection uses a socket of its own, as needed behind a load balancer."""
    allow_other_addresses: bool = False
    """Whether the embedded device may connect to an address that a peer names as its own, though it
    came from another one (`via="tcp"`): as behind address translation or a load balancer.  Only for
    peers that are trusted, since they can have this side connect to any address."""
    max_rails: int | None = _ranged(None, 1, 8)
    """Rails of a connection at most: queue pairs on several devices, the lead among them.  None: as
    many as `device=` names here, so one where it names none.  A side with fewer devices than its
    peer uses them again with a higher limit."""
    keep_alive: float | None = 15.0
    """Idle seconds before the peer's device is probed (keep-alive); None: never."""
    keep_alive_timeout: float = 30.0
    """Seconds that the device may take to answer the probe before the connection is broken.  Of
    several rails: also that the peer may take to say that it has stopped one, if writes wait."""
    close_timeout: float = 2.0
    """Seconds that `close` waits for outstanding operations before it aborts them."""
    retry_count: int = _ranged(6, 0, 7)
    """Retransmissions, 0 to 7, of what the peer's device does not acknowledge; then the connection
    breaks.  Not 7 with rdma_rxe, which takes that for no limit."""
    ack_timeout: float = _ranged(0.067, 8.2e-6, 8796)
    """Seconds until a retransmission, rounded up to 4.096 us times a power of 2.  A dead path is
    noticed after about `ack_timeout * (retry_count + 1)`, or up to four times that.  An int from 1
    to 31 is refused: it would be the encoded number of a program in C."""
    type_of_service: int = _ranged(0, 0, 0xFF)
    """Type of service (IPv4) or traffic class (IPv6) of the packets, 0 to 255.  The embedded device
    sets it on packets of RoCE v2, and on TCP connections with the connection manager."""
    path_mtu: int | None = None
    """Bytes of payload of a packet at most: 256, 512, 1024, 2048 or 4096 (`via="tcp"`).  None: the
    active MTU of the ports.  The smaller one of both sides applies."""
    gid_index: int | None = _ranged(None, 0, 0xFFFF)
    """Index of the local GID (`via="tcp"`; `aiordma devinfo` lists them).  None: the GID of the
    local address.  It must reach the GID that the peer uses."""
    pkey: int | None = _ranged(None, 1, 0xFFFF)
    """The partition: a P_Key of the port (`via="tcp"`).  None: the first one."""
    hop_limit: int | None = _ranged(None, 0, 0xFF)
    """Routers that a packet may pass (`via="tcp"`), 0 to 255.  None: 64."""
    service_level: int | None = _ranged(None, 0, 15)
    """InfiniBand's service level, or RoCE's priority, 0 to 15 (`via="tcp"`).  None: 0."""

    def __repr__(self) -> str:
        given = [
            f"{it.name}={value!r}"
            for it in fields(self)
            if (value := getattr(self, it.name)) != it.default
        ]
        return f"Config({', '.join(given)})"

    def __post_init__(self) -> None:
        for name, convert, optional, limits in _FIELDS:
            value = getattr(self, name)
            if value is None and optional:
                continue
            value = convert(f"Config.{name}", value)
            object.__setattr__(self, name, value)
            if limits is not None and not limits[0] <= value <= limits[1]:
                low, high = limits
                raise ValueError(f"Config.{name} must be within {low} and {high}, not {value}")
            if limits is None and isinstance(value, float) and not value > 0:
                raise ValueError(f"Config.{name} must be more than 0 seconds, not {value}")
        if self.path_mtu not in (None, *_MTUS):
            raise ValueError(f"Config.path_mtu must be one of {_MTUS}, not {self.path_mtu}")


_CONVERSIONS: dict[str, Callable[[str, object], Any]] = {
    "bool": truth,
    "int": partial(integer, low=None, high=None),
    "float": seconds,
    "Rights": partial(choice, kind=Rights),
}
"""The conversion of a value, by the annotation of its field."""

_FIELDS = [
    (
        it.name,
        ack_seconds if it.name == "ack_timeout" else _CONVERSIONS[kind],
        kind != it.type,
        it.metadata.get("range"),
    )
    for it in fields(Config)
    for kind in [str(it.type).removesuffix(" | None")]
]
"""The fields: their names, conversions, whether they may be None, and their limits."""

_MTUS = (256, 512, 1024, 2048, 4096)

DEFAULT = Config()
