"""Tests of how long it takes to continue without a cable, a peer or a listener.

The times are virtual.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest

import aiordma
from aiordma import testing

from .scenarios import ANY_ADDRESS, BROKEN, PORT, serve

LONG = 64 << 20
RETRIES = 4.096e-6 * (1 << 14) * (1 + ANY_ADDRESS.retry_count)
"""Seconds until the device gives up an unacknowledged request (Config.ack_timeout)."""
SWITCH = 0.001
"""Seconds that both sides need to agree on another rail by exchanging messages."""
EVEN = testing.FaultPlan(testing.Link(jitter=0))

pytestmark = [pytest.mark.needs("faults"), pytest.mark.parametrize("via", ["cm", "tcp"])]


def options(via: str, config: aiordma.Config = ANY_ADDRESS) -> dict[str, Any]:
    return {"device": "all", "config": config, "via": via}


async def until_up(conn: aiordma.Connection, devices: int) -> None:
    while [rail.state for rail in conn.rails] != ["lead", *["up"] * (devices - 1)]:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.1)  # until the peer knows it too


@cache
def seconds_for_two(via: str, devices: int, cut: int | None = None, after: float = 0) -> float:
    """Send a long message and a short one. Return the time until the short one has arrived."""
    arrived: list[float] = []

    async def main(world: testing.World) -> float:
        async def take(conn: aiordma.Connection) -> None:
            for _ in range(2):
                (await conn.recv()).release()
                arrived.append(world.now)
            await conn.wait_closed()

        world.host("server").serve(partial(serve, take, **options(via)))
        await asyncio.sleep(0.1)
        async with await aiordma.connect("server", PORT, **options(via)) as conn:
            await until_up(conn, devices)
            begun = world.now
            for data in bytes(LONG), b"the next one":
                conn.send_nowait(data)
            await asyncio.sleep(after)
            if cut is not None:
                assert not arrived
                world.partition("server", network=cut)
            while len(arrived) < 2:  # noqa: ASYNC110 - it is another host's
                await asyncio.sleep(0.01)
            return arrived[1] - begun

    return testing.simulate(main, seed=1, faults=EVEN, devices=devices)


@pytest.mark.parametrize("cut", [0, 1])
def test_failover_delays_a_message_by_at_most_the_retry_time(via: str, cut: int) -> None:
    """The comparison is with one cable alone, wherever in the message the other cable is cut."""
    alone, both = seconds_for_two(via, 1), seconds_for_two(via, 2)
    late = [seconds_for_two(via, 2, cut, part * both) for part in (0.1, 0.9)]
    assert both < min(late)
    assert max(late) < alone + RETRIES + SWITCH


def test_remaining_rails_detect_a_dead_peer_concurrently(via: str) -> None:
    """The lead breaks after its retries. The other rails are then probed at the same time."""

    async def main(world: testing.World) -> None:
        async with await aiordma.connect("server", PORT, **options(via)) as conn:
            await until_up(conn, 4)
            world.host("server").kill()
            since = world.now
            conn.send_nowait(b"lost")
            with pytest.raises(aiordma.ConnectionBrokenError):
                await conn.recv()
            assert world.now - since == pytest.approx(2 * RETRIES, abs=SWITCH)

    hosts = {"server": partial(serve, aiordma.Connection.wait_closed, **options(via))}
    testing.simulate(main, seed=1, hosts=hosts, faults=EVEN, devices=4)


def test_keep_alive_replaces_an_unresponsive_lead_rail(via: str) -> None:
    """The keep-alive does not wait for the lead's retries, which take much longer."""
    often, timeout = 2.0, 1.0
    limits = replace(ANY_ADDRESS, ack_timeout=100, keep_alive=often, keep_alive_timeout=timeout)

    async def echo(conn: aiordma.Connection) -> None:
        async for message in conn:
            with message:
                await conn.send(bytes(message))

    async def main(world: testing.World) -> None:
        async with await aiordma.connect("server", PORT, **options(via, limits)) as conn:
            await until_up(conn, 2)
            world.partition("server", network=0)
            since = world.now
            await conn.send(b"late")
            with await conn.recv() as message:
                assert bytes(message) == b"late"
            assert world.now - since < 2 * often + timeout + SWITCH
            assert [rail.state for rail in conn.rails] == ["down", "lead"]
            assert "(Config.keep_alive)" in str(conn.rails[0].error)

    hosts = {"server": partial(serve, echo, **options(via, limits))}
    testing.simulate(main, seed=1, hosts=hosts, faults=EVEN, devices=2)


@pytest.mark.parametrize("carries", [True, False])
def test_reconnect_backoff_resets_after_a_connection_receives_data(via: str, carries: bool) -> None:
    async def answer(conn: aiordma.Connection) -> None:
        if carries:
            await conn.send(b"here")

    async def main(world: testing.World) -> None:
        ends: list[float] = []
        async for conn in aiordma.reconnect("server", PORT, **options(via)):
            with suppress(*BROKEN):
                while True:
                    (await conn.recv()).release()
            ends.append(world.now)
            if len(ends) == 20:
                break
        pauses = [later - before for before, later in pairwise(ends)]
        if carries:
            assert max(pauses) < 0.1
        else:
            for count, pause in enumerate(pauses):
                assert 0.5 <= pause / min(1, 0.1 * 2**count) < 1.2

    hosts = {"server": partial(serve, answer, **options(via))}
    testing.simulate(main, seed=1, hosts=hosts, faults=EVEN)
