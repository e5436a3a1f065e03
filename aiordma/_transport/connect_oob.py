"""Out-of-band connections, whose endpoints the two programs exchange themselves."""

from __future__ import annotations

from typing import Self

from .. import verbs
from .._core.async_only import AsyncContext
from .._core.handshake_layout import ENDPOINT_SIZE, HELLO_SIZE
from ..cm.address import Address
from ..config import Config
from ..errors import BufferStateError, ProtocolError
from ..verbs import bytes_of
from . import observation
from .auth import Security
from .connect_attempt import ConnectAttempt
from .connection import Connection
from .endpoint import AddressedEndpoint, max_rails
from .handshake import Handshake, Message

SIZE = ENDPOINT_SIZE + HELLO_SIZE


class PendingConnection(AsyncContext):
    """This side's half of a connection. Created by `prepare_connection`.

    Both sides take the same steps:

    1. Send `endpoint` to the peer over your own channel.
    2. Pass the peer's endpoint to `accept`. After that, this side can receive.
    3. Tell the peer that you have called `accept`, and wait until the peer has told you the same.
    4. Call `await start()`.

    If one side calls `start` before the peer has called `accept`, the connection may break. The end
    of an `async with` block closes a pending connection that was not started.
    """

    def __init__(
        self,
        devices: tuple[verbs.Device, ...],
        address: Address | None,
        config: Config,
        security: Security,
    ) -> None:
        self._devices = devices
        self._attempt = ConnectAttempt[AddressedEndpoint]()
        self._accepted = self._started = self._closed = False
        with self._attempt:
            self._attempt.take_over(
                AddressedEndpoint(
                    devices, config, security, address, opener="an out-of-band connection"
                ),
                Handshake("oob", security, client=True),  # until the peer's endpoint is known
                rails=max_rails(config, devices) > 1,
            )
            self._attempt.create_connection()
        self.endpoint: bytes = self._attempt.handshake.send_bytes()
        """The message for the peer: 72 bytes, including a magic number and a version."""

    def __repr__(self) -> str:
        if self._closed:
            state = "closed"
        elif self._started:
            state = "started"
        else:
            state = "accepted" if self._accepted else "new"
        return f"<PendingConnection on {self._devices[0].name}, {state}>"

    def accept(self, endpoint: bytes | bytearray | memoryview) -> None:
        """Accept the peer's endpoint. This side can receive afterwards.

        Args:
            endpoint: The bytes of the peer's `endpoint`.

        Raises:
            ProtocolError: If `endpoint` is not a valid endpoint.
            AuthenticationError: If only one side has a key, or `encrypt` differs.
            BufferStateError: If an endpoint was accepted before, or this object was closed.
        """
        if self._closed:
            raise BufferStateError(f"{self!r} is closed")
        if self._accepted:
            raise BufferStateError(f"{self!r} has already accepted its peer")
        data = bytes(bytes_of(endpoint))
        if len(data) != SIZE:
            raise ProtocolError(f"invalid endpoint: expected {SIZE} bytes, not {len(data)}")
        handshake = self._attempt.handshake
        handshake.set_role(client=self.endpoint < data)  # exactly one side must be the client
        try:
            handshake.receive(Message.OFFER, data)
            handshake.compare()
            self._attempt.connect_queue_pair(None)
        except BaseException:
            handshake.receive_again(Message.OFFER)
            raise
        self._accepted = True

    async def start(self) -> Connection:
        """Open the connection. The peer must have accepted this side's endpoint.

        With `auth`, this waits for the peer's proof of the key.

        Returns:
            The open connection.

        Raises:
            BufferStateError: If no endpoint was accepted, or this is the second call.
        """
        if self._closed:
            raise BufferStateError(f"{self!r} is closed")
        if not self._accepted:
            raise BufferStateError(f"{self!r} has not accepted a peer yet")
        if self._started:
            raise BufferStateError(f"start() has already been called on {self!r}")
        self._started = True
        try:
            with self._attempt:
                connection = await self._attempt.start(self._devices)
        except BaseException as error:
            observation.connection_failed(None, error, accepted=False)
            raise
        connection._begin(accepted=False)
        return connection

    async def close(self) -> None:
        """Give up a pending connection. A connection that was started stays open."""
        if not (self._started or self._closed):
            self._closed = True
            connection = self._attempt.connection
            self._attempt.give_up(BufferStateError("the connection was aborted"))
            await connection.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
