"""The settings of a connection: limits on the peer's demands, memory and timeouts."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of a connection.  Sizes in bytes, times in seconds.

    Each side has its own settings; the handshake exchanges what the peer must know.  A connection
    takes `(data_receives + control_receives) * eager_size` of registered memory for its receives,
    and at most `send_queue * eager_size` for messages being sent; with `max_eager_size` instead
    while messages of that size are sent.
    """

    eager_size: int = 8 * KIB
    """Size of a receive.  A longer message is sent by rendezvous: the receiver reads it by RDMA."""
    max_eager_size: int = 128 * KIB
    """Size that the receives grow to while the peer sends messages that would then fit.  They do
    not grow if it is at most `eager_size`, or if it would leave less than half of the pool."""
    data_receives: int = 24
    """Frames of messages that the peer may have in flight before the program here takes one: the
    data credits of flow control.  Small messages that are sent together share a frame."""
    control_receives: int = 8
    """Receives kept for control messages; at least 4."""
    send_queue: int = 64
    """Work requests that this side may have outstanding, besides a few internal ones; further ones
    are queued."""
    max_message: int = GIB
    """The longest message that this side accepts."""
    fetch_ahead: int = 32 * MIB
    """Bytes of rendezvous messages that are read before the program calls `recv`."""
    lend_quota: int = 64 * MIB
    """Total memory that this side lends for the peer's `request_region`; memory that the peer has
    handed over counts until `recv_buffer` takes it."""
    max_regions: int = 256
    """Regions that the peer may share with this side, or borrow from it, at a time."""
    pool_limit: int = 4 * GIB
    """Registered memory of the pool, shared by all connections of the event loop and device;
    the first connection's value counts."""
    cached_registrations: int = 64
    """Registrations of the user's own memory in the registration cache, which keeps them for the
    next operation while the user holds a memoryview of that memory; 0: none.  Shared as
    `pool_limit`."""
    cached_bytes: int = 256 * MIB
    """Memory that the registration cache may cover; the least recently used registrations go
    first."""
    polling: float = 200e-6
    """Adaptive polling: the longest time that the event loop busy-polls for the next completion
    before it sleeps.  It polls for less where a wake-up takes less, and only while polling finds
    completions; 0: it sleeps at once.  A task polls for a few microseconds itself before it waits.
    Shared as `pool_limit`."""
    connect_timeout: float = 10.0
    """Seconds from `connect` until the peer must have answered the handshake."""
    handshake_timeout: float = 10.0
    """Seconds that an accepted peer may take for its handshake."""
    max_handshakes: int = 256
    """Handshakes in progress at a listener at a time; further peers wait or are rejected."""
    max_connections: int | None = None
    """Connections of a listener at a time, including those in their handshake; further peers are
    rejected with the reason (RejectedError).  None: no limit."""
    max_connections_per_host: int | None = None
    """The same limit for each address of a peer."""
    in_band: bool = True
    """Connection reuse for connecting: open and accept further connections to the same address and
    port in-band, over an existing connection (`via="tcp"` without TLS).  It is faster than another
    TCP bootstrap; the connections share the first one's socket and addresses.  False: each
    connection uses a socket of its own, as needed behind a load balancer."""
    keep_alive: float | None = 15.0
    """Idle seconds before the peer's device is probed (keep-alive); None: never."""
    keep_alive_timeout: float = 30.0
    """Seconds that the device may take to answer the probe before the connection is broken."""
    close_timeout: float = 2.0
    """Seconds that `close` waits for outstanding operations before it aborts them."""

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"Config.{name} must be within {low} and {high}, not {value}")
        if not 0 <= self.polling <= 1:
            raise ValueError(f"Config.polling must be within 0 and 1 second, not {self.polling}")
        for name in _TIMES:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"Config.{name} must be more than 0 seconds, not {value}")


_BOUNDS = {
    "eager_size": (KIB, GIB),
    "max_eager_size": (KIB, GIB),
    "data_receives": (1, 0xFFFF),
    "control_receives": (4, 0xFF),
    "send_queue": (8, 0xFFFF),
    "max_message": (0, 1 << 62),
    "fetch_ahead": (0, 1 << 62),
    "lend_quota": (0, 1 << 62),
    "max_regions": (1, 1 << 20),
    "cached_registrations": (0, 1 << 20),
    "cached_bytes": (0, 1 << 62),
    "pool_limit": (MIB, 1 << 62),
    "max_handshakes": (1, 1 << 20),
    "max_connections": (1, 1 << 62),
    "max_connections_per_host": (1, 1 << 62),
}
_TIMES = (
    "connect_timeout", "handshake_timeout", "close_timeout", "keep_alive_timeout", "keep_alive"
)  # fmt: skip

DEFAULT = Config()
