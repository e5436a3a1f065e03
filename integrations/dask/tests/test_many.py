"""A test with a thousand connections to one scheduler."""

from __future__ import annotations

import asyncio
import time

import psutil
from distributed import Scheduler, rpc

COUNT = 1000


async def test_scheduler_serves_a_thousand_connections() -> None:
    async with Scheduler(
        protocol="rdma://", host="127.0.0.1", port=0, dashboard=False
    ) as scheduler:
        before = psutil.Process().memory_info().rss
        clients = [rpc(scheduler.address) for _ in range(COUNT)]
        started = time.perf_counter()
        for some in range(0, COUNT, 50):
            await asyncio.gather(*(client.identity() for client in clients[some : some + 50]))
        seconds = time.perf_counter() - started
        grown = psutil.Process().memory_info().rss - before
        print(f"{COUNT} in {seconds:.1f} s, {grown / COUNT / 1024:.0f} KiB each, both ends")
        assert len(scheduler._comms) >= COUNT
        assert grown < COUNT * (1 << 20)
        answers = await asyncio.gather(*(client.identity() for client in clients))
        assert {answer["address"] for answer in answers} == {scheduler.address}
        await asyncio.gather(*(client.close_rpc() for client in clients))
