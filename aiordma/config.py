"""The limits of a connection: what a peer may make this process do, and the memory it costs."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How a connection is set up.  Sizes in bytes, times in seconds.

    Each side has its own; what the other must know travels in the handshake.  A connection costs
    `(data_receives + control_receives) * eager_size` of registered memory for its receives, and
    at most `send_queue * eager_size` for messages on their way out; `max_eager_size` instead while
    messages of that size travel.
    """

    eager_size: int = 8 * KIB
    """Size of a receive: a message that does not fit is fetched by the receiver instead."""
    max_eager_size: int = 128 * KIB
    """Size that the receives grow to while the peer sends messages that would fit these; never
    where that is no more than `eager_size`, or would leave less than half of the pool."""
    data_receives: int = 24
    """Frames of messages that may be under way to this side before it has taken one; small messages
    that are sent together share a frame."""
    control_receives: int = 8
    """Receives kept for control messages; at least 4."""
    send_queue: int = 64
    """Work requests that may be under way from this side, besides a few of its own; what is more
    waits its turn."""
    max_message: int = GIB
    """The longest message that this side accepts."""
    fetch_ahead: int = 32 * MIB
    """Bytes of large messages that are fetched before `recv` asks for them."""
    lend_quota: int = 64 * MIB
    """Memory that this side lends to the peer's `request_region`, in all; what the peer has handed
    over counts until `recv_buffer` takes it."""
    max_regions: int = 256
    """Regions the peer may have shared with this side, or borrowed from it, at a time."""
    pool_limit: int = 4 * GIB
    """Registered memory of the pool, shared by all connections of the event loop and device;
    the first connection's value counts."""
    cached_registrations: int = 64
    """Registrations of the user's own memory that are kept for its next operation, where a
    memoryview of the user's keeps that memory in its place; 0: none.  Shared as `pool_limit` is."""
    cached_bytes: int = 256 * MIB
    """How much memory these may cover; those that are longest unused go first."""
    polling: float = 200e-6
    """For how long the event loop looks for the next completion before it sleeps, at most: less
    where a wake-up takes less, and only while such looks find something; 0: it sleeps at once.
    A task that is about to wait looks for a few microseconds of that itself.  Shared as
    `pool_limit` is."""
    connect_timeout: float = 10.0
    """From `connect` until the peer has answered the handshake."""
    handshake_timeout: float = 10.0
    """How long a peer that has knocked may take to finish its handshake."""
    max_handshakes: int = 256
    """Handshakes under way at a listener at a time; further peers wait or are turned away."""
    max_connections: int | None = None
    """Connections of a listener at a time, those in their handshake included; further peers are
    turned away and told why (RejectedError).  A place is free again when its connection has ended,
    in whatever way.  None: as many as come."""
    max_connections_per_host: int | None = None
    """The same for the peers of one address."""
    in_band: bool = True
    """Whether a further connection to the same address and port is asked for over one that is
    there, or taken from who asks so (`via="tcp"` without TLS), which is quicker than an exchange on
    a socket of its own: both then share the first one's socket, and so its addresses.  False where
    each shall find a server anew, as behind a balancer of loads."""
    keep_alive: float | None = 15.0
    """After so long without a sign of the peer its device is asked for one; None: never."""
    keep_alive_timeout: float = 30.0
    """How long it may take to answer before the connection counts as broken."""
    close_timeout: float = 2.0
    """How long `close` waits for work under way before it gives it up."""

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"Config.{name} must be within {low} and {high}")
        if not 0 <= self.polling <= 1:
            raise ValueError("Config.polling must be within 0 and 1 second")
        for name in _TIMES:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"Config.{name} must be more than 0 seconds")


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
