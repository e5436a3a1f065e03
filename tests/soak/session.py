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
from .streams import Stream
from .tally import Tally

# An owner that leaves takes back what it shared.
ENDS = (ConnectionBrokenError, ConnectionClosedError, LeaseEndedError, WorkCompletionError)
PARTS: dict[str, type[Part[Connection]]] = {"messages": Messages, "memory": Memory}


async def talk(conn: Connection, plan: Plan, side: str, patterns: Patterns, tally: Tally) -> None:
    """Run this side's part of the plan, with its end."""
    await PARTS[plan.kind](conn, plan, side, patterns, tally).run()
    await finish(conn, plan, side)
    tally.count(f"ended: {plan.ending}")


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


async def stream(
    ends: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    plan: Plan,
    side: str,
    patterns: Patterns,
    tally: Tally,
) -> None:
    """Run this side's part of a stream."""
    part = Stream(ends, plan, side, patterns, tally)
    await part.run()
    await part.close(abort=plan.ending == f"{side} aborts")
    tally.count(f"ended: {plan.ending}")


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
    ends: tuple[type[BaseException], ...] = ENDS
    if plan.kind == "stream":  # an aborted stream may lose data in flight
        may_break = may_break or plan.ending.endswith("aborts")
        ends = (ConnectionError,)
    return not kinds or (may_break and all(isinstance(one, ends) for one in kinds))
