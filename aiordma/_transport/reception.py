"""What a listener does for all who come by an exchange, whatever it travels on."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import verbs
from ..config import Config
from ..driver import Driver
from ..errors import RDMAError
from .connection import Connection
from .half import Half
from .life import Address, NoLink
from .places import Places
from .security import Security

if TYPE_CHECKING:
    from .rest import Rest


# Pairs of one listener that may rest at a time (rest.py).
MOST_RESTING = 64


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
        self.resting: weakref.WeakSet[Rest] = weakref.WeakSet()
        self.most_resting = MOST_RESTING

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

    def _place(self, peer: Address | None) -> Callable[[], None]:
        """Takes one; what gives it back.  NoPlaceError when there is none for this peer."""
        host = peer[0] if peer else ""  # it was gone before that could be asked
        if (why := self._places.take(host)) is not None:
            raise NoPlaceError(why)
        return partial(self._places.give_back, host)

    def admit(self, connection: Connection, peer: Address | None) -> None:
        """Has a place for it until it ends.  NoPlaceError when there is none."""
        connection._on_closed = self._place(peer)

    def take(self, local: Address | None, peer: Address | None) -> tuple[Half, Connection]:
        """A half for a peer, to be reached by `local`.  NoPlaceError when there is none for it."""
        give_back = self._place(peer)
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
        resting = list(self.resting)
        for rest in resting:
            rest.finish()
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.close_timeout):
                for rest in resting:
                    await rest.told()
