"""Two connections in this process, joined by a `Provider`, on a loop in virtual time.

`World.step` performs the next event outside of the loop: either work of the device, which takes
about a microsecond, or the next timer. While callbacks are ready, chance decides how much work of
the device goes first.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, count
from unittest.mock import patch

from aiordma import Config, Connection
from aiordma._core.connection_states import ConnectionState
from aiordma._datapath.memory import Clock
from aiordma._event_loop.virtual_loop import StalledError, VirtualLoop, describe_waiting_tasks
from aiordma._transport.auth import Security
from aiordma._transport.connect_oob import PendingConnection
from aiordma._transport.lifecycle import NoLink
from aiordma._transport.rails import Rail, Rails, RailState
from aiordma.config import DEFAULT
from aiordma.errors import UNANNOUNCED
from tests.session.provider import RAILS, Break, Provider
from tests.transport.connection_factory import SMALL, ConnectionFactory, yield_loop

STEP = 1e-6  # seconds, on average
# Initial values of the clock in seconds: at boot, a while later, and after 300 days.
STARTS = 0.0, 1000.0, 26e6
SET_LEAD = Rails.set_lead


@cache
def provider() -> Provider:
    return Provider()


class World:
    """The environment of a loop: the provider, the clock, and the thread that ends leases."""

    def __init__(self, seed: int, step: float) -> None:
        self.now = STARTS[seed % len(STARTS)]
        self.random = random.Random(seed)
        self.provider = provider()
        self.provider.begin(self.random)
        self.loop: VirtualLoop | None = None
        self.step_length = step
        self._numbers = count()
        self._deadlines: list[tuple[float, int, Callable[[], object]]] = []
        self.begun: dict[float, float] = {}
        """For each deadline: the time at which it was first scheduled."""
        self.moved = -math.inf
        """The time of the last change of lead on either side."""

    def call_at(self, when: float, callback: Callable[[], object]) -> None:
        """Schedule a callback. Outside this simulation, a separate lease thread calls it."""
        self.begun.setdefault(when, self.now)
        heapq.heappush(self._deadlines, (when, next(self._numbers), callback))

    def step(self, until: float | None) -> bool:
        if until is not None and until <= self.now:
            while self.random.random() < 0.5 and self._work():
                pass
            more = False
        elif not (more := self._work()):
            self._pass(until)
        while self._deadlines and self._deadlines[0][0] <= self.now:
            heapq.heappop(self._deadlines)[-1]()
        if self.provider.errors:
            raise self.provider.errors.pop()
        return more

    def _work(self) -> bool:
        if not self.provider.step():
            return False
        self.now += 2 * self.step_length * self.random.random()
        return True

    def _pass(self, until: float | None) -> None:
        """Advance the clock to the next timer or lease deadline."""
        times = [when for when, *_ in self._deadlines[:1]] + ([until] if until is not None else [])
        if not times:
            assert self.loop is not None
            raise StalledError(
                f"nothing will happen any more:\n{describe_waiting_tasks(self.loop)}"
            )
        self.now = max(self.now, min(times))


class PairLoop(VirtualLoop):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.clock = Clock(self.time, world.call_at)
        self.world, world.loop = world, self

        def set_lead(rails: Rails, rail: Rail) -> None:
            world.moved = world.now
            SET_LEAD(rails, rail)

        self._replaced = patch.object(Rails, "set_lead", set_lead)
        self._replaced.start()

    def close(self) -> None:
        super().close()
        self._replaced.stop()


class PairLink(NoLink):
    """A link whose other end learns of a close after a random delay."""

    def __init__(self, number: int) -> None:
        self.local_address, self.peer_address = ("192.0.2.1", number), ("192.0.2.1", 3 - number)
        self.other = self
        self._on_end: Callable[[str], None] | None = None

    def established(self, on_end: Callable[[str], None]) -> None:
        self._on_end = on_end

    def close(self) -> None:
        provider().mail.append(self.other.end)

    def end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            asyncio.get_running_loop().call_soon(on_end, UNANNOUNCED)


def new_loop(seed: int = 0, step: float = STEP) -> PairLoop:
    return PairLoop(World(seed, step))


@dataclass(frozen=True)
class PairFactory(ConnectionFactory):
    """Create connected pairs without a handshake, by exchanging the endpoints directly."""

    rails: int = 1
    """Number of devices per side. If it is one, both sides share it."""
    breaking: tuple[int, ...] = ()
    """The rails that break during the connection. 0 is the first lead."""

    @property
    def loses_work(self) -> bool:
        return self.rails > 1  # also when the other side aborts

    def half(self, config: Config, side: int = 0) -> PendingConnection:
        security = Security(auth=self.auth, encrypt=self.encrypt)
        asked = config.keep_alive != DEFAULT.keep_alive  # its timers prevent a StalledError
        config = replace(config, polling=0, keep_alive=config.keep_alive if asked else None)
        first = side * RAILS if self.rails > 1 else 0
        devices = provider().devices[first : first + self.rails]
        return PendingConnection(tuple(devices), None, config, security)

    @asynccontextmanager
    async def pair(
        self, config: Config = SMALL, *, server: Config | None = None
    ) -> AsyncIterator[tuple[Connection, Connection]]:
        halves = self.half(config, 0), self.half(server or config, 1)
        links = [PairLink(1), PairLink(2)]
        for half, other, *ends in zip(halves, halves[::-1], links, links[::-1], strict=True):
            half.accept(other.endpoint)
            half._attempt.link, ends[0].other = ends
        first, second = await asyncio.gather(*(half.start() for half in halves))
        async with first, second:
            chance = provider().random
            beside = self.rails > 1 and len(self.breaking) < 2 and chance.random() < 0.5
            if self.rails > 1 and not beside:  # otherwise the rails come up during the test
                await self.rest(first, second)
            breaks = [Break.drawn(chance, rail) for rail in self.breaking]
            if beside and 0 in self.breaking:
                # Unless both sides have another rail, the connection ends when the lead breaks.
                # Break only side 0. If only the acceptor noticed a break, it would wait for the
                # other side, which may have nothing to send.
                for conn in (first, second):
                    while not conn._messages.failover.can_fail_over(to_other_device=False):
                        await yield_loop(1)
                breaks = [replace(each, side=0) for each in breaks]
            provider().breaks = breaks
            yield first, second
            await self.rest(first, second)

    async def rest(self, *conns: Connection) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, PairLoop)
        await asyncio.sleep(1000 * loop.world.step_length)
        while not provider().at_rest:  # noqa: ASYNC110 - a timer has begun something just now
            await asyncio.sleep(1000 * loop.world.step_length)
        if any(conn._state is not ConnectionState.OPEN for conn in conns):
            return
        for conn, other in (conns, conns[::-1]):
            check_credits(conn, other)
            check_waits(conn, other)
            check_regions(conn, other, loop.world)
        check_rails(*conns)


def stop(conn: Connection) -> None:
    """Stop the connection's queue pair, so that it neither sends nor responds."""
    provider().queues[conn._queue.qp.qp_num].stopped = True


