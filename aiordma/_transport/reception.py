"""What a listener does for all who come by an exchange, whatever it travels on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from .. import verbs
from .._loop.driver import Driver
from ..config import Config
from ..errors import RDMAError
from .connection import Connection
from .half import Half
from .lifecycle import Address, NoLink
from .places import Places
from .security import Security


class NoPlaceError(RDMAError):
    """Why a peer is turned away, in the words that its user will read."""


class Reception:
    """Handshakes under way, places, and the making of this side's halves.

    `deliver` takes finished connections.
    """

    def __init__(
        self,
        device: verbs.Device,
        config: Config,
        security: Security,
        deliver: Callable[[Connection], None],
    ) -> None:
        self.config = config
        self.security = security
        self.deliver = deliver
        self.takes_asks = config.in_band and security.tls is None
        self.closed = False
        self._device = device
        self._places = Places(config)
        self._handshakes: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    @property
    def full(self) -> bool:
        """As many handshakes are under way as may be."""
        return len(self._handshakes) >= self.config.max_handshakes

    def begin(self, handshake: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs one; it is cancelled by `close`."""
        task = self._loop.create_task(handshake)
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)
        return task

    def take(self, local: Address | None, peer: Address | None) -> tuple[Half, Connection]:
        """A half for a peer, to be reached by `local`.  NoPlaceError when there is none for it."""
        host = peer[0] if peer else ""  # it was gone before that could be asked
        if (why := self._places.take(host)) is not None:
            raise NoPlaceError(why)
        give_back = partial(self._places.give_back, host)
        half: Half | None = None
        try:
            config = self.config
            driver = Driver.for_device(self._device, config.pool_limit, config.polling)
            half = Half(driver, config, self.security, local, takes_asks=self.takes_asks)
            connection = half.make()
        except BaseException as error:
            give_back()
            if half is not None:
                half.give_up(NoLink(), error)
            raise
        connection._on_closed = give_back
        return half, connection

    async def close(self) -> None:
        """Nobody is received any more; handshakes under way are given up."""
        self.closed = True
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
