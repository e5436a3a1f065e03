"""Two connections of this process, joined by a `Provider`, on a loop in virtual time.

`Pair.step` is the next thing that happens outside of the loop: work of the device, which takes a
microsecond or so, or else the next timer.  While callbacks are ready, chance decides how much of it
goes before them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache

from aiordma import Config, Connection
from aiordma._loop.virtual_loop import StalledError, VirtualLoop, waiting
from aiordma._transport.auth import Security
from aiordma._transport.connect_oob import PendingConnection
from aiordma._transport.lifecycle import NoLink
from tests.session.provider import Provider
from tests.transport.connection_factory import SMALL, ConnectionFactory

STEP = 1e-6  # seconds, on average


@cache
def provider() -> Provider:
    return Provider()


class World:
    """What a loop has outside: the provider, and the time."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.provider = provider()
        self.provider.begin(self.random)
        self.loop: VirtualLoop | None = None

    def step(self, until: float | None) -> bool:
        if until is not None and until <= self.now:
            while self.random.random() < 0.5 and self.provider.step():
                self.now += 2 * STEP * self.random.random()
            more = False
        elif more := self.provider.step():
            self.now += 2 * STEP * self.random.random()
        elif until is None:
            assert self.loop is not None
            raise StalledError(f"nothing will happen any more:\n{waiting(self.loop)}")
        else:
            self.now = until
        if self.provider.errors:
            raise self.provider.errors.pop()
        return more


class PairLink(NoLink):
    """Has the other side told that this one is gone, at some time after that."""

    def __init__(self) -> None:
        self.other = self
        self._on_end: Callable[[str], None] | None = None

    def established(self, on_end: Callable[[str], None]) -> None:
        self._on_end = on_end

    def close(self) -> None:
        provider().mail.append(self.other.end)

    def end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            asyncio.get_running_loop().call_soon(on_end, "the peer is gone")


def new_loop(seed: int = 0) -> VirtualLoop:
    world = World(seed)
    world.loop = VirtualLoop(world)
    return world.loop


@dataclass(frozen=True)
class PairFactory(ConnectionFactory):
    """Pairs that meet without a handshake: their endpoints are exchanged here."""

    @asynccontextmanager
    async def pair(
        self, config: Config = SMALL, *, server: Config | None = None
    ) -> AsyncIterator[tuple[Connection, Connection]]:
        security = Security(auth=self.auth, encrypt=self.encrypt)
        halves = [
            PendingConnection(provider().device, None, replace(one, polling=0), security)
            for one in (config, server or config)
        ]
        links = [PairLink(), PairLink()]
        for half, other, *ends in zip(halves, halves[::-1], links, links[::-1], strict=True):
            half.accept(other.endpoint)
            half._attempt.link, ends[0].other = ends
        first, second = await asyncio.gather(*(half.start() for half in halves))
        async with first, second:
            yield first, second
