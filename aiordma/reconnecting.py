"""Connecting again and again, with exponential back-off."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from ssl import SSLContext

from .config import DEFAULT, Config
from .errors import AddressError, RejectedError, RouteError, UnreachableError
from .transport import Address, Connection, Via, connect

logger = logging.getLogger("aiordma.reconnect")

# What may be otherwise in a moment.  Anything else is a mistake that stays one.
PASSING = (AddressError, RejectedError, RouteError, UnreachableError)


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
    """A connection, and another one each time the loop comes round: `async for conn in ...`.

    The connection is closed when the body has ended.  What ends it inside the body, the body
    handles: `except ConnectionError: continue` is all it takes to begin anew.  Work that was under
    way is not repeated; only the caller knows whether it may be.

    While the peer cannot be reached it waits: `first_delay` seconds at first, twice as long each
    time, at most `longest_delay`, and each time between half of that and all of it by chance, so
    that many clients do not come back at once.  After `attempts` failures in a row (None: never)
    the last one is raised.  Errors that will not pass, such as a wrong key, are raised at once.
    The other arguments are those of `connect`.
    """
    failures = 0
    while True:
        try:
            connection = await connect(
                host, port, device=device, via=via, source=source, config=config, auth=auth, ssl=ssl
            )
        except PASSING as error:
            failures += 1
            if attempts is not None and failures >= attempts:
                raise
            delay = min(longest_delay, first_delay * 2 ** min(failures - 1, 30))
            delay *= random.uniform(0.5, 1)
            logger.info("%s port %s: %s; again in %.3g seconds", host, port, error, delay)
            await asyncio.sleep(delay)
            continue
        failures = 0
        async with connection:
            yield connection
