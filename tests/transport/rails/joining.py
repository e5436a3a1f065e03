"""Helpers that open connections over several devices, by each way of connecting."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from aiordma import Config, Connection, Listener, connect, listen, prepare_connection, verbs
from aiordma._core import protocol
from aiordma._options import Devices, Via
from aiordma._transport.connection_group import GroupMember
from aiordma._transport.rails import Rail, Rails
from tests.transport.connection_factory import SMALL, yield_loop

THREE = os.environ.get("RAILS_DEVICES", "embedded0,embedded1,embedded2").split(",")
TWO = THREE[:2]
with verbs.open_device(TWO[0]) as lead:
    HOST = str(lead.choose_gid().gid.ip)
WAYS = ("cm", "tcp", "in-band", "out of band")


class Later:
    """A replacement for the loop's `call_later`, whose timers fire only on request."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._timers: list[asyncio.Handle] = []

    def __call__(self, seconds: float, callback: Callable[[], None]) -> asyncio.Handle:
        timer = asyncio.Handle(callback, (), asyncio.get_running_loop())
        self.asked.append(seconds)
        self._timers.append(timer)
        return timer

    @property
    def waiting(self) -> int:
        return sum(not timer.cancelled() for timer in self._timers)

    def fire(self) -> None:
        """Run the callbacks of all timers that have not been cancelled."""
        timers, self._timers = self._timers, []
        for timer in timers:
            if not timer.cancelled():
                timer._run()


@asynccontextmanager
async def joined(
    way: str, here: Devices = TWO, there: Devices = TWO, config: Config = SMALL, **options: Any
) -> AsyncIterator[tuple[Connection, Connection]]:
    """Yield both ends of a connection. The first end offers the rails."""
    async with AsyncExitStack() as stack:
        if way == "out of band":
            ends = await _joined_out_of_band(here, there, config, **options)
        else:
            via: Via = "cm" if way == "cm" else "tcp"
            listener = await stack.enter_async_context(
                await listen(HOST, device=there, via=via, config=config, **options)
            )
            if way == "in-band":
                for end in await both(listener, device=here, via=via, config=config, **options):
                    await stack.enter_async_context(end)
            ends = await both(listener, device=here, via=via, config=config, **options)
            if way == "in-band":
                assert isinstance(link := ends[0]._link, GroupMember)
                assert link.number
        async with ends[0], ends[1]:
            yield ends


async def both(
    listener: Listener, config: Config = SMALL, **options: Any
) -> tuple[Connection, Connection]:
    options.pop("on_request", None)
    accepting = asyncio.create_task(listener.accept())
    client = await connect(HOST, listener.port, config=config, **options)
    return client, await accepting


async def _joined_out_of_band(
    here: Devices, there: Devices, config: Config, **options: Any
) -> tuple[Connection, Connection]:
    first = await prepare_connection(device=here, config=config, **options)
    second = await prepare_connection(device=there, config=config, **options)
    if first.endpoint > second.endpoint:  # otherwise the first end initiates
        first, second = second, first
    async with first, second:
        first.accept(second.endpoint)
        second.accept(first.endpoint)
        one, other = await asyncio.gather(first.start(), second.start())
    return one, other


def further(conn: Connection) -> Rail:
    """Return the rail added last."""
    assert conn._rails
    return conn._rails.rails[-1]


def next_lead(conn: Connection) -> Rail:
    """Return the first rail to come up after the lead, which becomes the next lead."""
    assert conn._rails
    queue = conn._messages.rails_up[1]
    return next(it for it in conn._rails.rails if it.queue is queue)


def shown(conn: Connection) -> list[tuple[str, str]]:
    """Return the device and state of each rail."""
    return [(rail.device, rail.state) for rail in conn.rails]


async def until_rails(conns: Sequence[Connection], states: Sequence[str] = ("lead", "up")) -> None:
    """Wait until the rails of every connection reach these states."""
    while any([rail.state for rail in conn.rails] != list(states) for conn in conns):
        await yield_loop(1)


def lose(monkeypatch: pytest.MonkeyPatch, *kinds: type[protocol.Message]) -> None:
    """Drop outgoing rail messages of these kinds."""
    tell = Rails._send

    def tell_others(self: Rails, message: protocol.Message) -> None:
        if not isinstance(message, kinds):
            tell(self, message)

    monkeypatch.setattr(Rails, "_send", tell_others)
