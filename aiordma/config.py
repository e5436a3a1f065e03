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
"""The values of `encrypt=`."""


T = TypeVar("T")


def _ranged(default: T, low: float, high: float) -> T:
    """Create a field whose values are within two limits."""
    return field(default=default, metadata={"range": (low, high)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of a connection. Sizes are in bytes, times in seconds.

    Each side has its own settings, and the handshake exchanges what the peer must know. A
    connection uses `(data_receives + control_receives) * eager_size` bytes of registered memory for
    its receives, and at most `send_queue * eager_size` bytes for outgoing messages. While messages
    of up to `max_eager_size` are sent, that size applies instead.
    """

    eager_size: int = _ranged(8 * KIB, KIB, GIB)
    """The size of a receive. Longer messages are sent by rendezvous (read by the receiver)."""
    max_eager_size: int = _ranged(128 * KIB, KIB, GIB)
    """The size up to which receives grow while the peer sends messages that would then fit.

    They do not grow if this is at most `eager_size`, or if less than half of the pool would remain
    free.
    """
    data_receives: int = _ranged(24, 1, 0xFFFF)
    """The number of message frames that the peer may have in flight before this program takes one.

    These are the data credits of flow control. Small messages that are sent together share a frame.
    """
    control_receives: int = _ranged(8, 4, 0xFF)
    """The number of receives reserved for control messages; at least 4."""
    send_queue: int = _ranged(64, 8, 0xFFFF)
    """The number of work requests that this side may have outstanding, besides a few internal ones.

    Further requests are queued.
    """
    max_message: int = _ranged(GIB, 0, 1 << 62)
    """The length of the longest message that this side accepts."""
    fetch_ahead: int = _ranged(32 * MIB, 0, 1 << 62)
    """The number of bytes of rendezvous messages to read before the program calls `recv`."""
    lend_quota: int = _ranged(64 * MIB, 0, 1 << 62)
    """The total memory that this side lends to the peer's `request_region`.

    Memory that the peer has handed over counts until `recv_buffer` takes it.
    """
    max_regions: int = _ranged(256, 1, 1 << 20)
    """The number of regions that the peer may share or borrow at a time."""
    lease: float | None = _ranged(60.0, 0.001, 4294967)
    """The default lease, in seconds, for sharing or borrowing memory.

    None means no time limit: the lease lasts as long as the connection. A call can override it with
    `lease=`.
    """
    max_lease: float | None = _ranged(None, 0.001, 4294967)
    """The longest lease that the peer can get for memory that it borrows or renews.

    Longer requests, including those without a time limit, are reduced to this. None means no limit.
    """
    max_rights: Rights = Rights.READ | Rights.WRITE | Rights.ATOMIC
    """The rights that the peer may have on borrowed memory; others are refused."""
    pool_limit: int = _ranged(4 * GIB, MIB, 1 << 62)
    """The maximum registered memory of the pool.

    All connections of the event loop and device share the pool, and the first connection's value
    applies.
    """
    huge_pages: bool = False
    """Whether to allocate the pool on huge pages of the system (`nr_hugepages`).

    If too few are free, this is logged, and the kernel is asked for transparent huge pages. The
    first connection's value applies, as for `pool_limit`.
    """
    cached_registrations: int = _ranged(64, 0, 1 << 20)
    """The size of the cache for registrations of the user's memory; 0 turns it off.

    A registration is kept for the next operation while the user holds a memoryview of the memory.
    The least recently used ones are dropped first, also if they cover more than 256 MiB together.
    The first connection's value applies, as for `pool_limit`.
    """
    polling: float = _ranged(200e-6, 0, 1)
    """The longest time that the event loop polls for the next completion before it sleeps.

    It polls only while polling finds completions (adaptive polling). With 0, it sleeps immediately.
    A task first polls for a few microseconds itself. The first connection's value applies, as for
    `pool_limit`.
    """
    connect_timeout: float = 10.0
    """The number of seconds from `connect` until the peer must have completed the handshake."""
    handshake_timeout: float = 10.0
    """The number of seconds that an accepted peer may take for its handshake.

    Before that, an accepted socket may stay silent for a fifth of this time (`via="tcp"`; the
    connection manager has its own limit).
    """
    max_handshakes: int = _ranged(256, 1, 1 << 20)
    """The number of handshakes that may be in progress at a listener.

    The same number applies to requests over existing connections, and to sockets that have sent
    nothing. If another peer arrives, one is dropped at random, from the network that has the most
    if that is more than an eighth. Each limit is at most an eighth of the process's descriptors.
    """
    max_connections: int | None = _ranged(None, 1, 1 << 62)
    """The number of connections of a listener, including handshakes in progress.

    With `auth`, only peers that have proved the key count. Further peers are rejected with the
    reason (RejectedError). None means no limit.
    """
    max_connections_per_host: int | None = _ranged(None, 1, 1 << 62)
    """The same limit for each host: an IPv4 address, or an IPv6 /64 network."""
    in_band: bool = True
    """Whether to open and accept further connections over an existing one.

    This applies to connections to the same address and port with `via="tcp"` and without TLS. It is
    faster than another TCP bootstrap. The connections share the first one's socket and addresses.
    With False, each connection has its own socket, as is necessary behind a load balancer.
    """
    allow_other_addresses: bool = False
    """Whether the embedded device may connect to a peer address that differs from the socket's.

    This is necessary behind address translation or a load balancer, with `via="tcp"`. Use it only
    for trusted peers, because they can make this side connect to any address.
    """
    max_rails: int | None = _ranged(None, 1, 8)
    """The maximum number of rails of a connection: queue pairs on several devices.

    None means as many as `device=` names on this side, or one if it names none. If this exceeds the
    number of devices of one side, that side uses them several times.
    """
    keep_alive: float | None = 15.0
    """The number of idle seconds before the peer's device is probed; None turns it off."""
    keep_alive_timeout: float = 30.0
    """The number of seconds that the device may take to respond before the connection is broken.

    With several rails, it is also how long the peer may take to confirm that it has stopped a rail,
    if writes wait for that.
    """
    close_timeout: float = 2.0
    """The number of seconds that `close` waits for outstanding operations before it aborts them."""
    retry_count: int = _ranged(6, 0, 7)
    """The number of retransmissions, 0 to 7, before an unacknowledged packet breaks the connection.

    Do not use 7 with rdma_rxe, which interprets it as unlimited.
    """
    ack_timeout: float = _ranged(0.067, 8.2e-6, 8796)
    """The number of seconds until a retransmission, rounded up to 4.096 us times a power of 2.

    A dead path is detected after `ack_timeout * (retry_count + 1)`, or up to four times that.
    Integers from 1 to 31 are rejected, because they look like the encoded value of a C program.
    """
    type_of_service: int = _ranged(0, 0, 0xFF)
    """The type of service (IPv4) or traffic class (IPv6) of the packets, 0 to 255.

    The embedded device sets it on RoCE v2 packets, and on TCP connections with the connection
    manager.
    """
    path_mtu: int | None = None
    """The maximum payload of a packet: 256, 512, 1024, 2048 or 4096 bytes (`via="tcp"`).

    None means the active MTU of the ports. The smaller value of both sides applies.
    """
    gid_index: int | None = _ranged(None, 0, 0xFFFF)
    """The index of the local GID (`via="tcp"`; `aiordma devinfo` lists them).

    None means the GID of the local address. It must reach the GID that the peer uses.
    """
    pkey: int | None = _ranged(None, 1, 0xFFFF)
    """The partition: a P_Key of the port (`via="tcp"`). None means the first one."""
    hop_limit: int | None = _ranged(None, 0, 0xFF)
    """The number of routers that a packet may pass, 0 to 255 (`via="tcp"`). None means 64."""
    service_level: int | None = _ranged(None, 0, 15)
    """InfiniBand's service level, or RoCE's priority, 0 to 15 (`via="tcp"`). None means 0."""

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
