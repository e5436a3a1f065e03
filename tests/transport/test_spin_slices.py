"""Test that a loop that polls before it sleeps still runs callbacks that become ready meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from aiordma import Config
from aiordma._native import ffi

from .connection_factory import ConnectionFactory, yield_loop
from .marks import one_loop, sets_polling

pytestmark = [sets_polling, one_loop]

LONG_US = 10_000_000  # longer than any test


async def chain(links: int) -> None:
    """Run callbacks that each schedule the next one, like the done callbacks of tasks."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def run(left: int) -> None:
        if left:
            loop.call_soon(run, left - 1)
        else:
            done.set_result(None)

    loop.call_soon(run, links)
    await done


async def test_chained_callbacks_run_between_spin_slices(factory: ConnectionFactory) -> None:
    async with factory.pair(Config(polling=1.0)) as (client, _):
        poller = client._endpoint.driver._reader._poller
        poller.spin_us = LONG_US
        poller.spin_soon()
        await chain(3)
        assert poller.spin_scheduled  # the next slice
        poller.spin_us = 0
        while poller.spin_scheduled:
            await yield_loop(1)


async def test_ending_a_spin_early_reenables_peer_wakeups(factory: ConnectionFactory) -> None:
    """All slices but the last tell the device that polling continues, and any slice may be the
    last.
    """
    async with factory.pair(Config(polling=1.0)) as (client, _):
        driver = client._endpoint.driver
        poller = driver._reader._poller
        address, most, _, _ = driver.channel._poller_arguments(1, lambda _: None)
        state: Any = cast(Any, ffi).cast("struct aiordma_drain *", address)
        poller.spin_us = LONG_US
        poller.spin_soon()
        await yield_loop(2)
        assert state.polls_again == 2
        ended: list[int] = []
        poller.spin_once(address, most, [object()], ended.append)
        assert len(ended) == 1
        assert not state.holds or ended[0] & 1  # found completions, so it continues
        poller.spin_us = 0
        while poller.spin_scheduled:
            await yield_loop(1)
