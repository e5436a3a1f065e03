"""Automatic reconnection with exponential backoff."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from typing import Unpack

from ._core.arguments import integer, seconds
from ._options import CONNECT, ConnectOptions, complete, shows
from ._transport.arguments import check_peer
from .errors import (
    AuthenticationError,
    ConnectionManagerError,
    RejectedError,
    cause_text,
    host_port,
)
from .transport import Connection, Statistics, connect

logger: logging.Logger = logging.getLogger("aiordma.reconnect")

# Exception classes that `connect` raises. The flag states whether a retry may succeed. The first
# matching class applies. Other errors, such as a wrong argument or a peer that is not aiordma, are
# never retried.
TEMPORARY: tuple[tuple[type[Exception], bool], ...] = (
    (AuthenticationError, False),  # a retry does not fix a wrong key
    (ConnectionManagerError, True),  # no listener, route or response, or a listener at its limit
    (ConnectionError, True),  # the peer died during the handshake
)


def is_temporary(error: Exception) -> bool:
    """Return whether another attempt to connect may succeed after this error."""
    if type(error) is ConnectionManagerError and not error.event:
        return False  # the route uses a device that was not selected
    if isinstance(error, RejectedError) and error.by_application:
        return False
    return next((may_succeed for cls, may_succeed in TEMPORARY if isinstance(error, cls)), False)


@shows(ConnectOptions, CONNECT)
async def reconnect(
    host: str,
    port: int,
    *,
    first_delay: float = 0.1,
    longest_delay: float = 1.0,
    attempts: int | None = None,
    **options: Unpack[ConnectOptions],
) -> AsyncIterator[Connection]:
    """Yield a new connection on each iteration of `async for conn in reconnect(...)`.

    Each connection is closed at the end of the loop body. Handle connection errors in the body. For
    example, use `except ConnectionError: continue` to move on to the next connection. Messages are
    never retransmitted automatically. If `send` raises an exception, the peer may still have
    received the message, so only your program can decide whether to send the message again.

    Failed attempts are retried with exponential backoff. The delay starts at `first_delay` and
    doubles after each failure, up to `longest_delay`. Each delay is shortened by a random fraction
    of up to a half, so that many clients do not reconnect at the same time. A connection that ends
    before carrying a message or an operation counts as a failure. Any other connection resets the
    delay.

    A listener that stays up for longer than `longest_delay` plus the duration of one attempt is
    always found. An attempt takes up to `Config.connect_timeout`. A listener that restarts more
    often may be missed repeatedly.

    Errors that a retry cannot fix, such as a wrong key, are raised immediately. docs/connecting.md
    lists these errors.

    Args:
        host: The host, as for `connect`.
        port: The port, as for `connect`.
        first_delay: The delay before the second attempt, in seconds.
        longest_delay: The maximum delay between attempts, in seconds.
        attempts: The number of consecutive failures after which the last error is raised. None
            means no limit.
        **options: The other options of `connect`.

    Yields:
        Open connections.
    """
    check_peer(host, port)  # an AddressError raised by `connect` would be retried
    first_delay = seconds("first_delay", first_delay)
    longest_delay = seconds("longest_delay", longest_delay, allow_infinity=True)
    if attempts is not None:
        attempts = integer("attempts", attempts, 1)
    given = complete("reconnect", options, CONNECT)
    failures = 0
    while True:
        try:
            connection = await connect(host, port, **given)
        except Exception as error:
            failures += 1
            if not is_temporary(error) or (attempts is not None and failures >= attempts):
                raise
            why = cause_text(error)
        else:
            async with connection:
                yield connection
            if connection.statistics() != Statistics():
                failures = 0
                continue
            failures += 1
            why = "it ended without carrying any data"
        delay = min(longest_delay, first_delay * 2 ** min(failures - 1, 30))
        delay *= random.uniform(0.5, 1)
        where = host_port((host, port))
        logger.info("connection to %s failed: %s; retrying in %.3g seconds", where, why, delay)
        await asyncio.sleep(delay)
