"""The settings of a connection (`Config`) and of an event loop (`LoopConfig`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from ._core.arguments import choice, integer, seconds, truth
from ._core.region import Rights
from ._core.timers import ack_seconds

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

Encrypt = bool | Literal["messages"]
"""The values accepted by `encrypt=`."""


T = TypeVar("T")


class _Check(NamedTuple):
    """How to convert and check the value of a field."""

    name: str
    convert: Callable[[str, object], Any]
    is_optional: bool
    """Whether the value may be None."""
    limits: tuple[float, float] | None


def _ranged(default: T, low: float, high: float) -> T:
    """Create a dataclass field whose value must be between `low` and `high`."""
    return field(default=default, metadata={"range": (low, high)})


class _Settings:
    """The base class of settings, which are converted and checked when they are created."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    _checks: ClassVar[list[_Check]]

    def __repr__(self) -> str:
        given = [
            f"{it.name}={value!r}"
            for it in fields(self)
            if (value := getattr(self, it.name)) != it.default
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    def __post_init__(self) -> None:
        for name, convert, is_optional, limits in self._checks:
            value = getattr(self, name)
            if value is None and is_optional:
                continue
            setting = f"{type(self).__name__}.{name}"
            value = convert(setting, value)
            object.__setattr__(self, name, value)
            if limits is not None and not limits[0] <= value <= limits[1]:
                low, high = limits
                raise ValueError(f"{setting} must be between {low} and {high}, not {value}")
            if limits is None and isinstance(value, float) and not value > 0:
                raise ValueError(f"{setting} must be a positive number of seconds, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LoopConfig(_Settings):
    """Event loop settings. Pass them to `configure_loop` before the loop's first connection.

    They apply to each device that the event loop opens. All connections that use the same event
    loop and device share one memory pool and are polled together. Sizes are in bytes, and times are
    in seconds.
    """

    pool_limit: int = _ranged(4 * GIB, MIB, 1 << 62)
    """The maximum amount of registered memory in the pool of each device."""
    huge_pages: bool = False
    """Whether to allocate the pool on huge pages reserved by the system (`nr_hugepages`).

    If too few huge pages are free, a message is logged, and transparent huge pages are requested
    from the kernel instead.
    """
    cached_registrations: int = _ranged(64, 0, 1 << 20)
    """The number of registrations of user memory to cache. 0 disables the cache.

    While the user holds a memoryview of the memory, its registration is kept for the next
    operation. The least recently used registrations are dropped when the cache is full, or when
    they cover more than 256 MiB together.
    """
    polling: float = _ranged(200e-6, 0, 1)
    """The maximum time the event loop polls for a completion before it sleeps.

    The loop keeps polling only as long as it finds completions (adaptive polling). With 0, the loop
    sleeps immediately. A task waiting for a completion first polls for a few microseconds on its
    own. The default is about the wake-up time of a slow machine.
    """


def _as_in_loop_config(name: str) -> Any:
    """Create a field that is None by default, and otherwise checked as the LoopConfig setting."""
    return field(default=None, metadata=LoopConfig.__dataclass_fields__[name].metadata)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Config(_Settings):
    """Connection settings. Sizes are in bytes, and times are in seconds.

    Each side has its own settings, and sends the relevant settings to the peer during the
    handshake. A connection's receive buffers use `(data_receives + control_receives) * eager_size`
    bytes of registered memory. Its send buffers use up to `send_queue * eager_size` bytes. While
    messages longer than `eager_size` are being exchanged, each send or receive buffer can grow to
    `max_eager_size` bytes.
    """

    eager_size: int = _ranged(8 * KIB, KIB, GIB)
    """The size of each receive buffer.

    Longer messages are sent by rendezvous. The sender announces a message, and the receiver reads
    the message from the sender's memory.
    """
    max_eager_size: int = _ranged(128 * KIB, KIB, GIB)
    """The size to which receive buffers can grow.

    Receive buffers grow if the peer sends messages that need a larger buffer but fit into this
    size. Receive buffers do not grow if `max_eager_size` is at most `eager_size`, or if less than
    half of the memory pool would remain free.
    """
    data_receives: int = _ranged(24, 1, 0xFFFF)
    """The number of message frames the peer may send before this program consumes one.

    These are the data credits used for flow control. Small messages sent together share a frame.
    """
    control_receives: int = _ranged(8, 4, 0xFF)
    """The number of receives reserved for control messages. It must be at least 4."""
    send_queue: int = _ranged(64, 8, 0xFFFF)
    """The maximum number of outstanding work requests on this side.

    A few internal requests do not count. Further requests wait in a queue.
    """
    max_message: int = _ranged(GIB, 0, 1 << 62)
    """The maximum length of a message that this side accepts."""
    fetch_ahead: int = _ranged(32 * MIB, 0, 1 << 62)
    """The number of bytes of rendezvous messages to read before the program calls `recv`."""
    lend_quota: int = _ranged(64 * MIB, 0, 1 << 62)
    """The total amount of memory to lend to the peer through `request_region`.

    Memory handed over by the peer counts until `recv_buffer` takes it.
    """
    max_regions: int = _ranged(256, 1, 1 << 20)
    """The maximum number of regions the peer may share or borrow at a time."""
    lease: float | None = _ranged(60.0, 0.001, 4294967)
    """The default lease for shared or borrowed memory, in seconds.

    None means no time limit: the lease lasts as long as the connection. A call's `lease=` argument
    overrides the default.
    """
    max_lease: float | None = _ranged(None, 0.001, 4294967)
    """The longest lease the peer can get when borrowing memory or renewing a lease.

    If the peer asks for a longer or unlimited lease, the peer gets this lease instead. None means
    no maximum.
    """
    max_rights: Rights = Rights.READ | Rights.WRITE | Rights.ATOMIC
    """The rights the peer may request when borrowing memory. Other rights are refused."""
    pool_limit: int | None = _as_in_loop_config("pool_limit")
    """The value of `LoopConfig.pool_limit`, if this connection opens the device.

    The settings in `LoopConfig` belong to the event loop, not to a connection. A value in `Config`
    therefore takes effect only if the program has not called `configure_loop`, and no other
    connection of the event loop is using the device. Otherwise, a RuntimeWarning reports the value
    in effect, unless it is the same. None accepts any value.
    """
    huge_pages: bool | None = _as_in_loop_config("huge_pages")
    """The value of `LoopConfig.huge_pages`, with the same limitations as `pool_limit`."""
    cached_registrations: int | None = _as_in_loop_config("cached_registrations")
    """The value of `LoopConfig.cached_registrations`, with the same limitations as `pool_limit`."""
    polling: float | None = _as_in_loop_config("polling")
    """The value of `LoopConfig.polling`, with the same limitations as `pool_limit`."""
    connect_timeout: float = 10.0
    """The maximum time from calling `connect` until the peer has completed the handshake."""
    handshake_timeout: float = 10.0
    """The time an accepted peer has to complete its handshake.

    With `via="tcp"`, an accepted socket that sends nothing is closed after a fifth of this time.
    The connection manager has its own time limit.
    """
    max_handshakes: int = _ranged(256, 1, 1 << 20)
    """The maximum number of handshakes a listener handles at a time.

    The same limit applies separately to requests over existing connections, and to sockets that
    have not sent anything yet. If another peer arrives when a limit has been reached, a random peer
    is dropped. If one network accounts for more than an eighth of the peers, the dropped peer is
    chosen from the network with the most peers. Each limit is capped at an eighth of the file
    descriptors the process may open.
    """
    max_connections: int | None = _ranged(None, 1, 1 << 62)
    """The maximum number of connections to a listener, including handshakes in progress.

    With `auth`, only peers that have proved that they know the key count. Further peers are
    rejected, and their RejectedError contains the reason. None means no limit.
    """
    max_connections_per_host: int | None = _ranged(None, 1, 1 << 62)
    """The maximum number of connections from one host, counted like `max_connections`.

    A host is an IPv4 address or an IPv6 /64 network.
    """
    in_band: bool = True
    """Whether to open and accept further connections over an existing one.

    This is faster than another TCP bootstrap. It applies to connections to the same address and
    port with `via="tcp"` and without TLS. These connections share the socket and the addresses of
    the first one. With False, each connection has its own socket, which is required behind a load
    balancer.
    """
    allow_other_addresses: bool = False
    """Whether the embedded device may connect to an address other than the peer's socket address.

    With `via="tcp"`, this is required if the peer is behind address translation or a load balancer.
    Use it only for trusted peers, because they can make this side connect to any address.
    """
    max_rails: int | None = _ranged(None, 1, 8)
    """The maximum number of rails per connection. Rails are queue pairs on several devices.

    None means one rail per device specified in this side's `device=`, or a single rail if none is
    specified. If there are more rails than devices on one side, that side uses its devices more
    than once.
    """
    keep_alive: float | None = 15.0
    """The idle time after which the peer's device is probed. None disables probing."""
    keep_alive_timeout: float = 30.0
    """The time the peer's device has to respond before the connection breaks.

    With several rails, the timeout also limits how long writes wait for the peer to confirm that it
    has stopped using a rail.
    """
    close_timeout: float = 2.0
    """The time `close` waits for outstanding operations before aborting them."""
    retry_count: int = _ranged(6, 0, 7)
    """The number of times, 0 to 7, to retransmit an unacknowledged packet.

    The connection breaks after the last retransmission fails. Do not use 7 with rdma_rxe, which
    interprets it as unlimited.
    """
    ack_timeout: float = _ranged(0.067, 8.2e-6, 8796)
    """The time after which an unacknowledged packet is retransmitted.

    The device rounds it up to 4.096 us times a power of 2. A dead path is detected after
    `ack_timeout * (retry_count + 1)`, or up to four times that. Integers from 1 to 31 are rejected,
    because they look like the encoded values used by C programs.
    """
    type_of_service: int = _ranged(0, 0, 0xFF)
    """The type of service (IPv4) or traffic class (IPv6) for packets, 0 to 255.

    The embedded device uses this value for RoCE v2 packets and, with the connection manager, for
    TCP connections.
    """
    path_mtu: int | None = None
    """The maximum packet payload: 256, 512, 1024, 2048 or 4096 bytes (`via="tcp"`).

    None means the active MTU of the ports. The smaller of the two sides' values applies.
    """
    gid_index: int | None = _ranged(None, 0, 0xFFFF)
    """The index of the local GID, as listed by `aiordma devinfo` (`via="tcp"`).

    None means the GID that belongs to the local address. The local GID must be able to reach the
    peer's GID.
    """
    pkey: int | None = _ranged(None, 1, 0xFFFF)
    """The partition, as a P_Key of the port (`via="tcp"`). None means the port's first P_Key."""
    hop_limit: int | None = _ranged(None, 0, 0xFF)
    """The maximum number of router hops, 0 to 255 (`via="tcp"`). None means 64."""
    service_level: int | None = _ranged(None, 0, 15)
    """The InfiniBand service level, or the RoCE priority, 0 to 15 (`via="tcp"`). None means 0."""

    def __post_init__(self) -> None:
        _Settings.__post_init__(self)
        if self.path_mtu not in (None, *_MTUS):
            raise ValueError(f"Config.path_mtu must be one of {_MTUS}, not {self.path_mtu}")


_CONVERSIONS: dict[str, Callable[[str, object], Any]] = {
    "bool": truth,
    "int": partial(integer, low=None, high=None),
    "float": seconds,
    "Rights": partial(choice, kind=Rights),
}
"""The function that converts a value, by the annotation of its field."""


def _check_of(setting: Field[Any]) -> _Check:
    annotation = str(setting.type)
    kind = annotation.removesuffix(" | None")
    return _Check(
        setting.name,
        ack_seconds if setting.name == "ack_timeout" else _CONVERSIONS[kind],
        is_optional=kind != annotation,
        limits=setting.metadata.get("range"),
    )


_MTUS = (256, 512, 1024, 2048, 4096)

LoopConfig._checks = [_check_of(it) for it in fields(LoopConfig)]
Config._checks = [_check_of(it) for it in fields(Config)]

DEFAULT = Config()
