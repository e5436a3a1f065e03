"""The parts of a connection that its handshake alone needs."""

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
    """The wait of a handshake's last step (inspection.py): for data, or for the acceptance."""

    def __init__(self, *, client: bool) -> None:
        self._awaited = protocol.ConnectAccepted if client else protocol.ConnectData
        self._came: asyncio.Future[protocol.Message | None]
        self._came = asyncio.get_running_loop().create_future()
        self._error: Callable[[], BaseException] | None = None

    def control(self, message: protocol.Message) -> None:
        """ProtocolError for the other message, or for a second one."""
        if self._came.done() or not isinstance(message, self._awaited):
            raise ProtocolError(f"the peer sent a {type(message).__name__}, unexpected here")
        self._came.set_result(message)

    def end(self, error: Callable[[], BaseException]) -> None:
        """Has `message` raise an error: a new one, whose frames may have the connection."""
        if not self._came.done():
            self._error = error
            self._came.set_result(None)

    async def message(self) -> protocol.Message:
        """Raises what the connection has ended with."""
        message = await self._came
        if message is None:
            assert self._error is not None
            raise self._error()
        return message


class HandshakeParts:
    """Both hellos, and the steps of a handshake that prove the key and ask the application."""

    def __init__(self, security: Security, hello: Hello, qp_num: int) -> None:
        self.hello = hello
        """This side's."""
        self.peer: Hello | None = None
        self.proof: KeyProof | None = None
        self.exchange: KeyExchange | None = None
        self.inspection: Inspection | None = None
        self._security = security
        self._qp_num = qp_num

    def new_sealing(self) -> Sealing:
        """The encryption of the connection; the proof of the key agrees on its keys."""
        from . import encryption  # noqa: PLC0415 - it needs a package

        sealing = encryption.new_sealing(memory_in_clear=self._security.memory_in_clear)
        self.exchange = encryption.KeyExchange(sealing)
        return sealing

    def make_proof(self, send: Callable[[protocol.Message], None], *, client: bool) -> KeyProof:
        """This side's part of the proof of the key; `send` takes its messages to the peer."""
        key = self._security.auth
        assert key is not None
        self.proof = KeyProof(key, send, client=client, exchange=self.exchange)
        return self.proof

    def bind_proof(self, peer: Hello, peer_qp_num: int) -> None:
        assert self.proof is not None
        self.proof.bind((self.hello, peer), (self._qp_num, peer_qp_num))

    def end(self, error: Callable[[], BaseException]) -> None:
        """The connection has ended: each waiter for the peer here gets an error of its own."""
        if self.proof is not None and not self.proof.done.done():
            self.proof.done.set_exception(error())
            self.proof.done.exception()  # retrieved, also if it is not awaited yet
        if self.inspection is not None:
            self.inspection.end(error)
