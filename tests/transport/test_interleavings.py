"""Everything at once, in any order, on both ends, against a model (`programs.py`)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiordma.errors import WorkCompletionError

from .connection_factory import SMALL, ConnectionFactory
from .marks import one_loop
from .programs import ENDED, LAST, PROGRAMS, STEPS, End, play

Program = list[tuple[Any, ...]]
FUZZ = settings(
    max_examples=min(8, settings().max_examples),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


LARGEST = st.sampled_from([SMALL.eager_size, 8 << 10])  # receives that grow, too

# What a task may end with once its connection has ended.  Whose own operation failed, by a key that
# was taken back under it for instance, hears what the device told of it.
EXPECTED = (*ENDED, WorkCompletionError)


async def run_program(
    factory: ConnectionFactory, most: int, program: Program, rest: Program | None
) -> None:
    """Plays it, lets all of it come to its end, and looks at what there is then.

    With a `rest`, which begins with the end of the connection, everything ends with that.
    """
    config = replace(SMALL, max_eager_size=most, max_regions=64, close_timeout=0.3 * factory.slow)
    async with factory.pair(config) as (client, server):
        first, second = ends = End(client), End(server)
        drivers = {end.conn._endpoint.driver for end in ends}
        await asyncio.gather(first.open(second), second.open(first))
        try:
            async with factory.within(10):
                await play(ends, program + (rest or []))
                if rest is None:
                    await settle(first, second)
                if tasks := tasks_of(ends):
                    await asyncio.wait(tasks)
        finally:  # of a test that fails
            for task in tasks_of(ends):
                task.cancel()
    for ended in tasks_of(ends):
        error = None if ended.cancelled() else ended.exception()
        if error is not None and (rest is None or not isinstance(error, EXPECTED)):
            raise error
    for end in ends:
        end.check(complete=rest is None)
        await end.empty()
    for driver in drivers:
        assert not len(driver.table)
        assert not driver.pool.statistics().leases


def tasks_of(ends: tuple[End, End]) -> list[asyncio.Future[None]]:
    return [task for end in ends for task in end.tasks]


async def settle(first: End, second: End) -> None:
    """Both send a last message, and receive all until that of the other."""
    for end in (first, second):
        end.start(end.conn.send(b"", imm=LAST))
    await asyncio.gather(first.drain(), second.drain())


@FUZZ
@given(most=LARGEST, program=PROGRAMS)
async def test_whatever_is_done_nothing_is_lost(
    factory: ConnectionFactory, most: int, program: Program
) -> None:
    await run_program(factory, most, program, None)


ENDINGS = st.tuples(st.sampled_from(["close", "abort"]), st.integers(0, 1))


@one_loop
@FUZZ
@given(most=LARGEST, program=PROGRAMS, ending=ENDINGS, rest=st.lists(STEPS | ENDINGS, max_size=8))
async def test_whenever_it_ends_everything_ends(
    factory: ConnectionFactory, most: int, program: Program, ending: tuple[str, int], rest: Program
) -> None:
    await run_program(factory, most, program, [ending, *rest])
