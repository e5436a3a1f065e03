"""A connection until its handshake has succeeded or failed, for all connection methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Self, TypeVar

from .. import verbs
from .._core import protocol
from .._core.handshake import Hello
from .._event_loop.shutdown import weak_method
from .._native.calls import shortage_hint
from ..cm.address import Address
from ..config import Config
from ..errors import ON_LOOPBACK, AuthenticationError, UnreachableError, host_port
from .auth import NOT_THE_SAME_KEY, KeyProof, Security
from .connection import Connection
from .endpoint import RailEndpoint, make_hello, max_rails
from .lifecycle import ControlChannel, Link, NoLink
from .tcp_link import TCPLink

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
    def rails(self) -> bool:
        """Whether the connection will have several rails."""
        return min(len(self.devices), max_rails(self.config, self.devices)) > 1


class ConnectAttempt(Generic[E]):
    """A connection that is being created. Each method performs one step of the handshake.

    The attempt owns the parts of the connection. If it fails, `give_up` or the end of the `with`
    block releases them.
    """

    def __init__(self, link: Link | None = None) -> None:
        self.link: Link = link or NoLink()
        self._endpoint: E | None = None
        self._connection: Connection | None = None

    def take_over(self, endpoint: E, *, in_band: bool = False, rails: bool = False) -> E:
        """Take ownership of the endpoint, and create this side's hello.

        Args:
            endpoint: The endpoint of the connection's first queue pair.
            in_band: Whether this side accepts further connections in-band.
            rails: Whether the connection may have further rails.
        """
        self._endpoint = endpoint
        self.hello: Hello = make_hello(
            endpoint.config,
            endpoint.security,
            in_band=in_band,
            rails=rails,
            max_rd_atomic=endpoint.max_rd_atomic,
            max_dest_rd_atomic=endpoint.max_dest_rd_atomic,
        )
        return endpoint

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
        self._connection = Connection(self.endpoint, self.hello)
        self._connection._on_closed = on_closed

    def post_receives(self) -> None:
        """Post the receives. Call this before the peer may send."""
        self.connection._messages.post_receives()

    @cached_property
    def control_channel(self) -> ControlChannel:
        return ControlChannel(self.connection)

    def begin_proof(self, link: TCPLink, *, client: bool) -> KeyProof:
        """Start the key proof on the socket. The peer's queue pair may still be unknown."""
        proof = self.connection._handshake.make_proof(link.send_control, client=client)
        proof.begin()
        return proof

    async def finish_proof(
        self, link: TCPLink, proof: KeyProof, peer: Hello, peer_qp_num: int
    ) -> None:
        """Finish the key proof on the socket before the queue pairs are connected.

        Raises:
            AuthenticationError: If the keys of the two sides differ.
        """
        self.connection._handshake.bind_proof(peer, peer_qp_num)
        try:
            while not proof.done.done():
                message = await link.read_control()
                if isinstance(message, protocol.Goodbye):
                    raise AuthenticationError(NOT_THE_SAME_KEY)
                proof.handle_control(message)
        except AuthenticationError as error:
            link.send_control(
                protocol.Goodbye(0, protocol.GoodbyeCode.NOT_AUTHENTICATED, str(error))
            )
            error.__traceback__ = None  # its frames refer to the proof
            raise
        finally:
            del proof  # the frames of its error refer to this frame

    async def start(
        self, peer: Hello, devices: tuple[verbs.Device, ...], *, client: bool
    ) -> Connection:
        """Start the connection, and return it. If a key is used, wait for the key proof first.

        The link must be up.

        Args:
            peer: The hello of the peer.
            devices: The devices of the rails, if the connection has several rails.
            client: Whether this is the connecting side.
        """
        connection = self.connection
        self.link.established(weak_method(connection._on_disconnected))
        await connection._start(self.link, peer, devices, client=client)
        return connection

    def give_up(self, error: BaseException) -> None:
        """Release everything after a failed handshake."""
        # Clear the attributes to avoid a reference cycle. The connection keeps the error, whose
        # traceback contains frames that refer to this object.
        link, self.link = self.link, NoLink()
        endpoint, self._endpoint = self._endpoint, None
        connection, self._connection = self._connection, None
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


def no_reply_error(address: Address, via: str, seconds: float) -> UnreachableError:
    """Return the error for a handshake that has timed out."""
    ours = f"is an aiordma listener with via={via!r} and the same kind of device running there?"
    why = shortage_hint() or f"{ours} ({ON_LOOPBACK})"
    return UnreachableError(
        f"{host_port(address)} did not finish the handshake within {seconds:g} seconds; {why}"
    )
