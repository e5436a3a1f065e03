"""Tests of a queue of waiting tasks: their order, and that no wake-up is lost."""

from __future__ import annotations

import asyncio

from aiordma._event_loop.wait_queue import WaitQueue


async def line_up(waiters: WaitQueue, count: int) -> tuple[list[asyncio.Task[None]], list[int]]:
    woken: list[int] = []

    async def one(number: int) -> None:
        await waiters.wait()
        woken.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(count)]
    await asyncio.sleep(0)
    return tasks, woken


async def test_wait_queue_wakes_waiters_in_fifo_order() -> None:
    waiters = WaitQueue()
    tasks, woken = await line_up(waiters, 3)
    waiters.wake()
    await tasks[0]
    assert woken == [0]
    waiters.wake_all()
    await asyncio.gather(*tasks)
    assert woken == [0, 1, 2]


async def test_cancelled_waiters_are_removed() -> None:
    waiters = WaitQueue()
    tasks, _ = await line_up(waiters, 3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not waiters._waiters


async def test_wake_up_passes_to_the_next_waiter_after_cancellation() -> None:
    waiters = WaitQueue()
    tasks, woken = await line_up(waiters, 2)
    waiters.wake()
    tasks[0].cancel()
    await tasks[1]
    assert woken == [1]
    assert tasks[0].cancelled()
