"""The last step of a handshake: the listener's application sees the request, and may refuse it.

    connecting side -> listener   ConnectData (data of its user)
    listener -> connecting side   ConnectAccepted; or Goodbye (REJECTED, the reason)

It comes after the proof of the key, so the application sees no stranger, and its messages are the
same with every way of connecting.  Only a listener that inspects requests has it, as its hello
says.  Until it is over the peer may send no message, and no request for memory.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from .._core import protocol
from .._core.fields import MAX_DATA
from .._loop.shutdown import UNWINDING
from ..cm.address import Address
from ..errors import LimitError
from ..verbs import bytes_of
from .connection import Connection

Way = Literal["cm", "tcp", "in-band"]


@dataclass(frozen=True, slots=True)
class ConnectionRequest:
    """A peer that wants a connection, as `on_request` of a listener gets it."""

    peer_address: Address | None
    """(host, port) of the peer."""
    data: bytes
    """Data of the peer's `connect(data=...)`: at most 64 bytes, b"" without.  Check it: with `auth`
    it comes from a peer that has the key, else from any host."""
    via: Way
    """The way of connecting: "cm", "tcp", or "in-band", over an earlier connection of via="tcp"."""
    device: str
    """The name of the device that carries the connection."""


OnRequest = Callable[[ConnectionRequest], str | Awaitable[str | None] | None]


def check_data(data: bytes) -> bytes:
    """LimitError for more than fits."""
    packed = bytes(bytes_of(data))
    if len(packed) > MAX_DATA:
        raise LimitError(
            f"{len(packed)} bytes of data; connect carries at most {MAX_DATA}: send the rest once "
            "connected",
            amount=len(packed),
            limit=MAX_DATA,
        )
    return packed


async def introduce(connection: Connection, data: bytes) -> Connection:
    """The connecting side: returns the connection once the listener's application has taken it.

    RejectedError with its reason otherwise.
    """
    if connection._handshake.inspection is None:
        return connection
    try:
        connection._messages.controls.send(protocol.ConnectData(0, data))
        await connection._handshake.inspection.message()
    except BaseException:
        connection.abort()
        raise
    return connection


async def admits(connection: Connection, via: Way, on_request: OnRequest, limit: float) -> bool:
    """The listener's side: whether the application takes the connection; the peer is told.

    A connection that it does not take is closed.  `limit` is the loop's time until which the peer
    must have sent its data, and the application decided.  Raises if the peer fails.
    """
    try:
        async with asyncio.timeout_at(limit) as deadline:
            assert connection._handshake.inspection is not None
            message = await connection._handshake.inspection.message()
            assert isinstance(message, protocol.ConnectData)
            connection._request_data = message.data
            refusal = await _decide(
                on_request,
                ConnectionRequest(connection.peer_address, message.data, via, connection.device),
            )
        expired = deadline.expired()
        del deadline  # it refers to the task, and that to the error that cancels it
        if expired:  # and the application has gone on all the same
            raise TimeoutError
    except TimeoutError:
        refusal = "the listener did not decide in time"
    except BaseException:
        connection.abort()
        raise
    if refusal is None:
        connection._messages.awaiting_admission = False
        connection._messages.controls.send(protocol.ConnectAccepted(0))
        return True
    await refuse(connection, refusal)
    return False


async def refuse(connection: Connection, reason: str) -> None:
    """Closes a connection that was not delivered; the peer is told."""
    code = protocol.GoodbyeCode.REJECTED
    await connection._close(protocol.Goodbye(0, code, reason))


async def _decide(on_request: OnRequest, request: ConnectionRequest) -> str | None:
    """The reason of a refusal, or None.  A failure of the application is reported, and refuses."""
    try:
        verdict = on_request(request)
        if inspect.isawaitable(verdict):
            verdict = await verdict
        if verdict is None or isinstance(verdict, str):
            return verdict
        raise TypeError(
            f"on_request returns None, or the reason of a refusal as str, not {verdict!r:.80}"
        )
    except UNWINDING:
        raise
    except BaseException as error:
        asyncio.get_running_loop().call_exception_handler(
            {"message": f"on_request failed for {request!r}", "exception": error}
        )
        return "the listener's application failed to decide"
