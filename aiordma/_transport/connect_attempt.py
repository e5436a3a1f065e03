"""A connection until its handshake has succeeded or failed, for all connection methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Self, TypeVar

from .. import verbs
from .._core.connection_states import LifecycleEvent
from .._event_loop.shutdown import weak_method
from .._native.calls import shortage_hint
from ..cm.address import Address
from ..config import Config
from ..errors import ON_LOOPBACK, UnreachableError, host_port
from .auth import Security
from .connection import Connection
from .endpoint import AddressedEndpoint, RailEndpoint, make_hello, max_rails
from .handshake import Action, Handshake
from .lifecycle import ControlChannel, Link, NoLink

E = TypeVar("E", bound=RailEndpoint)


@dataclass(frozen=True, slots=True)
class Target:
    """The peer to connect to, and the options of the connection."""

    devices: tuple[verbs.Device, ...]
    allowed_devices: tuple[str, ...] | None
    """The names of the only devices that may be used, or None for any."""
    address: Address
    source: Address | None
    config: Config
    security: Security

    @property
    def opener(self) -> str:
        """The connection, as described in warnings about devices that it has opened."""
        return f"the connection to {host_port(self.address)}"

    @property
    def will_use_rails(self) -> bool:
        """Whether the connection will have several rails, each on a device of its own."""
        return min(len(self.devices), max_rails(self.config, self.devices)) > 1


class ConnectAttempt(Generic[E]):
    """A connection that is being created. Each method performs one step of the handshake.

    The attempt owns the parts of the connection. If it fails, `give_up` or the end of the `with`
    block releases them.
    """

    def __init__(self, link: Link | None = None) -> None:
        self.link: Link = link or NoLink()
        self.handshake: Handshake
        self._endpoint: E | None = None
        self._connection: Connection | None = None

    def take_over(
        self, endpoint: E, handshake: Handshake, *, in_band: bool = False, rails: bool = False
    ) -> None:
        """Take ownership of the endpoint, and create this side's hello for the handshake.

        Args:
            endpoint: The endpoint of the connection's first queue pair.
            handshake: The handshake, whose next step is CREATE.
            in_band: Whether this side accepts further connections in-band.
            rails: Whether the connection may have further rails.
        """
        self._endpoint, self.handshake = endpoint, handshake
        hello = make_hello(
            endpoint.config,
            endpoint.security,
            in_band=in_band,
            rails=rails,
            max_rd_atomic=endpoint.max_rd_atomic,
            max_dest_rd_atomic=endpoint.max_dest_rd_atomic,
        )
        assert endpoint.qp is not None
        handshake.created(hello, endpoint.packed(hello), endpoint.qp.qp_num)

    @property
    def endpoint(self) -> E:
        assert self._endpoint is not None
        return self._endpoint

    @property
    def has_connection(self) -> bool:
        return self._connection is not None

    @property
    def connection(self) -> Connection:
        assert self._connection is not None
        return self._connection

    def create_connection(self, on_closed: Callable[[], None] | None = None) -> None:
        """Create the connection, except for the parts that depend on the peer.

        `on_closed` is called when the connection has ended or the attempt has failed.
        """
        self._connection = Connection(self.endpoint, self.handshake)
        self._connection._on_closed = on_closed

    def post_receives(self) -> None:
        """Post the receives. Call this before the peer may send."""
        self.connection._messages.post_receives()

    def connect_queue_pair(
        self: ConnectAttempt[AddressedEndpoint], address: Address | None
    ) -> None:
        """Connect the queue pair to the peer at `address`, and post the receives.

        Raises:
            ProtocolError: If the peer's endpoint is invalid, or its address is not `address`.
            RDMAError: If the queue pair cannot be connected.
        """
        handshake = self.handshake
        self.endpoint.connect_qp(
            handshake.remote, address, peer_authenticated=handshake.peer_authenticated
        )
        self.post_receives()
        handshake.done(Action.CONNECT)

    def connected_by_cm(self) -> None:
        """Continue after the connection manager has connected the queue pair.

        It has also enabled remote access, but the peer may not have proved the key yet.
        """
        if not self.handshake.peer_authenticated:
            self.endpoint.withhold_rights()
        self.handshake.done(Action.CONNECT)

    @cached_property
    def control_channel(self) -> ControlChannel:
        return ControlChannel(self.connection)

    async def start(self, devices: tuple[verbs.Device, ...]) -> Connection:
        """Start the connection, and return it. If a key is used, wait for the key proof first.

        The link must be up.

        Args:
            devices: The devices of the rails, if the connection has several rails.
        """
        connection, handshake = self.connection, self.handshake
        self.link.established(weak_method(connection._on_disconnected))
        connection._take_link(self.link)
        connection._create_peer_parts(devices)
        handshake.done(Action.START)  # before the frames that have arrived are processed
        # The next state is OPEN, or AUTHENTICATING if the peer must still prove the key.
        proved = handshake.peer_authenticated
        connection._advance(LifecycleEvent.ESTABLISHED if proved else LifecycleEvent.KEY_REQUIRED)
        connection._start_messages()
        while connection._messages.awaiting_auth:
            await connection._wait_for_handshake()
        return connection

    def give_up(self, error: BaseException) -> None:
        """Release everything after a failed handshake."""
        # Clear the attributes to avoid a reference cycle. The connection keeps the error, whose
        # traceback contains frames that refer to this object.
        link, self.link = self.link, NoLink()
        endpoint, self._endpoint = self._endpoint, None
        connection, self._connection = self._connection, None
        if endpoint is not None:
            self.handshake.exchange = None  # the private key must not outlive the attempt
        if connection is not None:
            connection._give_up(link, error)
            return
        try:
            if endpoint is not None:
                endpoint.close()
        finally:
            link.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.give_up(error)


async def send_request_data(connection: Connection, data: bytes) -> Connection:
    """Send `data` to the listener's application, and wait until it accepts the connection.

    Returns immediately if the listener does not inspect connections.

    Raises:
        RejectedError: If the application refuses the connection. The message contains its reason.
    """
    handshake = connection._handshake
    if not handshake.is_inspected:
        return connection
    try:
        handshake.request_data = data
        handshake.done(Action.INSPECT)
        connection._continue_handshake()
        while handshake.next_step.kind is not Action.END:
            await connection._wait_for_handshake()
    except BaseException:
        connection.abort()
        raise
    return connection


def no_reply_error(address: Address, via: str, seconds: float) -> UnreachableError:
    """Return the error for a handshake that has timed out."""
    question = f"is an aiordma listener with via={via!r} and the same kind of device running there?"
    why = shortage_hint() or f"{question} ({ON_LOOPBACK})"
    return UnreachableError(
        f"{host_port(address)} did not finish the handshake within {seconds:g} seconds; {why}"
    )
