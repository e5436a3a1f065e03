"""The pair itself: it has no threads, its time is virtual, and a seed is always the same run."""

from __future__ import annotations

import asyncio
import os

import pytest

from aiordma._loop.virtual_loop import StalledError
from tests.session.pair import PairFactory, new_loop
from tests.transport.connection_factory import SMALL, pattern

FACTORY = PairFactory("", "", "tcp", 1.0)


async def exchange(trace: list[tuple[object, ...]]) -> None:
    """Messages of both kinds in both directions, many at once; notes when each arrives."""
    loop = asyncio.get_running_loop()
    async with FACTORY.pair(SMALL) as ends:
        for sender, receiver in (ends, ends[::-1]):
            messages = [pattern(size, n) for n, size in enumerate((64, 1 << 20, 5000, 64, 100))]
            sends = [sender.send_nowait(data) for data in messages]
            for data in messages:
                with await receiver.recv() as message:
                    assert message == data
                trace.append((len(data), loop.time(), *(send.done() for send in sends)))
            await asyncio.gather(*sends)


def run(seed: int) -> list[tuple[object, ...]]:
    trace: list[tuple[object, ...]] = []
    with asyncio.Runner(loop_factory=lambda: new_loop(seed)) as runner:
        runner.run(exchange(trace))
    return trace


def test_a_seed_is_always_the_same_run() -> None:
    traces = [run(seed) for seed in range(10)]
    assert traces == [run(seed) for seed in range(10)]
    assert len(set(map(str, traces))) == 10


def test_there_are_no_threads_and_hours_take_no_time() -> None:
    before = len(os.listdir("/proc/self/task"))

    async def main() -> None:
        async with FACTORY.pair(SMALL):
            since = asyncio.get_running_loop().time()
            await asyncio.sleep(3600)
            assert 3600 <= asyncio.get_running_loop().time() - since < 3601
            # Fewer where a thread of a test before was still ending.
            assert len(os.listdir("/proc/self/task")) <= before

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def test_what_nothing_can_end_is_an_error_that_names_it() -> None:
    async def main() -> None:
        async with FACTORY.pair(SMALL) as (client, _):
            await asyncio.create_task(client.recv_region(), name="the one that waits")

    with (
        pytest.raises(StalledError, match="the one that waits"),
        asyncio.Runner(loop_factory=new_loop) as runner,
    ):
        runner.run(main())
