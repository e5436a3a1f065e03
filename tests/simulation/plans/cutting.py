"""Awaits that are cancelled, in every way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# Seconds until the cancellation: at once, within a few iterations, in the middle, after the end.
DELAYS = (0.0, 0.0, 1e-4, 1e-3, 1e-2, 1e-1)


async def cut_short(chance: random.Random, make: Callable[[], Coroutine[Any, Any, T]]) -> list[T]:
    """Cancel an await after a while; return its result if it ends before."""
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