def check_credits(conn: Connection, other: Connection) -> None:
    """Check that each credit belongs to exactly one side when both are idle."""
    data, control, *_ = conn._messages.outbox.credits.account()
    there = other._messages.outbox.credits.account()
    _, _, held_data, owed_data, held_control, owed_control = there
    limit = other._endpoint.config.data_receives
    if conn._messages.outbox.journal.is_enabled:
        limit = min(limit, conn._endpoint.config.send_queue)
    assert data + held_data + owed_data == limit
    assert control + held_control + owed_control == other._endpoint.config.control_receives


def check_waits(conn: Connection, other: Connection) -> None:
    """Check that idle sides have no work left that could continue."""
    it = conn._messages.figures()
    assert it["rendezvous"] <= other._messages.figures()["arrived"]
    if not conn._endpoint.driver.pool.statistics().waiting:
        assert not conn._queue.outstanding
        assert not it["frames_in_flight"]
        assert not it["controls_waiting"]
        assert not it["messages_waiting"] or not it["credits"] or it["rendezvous"]
        assert not (it["receivers"] and it["arrived"])


def check_regions(conn: Connection, owner: Connection, world: World) -> None:
    """Check that idle sides agree on their regions, and that no lease ends later for the user.

    When the lead breaks, a grant may be lost even if it was acknowledged. It is then sent again, so
    leases from before the last change of lead are not compared.
    """
    for number, region in list(conn._sharing.remote_regions.by_id.items()):
        share = owner._sharing.shares.by_id.get(number)
        if share is None:
            told = region.lent or not region._usable
            assert told, f"{region!r} ended unannounced"
        elif share._deadline is not None and not region.ended:
            until = share._deadline.when
            known = region._deadline <= until or world.begun[until] <= world.moved
            assert known, f"{region!r} may be used too long"
        assert region._user is not None or region.ended, f"{region!r} has no key for the lead"


def check_rails(*conns: Connection) -> None:
    """Check that idle rails have no work, and that both sides agree on whether each rail is up."""
    rails = [conn._rails.rails if conn._rails is not None else [] for conn in conns]
    states = [{rail.number: rail.state for rail in each if rail.number} for each in rails]
    for number in states[0] | states[1]:
        there = {each.get(number, RailState.DOWN) for each in states}
        assert there in ({RailState.UP}, {RailState.DOWN}), f"rail {number}: {there}"
    assert not any(rail.queue.outstanding for rail in chain(*rails) if rail.queue is not None)
