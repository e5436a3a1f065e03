"""A connection until its handshake is done, or has failed: common to all ways of connecting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Self, TypeVar

from .. import verbs
from .._core import protocol
from .._core.handshake import Hello
from .._loop.shutdown import weakly
from .._native.calls import shortage_hint
from ..cm.address import Address
from ..config import Config
from ..errors import ON_LOOPBACK, AuthenticationError, UnreachableError, host_port
from .auth import NOT_THE_SAME_KEY, KeyProof, Security
from .connection import Connection
from .endpoint import RailEndpoint, make_hello, most_rails
from .lifecycle import ControlChannel, Link, NoLink
from .tcp_link import TCPLink

E = TypeVar("E", bound=RailEndpoint)


@dataclass(frozen=True, slots=True)
class Target:
    """A peer to connect to, and how."""

    devices: tuple[verbs.Device, ...]
    only: tuple[str, ...] | None
    """Their names, if no other ones may be used."""
    address: Address
    source: Address | None
    config: Config
    security: Security

    @property
    def rails(self) -> bool:
        """Whether the connection is to have several rails."""
        return min(len(self.devices), most_rails(self.config, self.devices)) > 1


class ConnectAttempt(Generic[E]):
    """Owns what the connection is made of, and has its steps in their order.

    An attempt that fails is given up: by the end of its `with`, or by `give_up`.
    """

    def __init__(self, link: Link | None = None) -> None:
        self.link: Link = link or NoLink()
        self._endpoint: E | None = None
        self._connection: Connection | None = None

    def take_over(self, endpoint: E, *, in_band: bool = False, rails: bool = False) -> E:
        """Makes the hello, too.  `in_band`: this side accepts further connections in-band; `rails`:
        the connection may have further rails.
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
    def made(self) -> bool:
        return self._connection is not None

    @property
    def connection(self) -> Connection:
        assert self._connection is not None
        return self._connection

    def make(self, on_closed: Callable[[], None] | None = None) -> None:
        """Makes the connection: all of it that can be made before the peer is known.

        Calls `on_closed` when the connection has ended, or the attempt has failed.
        """
        self._connection = Connection(self.endpoint, self.hello)
        self._connection._on_closed = on_closed

    def post_receives(self) -> None:
        """Before the peer may send."""
        self.connection._messages.post_receives()

    @cached_property
    def control_channel(self) -> ControlChannel:
        return ControlChannel(self.connection)

    def begin_proof(self, link: TCPLink, *, client: bool) -> KeyProof:
        """Begins to prove the key on the socket; the peer's queue pair need not be known yet."""
        proof = self.connection._handshake.make_proof(link.send_control, client=client)
        proof.begin()
        return proof

    async def prove(self, link: TCPLink, proof: KeyProof, peer: Hello, peer_qp_num: int) -> None:
        """Has both sides prove the key on the socket, before their queue pairs are connected.

        AuthenticationError if one of them has not the same.
        """
        self.connection._handshake.bind_proof(peer, peer_qp_num)
        try:
            while not proof.done.done():
                message = await link.read_control()
                if isinstance(message, protocol.Goodbye):
                    raise AuthenticationError(NOT_THE_SAME_KEY)
                proof.control(message)
        except AuthenticationError as error:
            link.send_control(
                protocol.Goodbye(0, protocol.GoodbyeCode.NOT_AUTHENTICATED, str(error))
            )
            error.__traceback__ = None  # whose frames have the proof
            raise
        finally:
            del proof  # the frames of its error have this one

    async def start(
        self, peer: Hello, devices: tuple[verbs.Device, ...], *, client: bool
    ) -> Connection:
        """The link is up: returns the connection, once both sides have proved a key.

        `devices` are those that its rails may use, if it is to have several.
        """
        connection = self.connection
        self.link.established(weakly(connection._disconnected))
        await connection._start(self.link, peer, devices, client=client)
        return connection

    def give_up(self, error: BaseException) -> None:
        """The handshake failed: gives all of it back."""
        # The connection keeps the error, and the frames of the error keep this.
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


def unanswered(address: Address, via: str, seconds: float) -> UnreachableError:
    """The error for a handshake that was not over in time."""
    ours = f"is it an aiordma listener ({ON_LOOPBACK}), with a like device and via={via!r}?"
    why = shortage_hint() or ours
    return UnreachableError(
        f"{host_port(address)} did not finish the handshake within {seconds:g} seconds; {why}"
    )
