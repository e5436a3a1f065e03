"""The settings of a connection: memory, timeouts, and limits on the peer's requests."""

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
"""The values that `encrypt=` accepts."""


T = TypeVar("T")


def _ranged(default: T, low: float, high: float) -> T:
    """Create a field whose values are within two limits."""
    return field(default=default, metadata={"range": (low, high)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of a connection. Sizes are in bytes, and times are in seconds.

    Each side has its own settings. The handshake tells each side the settings of the other that it
    must know. A connection uses `(data_receives + control_receives) * eager_size` bytes of
    registered memory for its receives, and at most `send_queue * eager_size` bytes for outgoing
    messages. While messages of up to `max_eager_size` are being sent, that size applies instead.
    """

    eager_size: int = _ranged(8 * KIB, KIB, GIB)
    """The size of a receive buffer.

    Longer messages are sent by rendezvous: the sender announces the message, and the receiver reads
    it from the sender's memory.
    """
    max_eager_size: int = _ranged(128 * KIB, KIB, GIB)
    """The size to which receives can grow if the peer sends messages that would then fit.

    Receives do not grow if this is at most `eager_size`, or if less than half of the memory pool
    would remain free.
    """
    data_receives: int = _ranged(24, 1, 0xFFFF)
    """The number of message frames that the peer may send before this program takes one.

    These are the data credits of flow control. Small messages that are sent together share a frame.
    """
    control_receives: int = _ranged(8, 4, 0xFF)
    """The number of receives reserved for control messages; at least 4."""
    send_queue: int = _ranged(64, 8, 0xFFFF)
    """The number of work requests that this side may have outstanding at a time.

    A few internal requests are not included. Further requests wait in a queue.
    """
    max_message: int = _ranged(GIB, 0, 1 << 62)
    """The length of the longest message that this side accepts."""
    fetch_ahead: int = _ranged(32 * MIB, 0, 1 << 62)
    """The number of bytes of rendezvous messages that are read before the program calls `recv`."""
    lend_quota: int = _ranged(64 * MIB, 0, 1 << 62)
    """The total amount of memory that this side lends to the peer's `request_region`.

    Memory that the peer has handed over is included until `recv_buffer` takes it.
    """
    max_regions: int = _ranged(256, 1, 1 << 20)
    """The maximum number of regions that the peer may share or borrow at the same time."""
    lease: float | None = _ranged(60.0, 0.001, 4294967)
    """The default lease for shared or borrowed memory, in seconds.

    None means that there is no time limit, so the lease lasts as long as the connection. The
    argument `lease=` of a call overrides the default.
    """
    max_lease: float | None = _ranged(None, 0.001, 4294967)
    """The longest lease that the peer can get when it borrows memory or renews a lease.

    If the peer asks for a longer lease, or for one without a time limit, it gets this lease
    instead. None means that there is no maximum.
    """
    max_rights: Rights = Rights.READ | Rights.WRITE | Rights.ATOMIC
    """The rights that the peer may request for memory that it borrows. Others are refused."""
    pool_limit: int = _ranged(4 * GIB, MIB, 1 << 62)
    """The maximum amount of registered memory in the pool.

    All connections that use the same event loop and device share one pool. The value of the first
    connection applies.
    """
    huge_pages: bool = False
    """Whether to allocate the pool on huge pages that the system has reserved (`nr_hugepages`).

    If not enough of them are free, a message is logged, and the kernel is asked for transparent
    huge pages instead. The value of the first connection applies, as for `pool_limit`.
    """
    cached_registrations: int = _ranged(64, 0, 1 << 20)
    """The number of registrations of the user's memory to cache. 0 turns the cache off.

    While the user holds a memoryview of the memory, its registration is kept for the next
    operation. The least recently used registrations are dropped when the cache is full, or when
    they cover more than 256 MiB together. The value of the first connection applies, as for
    `pool_limit`.
    """
    polling: float = _ranged(200e-6, 0, 1)
    """The maximum time for which the event loop polls for a completion before it sleeps.

    The loop polls only as long as polling finds completions (adaptive polling). With 0, it sleeps
    immediately. A task that waits for a completion first polls for a few microseconds on its own.
    The value of the first connection applies, as for `pool_limit`.
    """
    connect_timeout: float = 10.0
    """The time that `connect` may take until the peer has completed the handshake."""
    handshake_timeout: float = 10.0
    """The time that an accepted peer may take for its handshake.

    With `via="tcp"`, an accepted socket that sends nothing is closed after a fifth of this time.
    The connection manager has its own limit.
    """
    max_handshakes: int = _ranged(256, 1, 1 << 20)
    """The maximum number of handshakes that a listener has in progress at the same time.

    The same limit applies separately to requests over existing connections, and to sockets that
    have not sent anything yet. If another peer arrives when a limit is reached, one of the peers is
    dropped at random. If a network has more than an eighth of the peers, the dropped peer is from
    the network that has the most. Each limit is at most an eighth of the file descriptors that the
    process may open.
    """
    max_connections: int | None = _ranged(None, 1, 1 << 62)
    """The maximum number of connections of a listener, including handshakes in progress.

    With `auth`, only peers that have proved that they know the key count. Further peers are
    rejected and get a RejectedError that contains the reason. None means that there is no limit.
    """
    max_connections_per_host: int | None = _ranged(None, 1, 1 << 62)
    """The maximum number of connections from one host, counted like `max_connections`.

    A host is an IPv4 address or an IPv6 /64 network.
    """
    in_band: bool = True
    """Whether to open and accept further connections over an existing one.

    This is faster than another bootstrap over TCP. It applies to connections to the same address
    and port with `via="tcp"` and without TLS. These connections share the socket and the addresses
    of the first one. With False, each connection has its own socket, which is necessary behind a
    load balancer.
    """
    allow_other_addresses: bool = False
    """Whether the embedded device may connect to an address other than that of the peer's socket.

    With `via="tcp"`, this is necessary if the peer is behind address translation or a load
    balancer. Use it only for trusted peers, because they can make this side connect to any address.
    """
    max_rails: int | None = _ranged(None, 1, 8)
    """The maximum number of rails of a connection. Rails are queue pairs on several devices.

    None means one rail for each device that `device=` names on this side, or a single rail if it
    names none. If the number of rails exceeds the number of devices on one side, that side uses its
    devices several times.
    """
    keep_alive: float | None = 15.0
    """The time without traffic after which the peer's device is probed. None turns probing off."""
    keep_alive_timeout: float = 30.0
    """The time that the peer's device may take to respond before the connection is broken.

    With several rails, it is also the time that the peer may take to confirm that it has stopped a
    rail, if writes are waiting for that.
    """
    close_timeout: float = 2.0
    """The time that `close` waits for outstanding operations before it aborts them."""
    retry_count: int = _ranged(6, 0, 7)
    """The number of times, 0 to 7, that a packet is retransmitted before the connection breaks.

    A packet is retransmitted if it is not acknowledged. Do not use 7 with rdma_rxe, which
    interprets it as unlimited.
    """
    ack_timeout: float = _ranged(0.067, 8.2e-6, 8796)
    """The time after which a packet is retransmitted if it has not been acknowledged.

    The device rounds it up to 4.096 us times a power of 2. A dead path is detected after
    `ack_timeout * (retry_count + 1)`, or up to four times that. Integers from 1 to 31 are rejected,
    because they look like the encoded value that C programs use.
    """
    type_of_service: int = _ranged(0, 0, 0xFF)
    """The type of service (IPv4) or traffic class (IPv6) of the packets, 0 to 255.

    The embedded device sets it on RoCE v2 packets, and on TCP connections with the connection
    manager.
    """
    path_mtu: int | None = None
    """The maximum payload of a packet: 256, 512, 1024, 2048 or 4096 bytes (`via="tcp"`).

    None means the active MTU of the ports. The smaller of the two sides' values applies.
    """
    gid_index: int | None = _ranged(None, 0, 0xFFFF)
    """The index of the local GID, as listed by `aiordma devinfo` (`via="tcp"`).

    None means the GID that belongs to the local address. The peer's GID must be reachable from this
    GID.
    """
    pkey: int | None = _ranged(None, 1, 0xFFFF)
    """The partition, as a P_Key of the port (`via="tcp"`). None means the port's first P_Key."""
    hop_limit: int | None = _ranged(None, 0, 0xFF)
    """The number of routers that a packet may pass, 0 to 255 (`via="tcp"`). None means 64."""
    service_level: int | None = _ranged(None, 0, 15)
    """The InfiniBand service level, or the RoCE priority, 0 to 15 (`via="tcp"`). None means 0."""

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
                raise ValueError(f"Config.{name} must be between {low} and {high}, not {value}")
            if limits is None and isinstance(value, float) and not value > 0:
                raise ValueError(f"Config.{name} must be a positive number of seconds, not {value}")
        if self.path_mtu not in (None, *_MTUS):
            raise ValueError(f"Config.path_mtu must be one of {_MTUS}, not {self.path_mtu}")


_CONVERSIONS: dict[str, Callable[[str, object], Any]] = {
    "bool": truth,
    "int": partial(integer, low=None, high=None),
    "float": seconds,
    "Rights": partial(choice, kind=Rights),
}
"""The function that converts a value, by the annotation of its field."""

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
"""The name, conversion, optionality and limits of each field."""

_MTUS = (256, 512, 1024, 2048, 4096)

DEFAULT = Config()
