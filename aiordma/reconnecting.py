"""Reconnecting with exponential back-off."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from ssl import SSLContext

from .config import DEFAULT, Config
from .errors import AddressError, RejectedError, RouteError, UnreachableError, host_port
from .transport import Address, Connection, Via, connect

logger = logging.getLogger("aiordma.reconnect")

# Errors that may be temporary.  Any other error is raised at once.
TEMPORARY = (AddressError, RejectedError, RouteError, UnreachableError)


async def reconnect(
    host: str,
    port: int,
    *,
    first_delay: float = 0.1,
    longest_delay: float = 30.0,
    attempts: int | None = None,
    device: str | None = None,
    via: Via = "cm",
    source: Address | None = None,
    config: Config = DEFAULT,
    auth: bytes | None = None,
    ssl: SSLContext | None = None,
) -> AsyncIterator[Connection]:
    """Connect, and connect again at each iteration: `async for conn in reconnect(...)`.

    The connection is closed at the end of the body.  The body handles errors of the connection:
    `except ConnectionError: continue` reconnects.  Outstanding operations are not repeated; only
    the caller knows whether they may be.

    A failed attempt is repeated after a delay with exponential back-off: `first_delay` seconds,
    doubled after each failure up to `longest_delay`, and reduced by a random part of up to a half,
    so that many clients do not reconnect at once.  After `attempts` failures in a row (None: no
    limit) the last error is raised.  Errors that are not temporary, such as a wrong key, are raised
    at once.  The other arguments are those of `connect`.
    """
    failures = 0
    while True:
        try:
            connection = await connect(
                host, port, device=device, via=via, source=source, config=config, auth=auth, ssl=ssl
            )
        except TEMPORARY as error:
            failures += 1
            if attempts is not None and failures >= attempts:
                raise
            delay = min(longest_delay, first_delay * 2 ** min(failures - 1, 30))
            delay *= random.uniform(0.5, 1)
            where = host_port((host, port))
            logger.info("connecting to %s: %s; again in %.3g seconds", where, error, delay)
            await asyncio.sleep(delay)
            continue
        failures = 0
        async with connection:
            yield connection
