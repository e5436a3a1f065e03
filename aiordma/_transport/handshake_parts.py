"""The parts of a connection that are needed only during its handshake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from .._core import protocol
from .._core.handshake import Hello
from .._datapath.sealing import Sealing
from ..errors import ProtocolError
from .auth import KeyProof, Security

if TYPE_CHECKING:
    from .encryption import KeyExchange


class Inspection:
    """A slot for the peer's message in the last step of a handshake (inspection.py)."""

    def __init__(self, *, client: bool) -> None:
        self._expected_type = protocol.ConnectAccepted if client else protocol.ConnectData
        self._arrival: asyncio.Future[protocol.Message | None]
        self._arrival = asyncio.get_running_loop().create_future()
        self._make_error: Callable[[], BaseException] | None = None

    def handle_control(self, message: protocol.Message) -> None:
        """Store the peer's message. Raises ProtocolError if it is unexpected or a duplicate."""
        if self._arrival.done() or not isinstance(message, self._expected_type):
            raise ProtocolError(f"the peer sent an unexpected {type(message).__name__}")
        self._arrival.set_result(message)

    def end(self, make_error: Callable[[], BaseException]) -> None:
        """Make `message` raise the error from `make_error`, unless the message has arrived.

        The future does not store an exception, because the traceback could refer to the connection.
        """
        if not self._arrival.done():
            self._make_error = make_error
            self._arrival.set_result(None)

    async def message(self) -> protocol.Message:
        """Wait for the message. Raises the connection's error if the connection ends first."""
        message = await self._arrival
        if message is None:
            assert self._make_error is not None
            raise self._make_error()
        return message


class HandshakeParts:
    """The state of a handshake: both hellos, the key exchange, the key proof and the inspection."""

    def __init__(self, security: Security, hello: Hello, qp_num: int) -> None:
        self.hello = hello
        """The hello of this side."""
        self.peer: Hello | None = None
        self.proof: KeyProof | None = None
        self.exchange: KeyExchange | None = None
        self.inspection: Inspection | None = None
        self._security = security
        self._qp_num = qp_num

    def new_sealing(self) -> Sealing:
        """Create the encryption state of the connection. The key proof later provides the keys."""
        from . import encryption  # noqa: PLC0415 - it needs a package

        sealing = encryption.new_sealing(memory_in_clear=self._security.memory_in_clear)
        self.exchange = encryption.KeyExchange(sealing)
        return sealing

    def make_proof(self, send: Callable[[protocol.Message], None], *, client: bool) -> KeyProof:
        """Create this side's key proof, which sends its messages with `send`."""
        key = self._security.auth
        assert key is not None
        self.proof = KeyProof(key, send, client=client, exchange=self.exchange)
        return self.proof

    def bind_proof(self, peer: Hello, peer_qp_num: int) -> None:
        assert self.proof is not None
        self.proof.bind((self.hello, peer), (self._qp_num, peer_qp_num))

    def end(self, make_error: Callable[[], BaseException]) -> None:
        """Fail each waiter with a new error, because the connection has ended."""
        if self.proof is not None and not self.proof.done.done():
            self.proof.done.set_exception(make_error())
            self.proof.done.exception()  # mark it as retrieved, because nothing may await it
        if self.inspection is not None:
            self.inspection.end(make_error)
