"""What one task waits for is a future to asyncio."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import weakref
from typing import Any

import pytest

from aiordma._native import Promise, Table

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="outside")


def new_table() -> Table:
    table = Table()
    table.loop = asyncio.get_running_loop()
    return table


def promise() -> Promise:
    return Promise(new_table())


async def turn() -> None:
    await asyncio.sleep(0)


async def test_a_task_waits_for_it() -> None:
    one = promise()
    assert asyncio.isfuture(one)
    assert one.get_loop() is asyncio.get_running_loop()

    async def wait() -> str:
        await one
        return "done"

    task = asyncio.create_task(wait())
    await turn()
    assert not one.done()
    one.set_result(None)
    assert one.done()
    assert await task == "done"
    assert one.result() is None
    assert one.exception() is None
    await one  # again: at once


async def test_its_failure_is_raised_where_it_is_awaited() -> None:
    one = promise()
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
    one.set_result(None)  # it is over: nothing changes
    with pytest.raises(LookupError):
        one.result()


async def test_it_is_cancelled_with_its_task() -> None:
    one = promise()

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


async def test_a_task_that_is_cancelled_when_it_is_done_is_cancelled() -> None:
    one = promise()

    async def wait() -> None:
        await one

    task = asyncio.create_task(wait())
    await turn()
    one.set_result(None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not one.cancelled()


async def test_callbacks_come_in_their_order_and_context() -> None:
    one = promise()
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


async def test_asyncio_takes_it_for_a_future() -> None:
    several = [promise() for _ in range(4)]
    together = asyncio.gather(*several[:2])
    shielded = asyncio.shield(several[2])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(several[3], 0)
    assert several[3].cancelled()
    for one in several:
        one.set_result(None)
    assert await together == [None, None]
    await shielded
    gone = asyncio.gather(promise(), several[3], return_exceptions=True)
    assert isinstance((await asyncio.gather(several[3], return_exceptions=True))[0], BaseException)
    gone.cancel("because")
    with pytest.raises(asyncio.CancelledError):
        await gone
    done, pending = await asyncio.wait([asyncio.ensure_future(one) for one in several])
    assert (len(done), len(pending)) == (4, 0)


async def test_wrong_arguments() -> None:
    one: Any = promise()
    for call in (
        lambda: Promise(*[]),
        lambda: one.cancel("one", "two"),
        lambda: one.cancel(message="x"),
        one.add_done_callback,
        lambda: one.add_done_callback(print, contexts=None),
    ):
        with pytest.raises(TypeError):
            call()
    assert not one.done()


async def test_it_is_collected_with_what_waits_for_it() -> None:
    class Circle:
        def __init__(self) -> None:
            self.promise = promise()
            self.promise.target = self
            self.promise.add_done_callback(self.called)
            self.promise.add_done_callback(self.called)

        def called(self, future: object) -> None:
            raise AssertionError

    circle = weakref.ref(Circle())
    gc.collect()
    assert circle() is None


# ---- the look before the wait --------------------------------------------------------------------


LONG, GLANCE = 3, 0


class Looks:
    """Of a table's tasks; each settles the next of `found`, if there is one."""

    def __init__(self) -> None:
        self.table = new_table()
        self.table.look = self.look
        self.table.look_us = LONG
        self.lasted: list[int] = []
        self.found: list[Promise] = []

    @property
    def count(self) -> int:
        return len(self.lasted)

    def look(self, spin_us: int) -> None:
        self.lasted.append(spin_us)
        for one in self.found[:1]:
            self.found.remove(one)
            one.set_result(None)

    def promise(self) -> Promise:
        return Promise(self.table)

    async def wait(self, *, here: bool) -> None:
        """For one that a look finds, or that the loop brings."""
        one = self.promise()
        if here:
            self.found = [one]
        else:
            asyncio.get_running_loop().call_soon(one.set_result, None)
        await one


async def test_what_a_look_finds_does_not_go_round_the_loop() -> None:
    looks = Looks()
    turns: list[None] = []
    asyncio.get_running_loop().call_soon(turns.append, None)
    await looks.wait(here=True)
    assert (looks.count, turns) == (1, [])
    await looks.wait(here=False)
    assert (looks.count, turns) == (2, [None])


async def test_a_look_finds_failures_too() -> None:
    looks = Looks()
    one = looks.promise()
    looks.table.look = lambda _: one.set_exception(LookupError("no"))
    with pytest.raises(LookupError, match="no"):
        await one


async def test_the_loop_has_its_turn_after_so_many_looks() -> None:
    looks = Looks()
    for _ in range(16):
        await looks.wait(here=True)
    assert looks.count == 16
    await looks.wait(here=False)
    assert looks.count == 16


async def test_looks_in_vain_become_rare() -> None:
    """Between them are glances, which find what is here."""
    looks = Looks()
    for _ in range(16):
        await looks.wait(here=False)
    glances = [[LONG] + [GLANCE] * some for some in (1, 3, 7, 1)]  # 15, but the loop has its turn
    assert looks.lasted == [spin_us for some in glances for spin_us in some]
    looks = Looks()
    await looks.wait(here=False)
    for _ in range(3):
        await looks.wait(here=True)
    assert looks.lasted == [LONG, GLANCE, LONG, LONG]  # it has paid: no glance again


async def test_no_task_polls_while_others_wait() -> None:
    looks = Looks()
    others = [asyncio.ensure_future(looks.promise()) for _ in range(2)]
    for other in others:
        other.add_done_callback(lambda _: None)
    assert looks.table.waiting == 2
    await looks.wait(here=False)
    assert looks.count == 0
    others.pop().cancel()
    await looks.wait(here=True)
    assert looks.count == 1


async def test_how_many_wait_is_known_whatever_becomes_of_them() -> None:
    table = new_table()
    one = Promise(table)

    def called(_: object) -> None:
        """Nothing is to be done."""

    one.add_done_callback(called)
    one.add_done_callback(called)
    assert table.waiting == 1
    assert one.remove_done_callback(called) == 2
    assert table.waiting == 0
    one.add_done_callback(called)
    one.set_result(None)
    one.add_done_callback(called)  # by the loop, as it is over
    assert table.waiting == 0
    dropped = Promise(table)
    dropped.add_done_callback(called)
    assert table.waiting == 1
    del dropped
    assert table.waiting == 0


async def test_what_a_look_raises_is_raised_where_it_is_awaited() -> None:
    looks = Looks()

    def interrupted(_: int) -> None:
        looks.table.look = None
        raise KeyboardInterrupt

    looks.table.look = interrupted
    one = looks.promise()
    with pytest.raises(KeyboardInterrupt):
        await one
    assert not one.done()
    asyncio.get_running_loop().call_soon(one.set_result, None)
    await one
