"""Tests of OpFuture, an asyncio future that is completed by polling for completions."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import weakref
from functools import partial
from typing import Any

import pytest

from aiordma._datapath.futures import OpFuture, Wakeups

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="outside")


def new_future() -> OpFuture:
    return OpFuture(Wakeups(asyncio.get_running_loop()))


async def turn() -> None:
    await asyncio.sleep(0)


async def test_future_raises_its_exception_when_awaited() -> None:
    one = new_future()
    error = LookupError("no")
    with pytest.raises(asyncio.InvalidStateError):
        one.result()
    with pytest.raises(asyncio.InvalidStateError):
        one.exception()
    asyncio.get_running_loop().call_soon(one.set_exception, error)
    with pytest.raises(LookupError) as caught:
        await one
    assert caught.value is error
    assert one.exception() is error
    one.set_result(None)  # no effect on a finished future
    with pytest.raises(LookupError):
        one.result()


async def test_future_is_cancelled_with_its_task() -> None:
    one = new_future()

    async def wait() -> None:
        await one

    task = asyncio.create_task(wait())
    await turn()
    task.cancel("because")
    with pytest.raises(asyncio.CancelledError, match="because"):
        await task
    assert one.cancelled()
    assert not one.cancel()
    with pytest.raises(asyncio.CancelledError, match="because"):
        one.result()
    with pytest.raises(asyncio.CancelledError):
        one.exception()
    one.set_exception(LookupError())
    assert one.cancelled()


async def test_done_callbacks_run_in_order_in_their_own_context() -> None:
    one = new_future()
    seen: list[tuple[str, object, str]] = []

    def note(name: str) -> Any:
        return lambda future: seen.append((name, future, VARIABLE.get()))

    inside = contextvars.copy_context()
    inside.run(VARIABLE.set, "inside")
    removed = note("removed")
    one.add_done_callback(removed)
    one.add_done_callback(note("first"))
    one.add_done_callback(note("second"), context=inside)
    one.add_done_callback(removed)
    assert one.remove_done_callback(removed) == 2
    assert one.remove_done_callback(removed) == 0
    one.set_result(None)
    assert seen == []
    await turn()
    one.add_done_callback(note("late"))
    await turn()
    expected = [("first", one, "outside"), ("second", one, "inside"), ("late", one, "outside")]
    assert seen == expected


async def test_asyncio_accepts_op_future() -> None:
    several = [new_future() for _ in range(4)]
    together = asyncio.gather(*several[:2])
    shielded = asyncio.shield(several[2])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(several[3], 0)
    assert several[3].cancelled()
    for one in several:
        one.set_result(None)
    assert await together == [None, None]
    await shielded
    gone = asyncio.gather(new_future(), several[3], return_exceptions=True)
    assert isinstance((await asyncio.gather(several[3], return_exceptions=True))[0], BaseException)
    gone.cancel("because")
    with pytest.raises(asyncio.CancelledError):
        await gone
    done, pending = await asyncio.wait([asyncio.ensure_future(one) for one in several])
    assert (len(done), len(pending)) == (4, 0)


async def test_future_in_a_cycle_is_collected() -> None:
    class Circle(OpFuture):
        pass

    def called(_: object) -> None:
        raise AssertionError

    wakeups = Wakeups(asyncio.get_running_loop())
    circle = Circle(wakeups)
    circle.add_done_callback(partial(called, circle))
    circle.add_done_callback(partial(called, circle))
    gone = weakref.ref(circle)
    del circle
    gc.collect()
    assert gone() is None
    assert wakeups.waiting == 0


# ---- the brief spin before the wait --------------------------------------------------------------


LONG, SHORT = 3, 0


class Spins:
    """Replaces and records a loop's brief spins. A spin completes the first future in `found`."""

    def __init__(self) -> None:
        self.wakeups = Wakeups(asyncio.get_running_loop())
        self.wakeups.poll_for = self.spin
        self.wakeups.brief_spin_us = LONG
        self.lasted: list[int] = []
        self.found: list[OpFuture] = []

    @property
    def count(self) -> int:
        return len(self.lasted)

    def spin(self, spin_us: int) -> None:
        self.lasted.append(spin_us)
        for one in self.found[:1]:
            self.found.remove(one)
            one.set_result(None)

    def future(self) -> OpFuture:
        return OpFuture(self.wakeups)

    async def wait(self, *, here: bool) -> None:
        """Wait for a future completed by a spin if `here`, or by the loop otherwise."""
        one = self.future()
        if here:
            self.found = [one]
        else:
            asyncio.get_running_loop().call_soon(one.set_result, None)
        await one


async def test_long_spins_become_rare_while_they_find_nothing() -> None:
    """Long spins become rare. A short spin only finds results that are already there."""
    spins = Spins()
    for _ in range(16):
        await spins.wait(here=False)
    runs = [[LONG] + [SHORT] * some for some in (1, 3, 7, 1)]  # the last run is cut short
    assert spins.lasted == [spin_us for some in runs for spin_us in some]
    spins = Spins()
    await spins.wait(here=False)
    for _ in range(3):
        await spins.wait(here=True)
    assert spins.lasted == [LONG, SHORT, LONG, LONG]  # long spins resume after a successful one


async def test_task_does_not_spin_while_several_futures_are_pending() -> None:
    spins = Spins()
    others = [asyncio.ensure_future(spins.future()) for _ in range(2)]
    for other in others:
        other.add_done_callback(lambda _: None)
    assert spins.wakeups.waiting == 2
    await spins.wait(here=False)
    assert spins.count == 0
    others.pop().cancel()
    await spins.wait(here=True)
    assert spins.count == 1


async def test_wakeups_waiting_counts_pending_futures_with_callbacks() -> None:
    wakeups = Wakeups(asyncio.get_running_loop())
    one = OpFuture(wakeups)

    def called(_: object) -> None:
        """Do nothing."""

    one.add_done_callback(called)
    one.add_done_callback(called)
    assert wakeups.waiting == 1
    assert one.remove_done_callback(called) == 2
    assert wakeups.waiting == 0
    one.add_done_callback(called)
    one.set_result(None)
    one.add_done_callback(called)  # called by the loop, since the future is done
    assert wakeups.waiting == 0
    dropped = OpFuture(wakeups)
    dropped.add_done_callback(called)
    assert wakeups.waiting == 1
    del dropped
    assert wakeups.waiting == 0


async def test_await_raises_an_exception_from_the_spin() -> None:
    spins = Spins()

    def interrupted(_: int) -> None:
        spins.wakeups.poll_for = None
        raise KeyboardInterrupt

    spins.wakeups.poll_for = interrupted
    one = spins.future()
    with pytest.raises(KeyboardInterrupt):
        await one
    assert not one.done()
    asyncio.get_running_loop().call_soon(one.set_result, None)
    await one
