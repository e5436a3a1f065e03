"""Tests of the share of a loop's time for work on behalf of strangers.

The clock of the tests only advances when a test advances it.
"""

from __future__ import annotations

import asyncio

import pytest

from aiordma._datapath.memory import Clock
from aiordma._event_loop.time_share import BURST, MAX_WAIT, SHARE, Timed, TimeShare

now = 0.0


@pytest.fixture
def share() -> TimeShare:
    global now  # noqa: PLW0603
    now = 1000.0
    return TimeShare(Clock(lambda: now))


def advance_clock(seconds: float) -> None:
    global now  # noqa: PLW0603
    now += seconds


def test_wait_grows_with_time_used_and_shrinks_as_time_passes(share: TimeShare) -> None:
    assert share.wait() == 0
    share.use(BURST / 2)
    share.use(BURST / 2)
    assert share.wait() == pytest.approx(0)
    share.use(0.01)
    assert share.wait() == pytest.approx(0.01 * SHARE)
    advance_clock(0.01 * SHARE)
    assert share.wait() == pytest.approx(0)
    share.use(0.02)
    assert share.wait() == pytest.approx(0.02 * SHARE)
    advance_clock(3600)  # for which nothing is saved
    share.use(BURST + 0.01)
    assert share.wait() == pytest.approx(0.01 * SHARE)


def test_wait_never_exceeds_the_maximum(share: TimeShare) -> None:
    for _ in range(100):
        share.use(60)
    assert share.wait() == pytest.approx(MAX_WAIT)


async def test_time_between_coroutine_steps_is_not_charged(share: TimeShare) -> None:
    """The time between two steps belongs to other tasks."""

    async def work() -> bool:
        advance_clock(BURST)
        await asyncio.sleep(0)
        advance_clock(0.01)
        return False

    steps = Timed(share, work())
    steps.send(None)
    assert share.wait() == pytest.approx(0)
    advance_clock(0.005 * SHARE)
    with pytest.raises(StopIteration):
        steps.send(None)
    assert share.wait() == pytest.approx(0.01 * SHARE - 0.01 - 0.005 * SHARE)


@pytest.mark.parametrize("delivers", [True, False])
async def test_time_is_refunded_only_when_work_succeeds(share: TimeShare, delivers: bool) -> None:
    """The refund covers any amount of work, and the time used before the work began."""

    async def handshake() -> bool:
        for _ in range(2):
            advance_clock(0.01)
            await asyncio.sleep(0)
        return delivers

    for _ in range(50):
        share.use(0.005)
        assert await asyncio.Task(Timed(share, handshake(), used=0.005)) is delivers
    assert (share.wait() == 0) is delivers


async def test_coroutine_does_not_run_when_cancelled_before_its_first_step(
    share: TimeShare,
) -> None:
    """The task closes the coroutine, which would otherwise warn that it was never awaited."""

    async def work() -> bool:
        pytest.fail("it has begun")

    task = asyncio.Task(Timed(share, work()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    Timed(share, work()).close()
    Timed(share, work())  # dropped with a loop that was closed


async def test_time_spent_in_cancellation_cleanup_is_charged(share: TimeShare) -> None:
    async def cleans_up() -> bool:
        try:
            await asyncio.Event().wait()
        finally:
            advance_clock(BURST + 0.01)
        return True

    task = asyncio.Task(Timed(share, cleans_up()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert share.wait() == pytest.approx(0.01 * SHARE)
