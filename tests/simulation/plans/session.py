"""One connection from its beginning to its end, on either side."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from aiordma import (
    Connection,
    ConnectionBrokenError,
    ConnectionClosedError,
    LeaseEndedError,
    WorkCompletionError,
)

from .memory import Memory
from .messages import LAST, Messages
from .part import Part
from .pattern import Patterns, Wrong
from .plan import CLIENT, Plan

# An owner that leaves takes back what it shared.
ENDS = (ConnectionBrokenError, ConnectionClosedError, LeaseEndedError, WorkCompletionError)
PARTS: dict[str, type[Part]] = {"messages": Messages, "memory": Memory}


async def talk(conn: Connection, plan: Plan, side: str, patterns: Patterns) -> None:
    """Run this side's part of the plan, with its end."""
    await PARTS[plan.kind](conn, plan, side, patterns).run()
    await finish(conn, plan, side)


async def finish(conn: Connection, plan: Plan, side: str) -> None:
    aborts = plan.ending.endswith("aborts")
    if plan.ending.startswith(side):
        if plan.leaves:
            return
        if aborts:  # an abort loses data in flight, so wait until the peer has everything
            with await conn.recv() as message:
                if message.imm != LAST:
                    raise Wrong(f"{message!r} instead of the last")
            conn.abort()
        await conn.close()
        return
    try:
        if aborts:  # the peer may abort before it confirms
            await conn.send(b"", imm=LAST)
        with await conn.recv() as message:
            raise Wrong(f"{message!r} after the last")
    except ConnectionClosedError as error:
        if aborts or not error.by_peer:
            raise
    except ConnectionBrokenError:
        if not aborts:
            raise


def causes(error: BaseException) -> Iterator[BaseException]:
    """The exceptions in a group of groups."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from causes(one)
    else:
        yield error


def as_planned(error: BaseException, plan: Plan, side: str) -> bool:
    """Whether the plan allows this end."""
    kinds = [*causes(error)]
    if plan.leaves and side == CLIENT:
        kinds = [one for one in kinds if not isinstance(one, asyncio.CancelledError)]
    may_break = plan.leaves or not plan.strict
    return not kinds or (may_break and all(isinstance(one, ENDS) for one in kinds))
