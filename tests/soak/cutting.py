"""Awaits that are cut short, in each of the ways there are."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# Seconds until the cancellation: at once, in the next turns, in the middle, long after the end.
DELAYS = (0.0, 0.0, 1e-4, 1e-3, 1e-2, 1e-1)


async def cut_short(chance: random.Random, make: Callable[[], Coroutine[Any, Any, T]]) -> list[T]:
    """Cancels it after a while; what it returned, if it was quicker."""
    delay = chance.choice(DELAYS) * chance.random()
    if chance.random() < 0.5:
        try:
            async with asyncio.timeout(delay):
                return [await make()]
        except TimeoutError:
            return []
    task = asyncio.create_task(make())
    try:
        if delay:
            await asyncio.wait([task], timeout=delay)
        else:
            for _ in range(chance.randint(0, 4)):
                await asyncio.sleep(0)
    finally:
        task.cancel()
        await asyncio.wait([task])
    return [] if task.cancelled() else [task.result()]
