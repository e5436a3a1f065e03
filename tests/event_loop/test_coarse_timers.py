"""Tests of coarse timers: each fires once, in order and in time.

The event loop has no timers of its own for them.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from aiordma._datapath.memory import MACHINE
from aiordma._event_loop.coarse_timers import COMPACT_THRESHOLD, CoarseTimers
from aiordma.errors import VerbsError


@pytest.fixture
async def timers() -> AsyncIterator[CoarseTimers]:
    loop = asyncio.get_running_loop()
    timers = CoarseTimers(loop, MACHINE)
    loop.add_reader(timers.fd, timers.fire)
    yield timers
    loop.remove_reader(timers.fd)
    timers.close()


async def test_timers_fire_in_due_order_and_never_early(timers: CoarseTimers) -> None:
    came: list[tuple[asyncio.Handle, float]] = []
    last = asyncio.Event()
    for seconds in (0.03, 0.0, 0.01, 0.02, -1.0):
        made: list[asyncio.Handle] = []
        ring = partial(lambda made: came.append((made[0], MACHINE.now())), made)
        made.append(timers.call_later(seconds, ring))
    timers.call_later(0.04, last.set)
    # Compare the recorded due times, because any time may pass between two call_later() calls.
    due = {timer: when for when, _, timer in timers._timers}
    await last.wait()
    assert len(came) == 5
    assert [due[timer] for timer, _ in came] == sorted(due[timer] for timer, _ in came)
    assert all(at >= due[timer] for timer, at in came)


async def test_later_timer_fires_after_an_earlier_one_was_cancelled(timers: CoarseTimers) -> None:
    came = asyncio.Event()
    early = timers.call_later(0.01, lambda: pytest.fail("it was cancelled"))
    timers.call_later(0.02, came.set)
    early.cancel()
    early.cancel()
    await came.wait()
    early.cancel()


async def test_expired_timer_does_not_fire_when_an_earlier_timer_cancels_it(
    timers: CoarseTimers,
) -> None:
    came = asyncio.Event()
    boot = -MACHINE.now()  # the timers are due before the clock's zero
    timers.call_later(boot - 3, lambda: second.cancel())  # noqa: PLW0108 - not yet assigned
    second = timers.call_later(boot - 2, lambda: pytest.fail("it was cancelled"))
    timers.call_later(boot - 1, came.set)
    await came.wait()


async def test_exception_in_a_timer_does_not_stop_later_timers(
    timers: CoarseTimers, reported: list[dict[str, Any]]
) -> None:
    came = asyncio.Event()

    def fail() -> None:
        raise ValueError("of a timer")

    timers.call_later(0.0, fail)
    timers.call_later(0.001, came.set)
    await came.wait()
    assert str(reported[0]["exception"]) == "of a timer"
    assert len(reported) == 1


async def test_timer_callback_can_start_another_timer(timers: CoarseTimers) -> None:
    left = 20
    over = asyncio.Event()

    def again() -> None:
        nonlocal left
        left -= 1
        if left:
            timers.call_later(0.0005 * (left % 3), again)
        else:
            over.set()

    far = timers.call_later(1e300, lambda: pytest.fail("a century has gone by"))
    again()
    await over.wait()
    far.cancel()


async def test_cancelled_timers_are_removed_from_the_queue(timers: CoarseTimers) -> None:
    came = asyncio.Event()
    timers.call_later(0.01, came.set)
    for _ in range(10 * COMPACT_THRESHOLD):
        timers.call_later(60, lambda: None).cancel()
    assert len(timers._timers) <= COMPACT_THRESHOLD
    await came.wait()


@pytest.mark.one_loop
async def test_coarse_timers_do_not_use_the_event_loop_timers(timers: CoarseTimers) -> None:
    scheduled: list[object] = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    before = scheduled.copy()
    timers.call_later(60, lambda: None)
    assert scheduled == before


def test_coarse_timers_raise_verbs_error_without_descriptors() -> None:
    loop = asyncio.new_event_loop()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(VerbsError, match="timerfd_create"):
            CoarseTimers(loop, MACHINE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        loop.close()
