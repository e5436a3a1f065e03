"""A connection until its handshake is done, or has failed: common to all ways of connecting."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Generic, TypeVar

from .._core.handshake import Hello
from .connection import Connection
from .endpoint import LocalEndpoint
from .lifecycle import ControlChannel, Link, weakly

E = TypeVar("E", bound=LocalEndpoint)


class ConnectAttempt(Generic[E]):
    """`make` makes the connection, `start` ends the handshake; a failed attempt is given up."""

    def __init__(self, endpoint: E) -> None:
        """Takes over `endpoint`."""
        self.endpoint = endpoint
        self._connection: Connection | None = None

    @property
    def connection(self) -> Connection:
        assert self._connection is not None
        return self._connection

    def make(self) -> None:
        """Makes the connection: all of it that can be made before the peer is known."""
        self._connection = Connection(self.endpoint)

    def post_receives(self) -> None:
        """Before the peer may send."""
        self.connection._post_receives()

    def on_closed(self, callback: Callable[[], None]) -> None:
        """Calls it when the connection has ended, or the attempt has failed."""
        self.connection._on_closed = callback

    @property
    def on_disconnect(self) -> Callable[[str], None]:
        """For the link, which calls it with the reason.  It does not keep the connection alive."""
        return weakly(self.connection._disconnected)

    @cached_property
    def control_channel(self) -> ControlChannel:
        return ControlChannel(self.connection)

    async def start(self, link: Link, peer: Hello, *, client: bool) -> Connection:
        """The link is up: returns the connection, once both sides have proved a key."""
        connection = self.connection
        await connection._start(link, peer, client=client)
        return connection

    def give_up(self, link: Link, error: BaseException) -> None:
        """The handshake failed: gives all of it back, and `link` with it."""
        if self._connection is not None:
            self._connection._give_up(link, error)
        else:
            self.endpoint.close()
            link.release()
