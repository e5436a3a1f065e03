"""The accepting side of a listener, for every way of connecting: admission, handshakes, limits."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from ..config import Config
from ..errors import BusyError, ConnectionClosedError, RDMAError
from .auth import Security
from .connect_attempt import ConnectAttempt
from .connection import Connection
from .endpoint import LocalEndpoint
from .lifecycle import Address, NoLink

logger = logging.getLogger("aiordma.acceptor")

E = TypeVar("E", bound=LocalEndpoint)


class ConnectionLimitError(RDMAError):
    """A peer is turned away: the text is the reason that its user reads."""


class ConnectionLimits:
    """Counts the connections of one listener, and attempts, in all and of each host."""

    def __init__(self, config: Config) -> None:
        self._most = config.max_connections
        self._most_per_host = config.max_connections_per_host
        self._taken: Counter[str] = Counter()

    def take(self, host: str) -> None:
        """Counts one more of this host.  ConnectionLimitError if there may be no more."""
        if self._most is not None and self._taken.total() >= self._most:
            raise ConnectionLimitError(
                f"the listener has as many connections as it takes ({self._most})"
            )
        if self._most_per_host is not None and self._taken[host] >= self._most_per_host:
            raise ConnectionLimitError(
                f"the listener has as many connections with {host} as it takes "
                f"({self._most_per_host})"
            )
        self._taken[host] += 1

    def give_back(self, host: str) -> None:
        """Undoes a `take`."""
        self._taken[host] -= 1
        if not self._taken[host]:
            del self._taken[host]


class Request(Protocol):
    """A peer that wants a connection, in one of the ways of connecting."""

    async def handshake(self, acceptor: Acceptor) -> Connection:
        """Does the whole handshake; its endpoint is made by `Acceptor.attempt`."""

    def give_up(self, error: BaseException) -> None:
        """Tells the peer the reason if that is possible, and gives everything back.

        After a handshake that failed, or instead of one.  Never raises.
        """


class Acceptor:
    """What the listeners of all ways of connecting have in common.

    They call `admit` for each peer; `deliver` takes the connections.
    """

    def __init__(
        self,
        config: Config,
        security: Security,
        deliver: Callable[[Connection], None],
    ) -> None:
        self.config = config
        self.security = security
        self.closed = False
        self._deliver = deliver
        self._limits = ConnectionLimits(config)
        self._handshakes: set[asyncio.Task[None]] = set()
        self._waiting: set[Request] = set()  # the first step of their task is to come
        self._loop = asyncio.get_running_loop()

    def admit(self, request: Request) -> None:
        """Begins the handshake, outside the caller, unless there are too many."""
        if self.closed:
            request.give_up(ConnectionClosedError("the listener is closed"))
        elif len(self._handshakes) >= self.config.max_handshakes:
            logger.info("%r turned away: too many handshakes are under way", request)
            request.give_up(BusyError("too many handshakes are under way"))
        else:
            self._waiting.add(request)
            task = self._loop.create_task(self._serve(request))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _serve(self, request: Request) -> None:
        self._waiting.discard(request)
        try:
            async with asyncio.timeout(self.config.handshake_timeout):
                connection = await request.handshake(self)
        except BaseException as error:
            # The peer, or this machine, failed one handshake: the listener goes on.
            logger.info("%r failed: %r", request, error)
            request.give_up(error)
            if not isinstance(error, (RDMAError, OSError)):
                raise
        else:
            self._deliver(connection)

    def attempt(self, peer: Address | None, make: Callable[[], E]) -> ConnectAttempt[E]:
        """An attempt with a connection for a peer.  ConnectionLimitError if there are too many."""
        host = peer[0] if peer else ""  # a peer that was gone before its address could be read
        self._limits.take(host)
        attempt: ConnectAttempt[E] | None = None
        try:
            attempt = ConnectAttempt(make())
            attempt.make()
        except BaseException as error:
            self._limits.give_back(host)
            if attempt is not None:
                attempt.give_up(NoLink(), error)
            raise
        attempt.on_closed(partial(self._limits.give_back, host))
        return attempt

    async def close(self) -> None:
        """Admits no more peers; handshakes under way are given up."""
        self.closed = True
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
        while self._waiting:
            self._waiting.pop().give_up(ConnectionClosedError("the listener is closed"))
