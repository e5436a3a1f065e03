"""Helpers that use internals of a connection which programs cannot access."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar, cast

from aiordma import Connection

T = TypeVar("T")


def figures(conn: Connection) -> dict[str, int]:
    """Return the connection's internal counters, such as messages waiting and frames in flight."""
    return conn._messages.figures()


class Begun(Generic[T]):
    """A `send` or `recv` that has started and is waiting. Any task may await its result.

    `tell` is called when an awaited future is done, before the awaiting task continues.
    """

    def __init__(self, operation: Awaitable[T], tell: Callable[[], object] = lambda: None) -> None:
        self._operation = cast("Generator[asyncio.Future[None], None, T]", operation)
        self._tell = tell
        self._waits_for = self._next()

    def _next(self) -> asyncio.Future[None]:
        future = self._operation.send(None)
        future.add_done_callback(lambda _: self._tell())
        return future

    def __await__(self) -> Generator[Any, None, T]:
        try:
            while True:
                try:
                    yield self._waits_for
                    self._waits_for = self._next()
                except StopIteration as end:
                    return cast("T", end.value)
        except BaseException as error:
            self._operation.throw(error)
            raise

    async def task(self) -> T:
        """Return the result, as a coroutine for `create_task`."""
        return await self
