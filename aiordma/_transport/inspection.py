"""The last step of a handshake, in which the listener's application accepts or refuses the request.

The messages are the same for all connection methods::

    connecting side -> listener   ConnectData (data of its user)
    listener -> connecting side   ConnectAccepted; or Goodbye (REJECTED, the reason)

This module is the listener's side. The connecting side is `send_request_data` in
connect_attempt.py.

This step follows the key proof, so that the application sees only authenticated peers. It takes
place only if the listener's hello announces it. The peer must not send messages or memory requests
before the step has completed.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from .._core import protocol
from .._core.fields import MAX_DATA
from .._event_loop.shutdown import UNWINDING
from ..cm.address import Address
from ..errors import LimitError
from ..verbs import bytes_of
from .connection import Connection
from .handshake import Action

ConnectionMethod = Literal["cm", "tcp", "in-band"]


@dataclass(frozen=True, slots=True)
class ConnectionRequest:
    """A request for a connection, as passed to `on_request` of a listener."""

    peer_address: Address | None
    """The (host, port) of the peer."""
    data: bytes
    """The data that the peer passed to `connect(data=...)`: at most 64 bytes, b"" by default.

    Validate the data. Without `auth`, the data can come from any host.
    """
    via: ConnectionMethod
    """The connection method: "cm", "tcp" or "in-band".

    "in-band" means that the request arrived over an existing connection with `via="tcp"`.
    """
    device: str
    """The name of the device that carries the connection."""


OnRequest = Callable[[ConnectionRequest], str | Awaitable[str | None] | None]


def check_data(data: bytes) -> bytes:
    """Return `data` as bytes. Raises LimitError if it is too long."""
    packed = bytes(bytes_of(data))
    if len(packed) > MAX_DATA:
        raise LimitError(
            f"data must be at most {MAX_DATA} bytes long, not {len(packed)}; send longer data over "
            "the connection",
            amount=len(packed),
            limit=MAX_DATA,
        )
    return packed


async def inspect_connection(
    connection: Connection, via: ConnectionMethod, on_request: OnRequest, deadline: float
) -> bool:
    """Let the listener's application accept or refuse the connection, and tell the peer.

    A refused connection is closed. Errors caused by the peer are raised.

    Args:
        connection: The connection from the peer.
        via: The connection method.
        on_request: The application's function.
        deadline: The time limit for the peer's data and the application's decision, in loop time.

    Returns:
        Whether the application has accepted the connection.
    """
    handshake = connection._handshake
    try:
        async with asyncio.timeout_at(deadline) as timeout:
            while handshake.next_step.kind is not Action.INSPECT:
                await connection._wait_for_handshake()
            data = connection._request_data = handshake.request_data
            refusal = await _call_on_request(
                on_request, ConnectionRequest(connection.peer_address, data, via, connection.device)
            )
        expired = timeout.expired()
        del timeout  # it refers to the task, which refers to its cancellation error
        if expired:  # the application has ignored the cancellation
            raise TimeoutError
    except TimeoutError:
        refusal = "the on_request function of the listener did not return in time"
    except BaseException:
        connection.abort()
        raise
    if refusal is None:
        connection._messages.awaiting_admission = False
        handshake.done(Action.INSPECT)
        connection._continue_handshake()
        return True
    await refuse(connection, refusal)
    return False


async def refuse(connection: Connection, reason: str) -> None:
    """Close a connection before the user receives it, and tell the peer the reason."""
    code = protocol.GoodbyeCode.REJECTED
    await connection._close(protocol.Goodbye(0, code, reason))


async def _call_on_request(on_request: OnRequest, request: ConnectionRequest) -> str | None:
    """Call `on_request`. Returns the reason if it refuses or fails, or None if it accepts."""
    try:
        verdict = on_request(request)
        if inspect.isawaitable(verdict):
            verdict = await verdict
        if verdict is None or isinstance(verdict, str):
            return verdict
        raise TypeError(
            f"on_request must return None or a str that explains the refusal, not {verdict!r:.80}"
        )
    except UNWINDING:
        raise
    except BaseException as error:
        asyncio.get_running_loop().call_exception_handler(
            {"message": f"on_request failed for {request!r}", "exception": error}
        )
        return "the on_request function of the listener failed"
