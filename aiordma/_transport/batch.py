"""Operations that are posted together, with one doorbell, and waited for as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self

from .. import verbs
from ..errors import BufferStateError, WorkCompletionError
from ..mr_pool import LocalMemory
from .one_sided import OneSided, Remote
from .transfers import Atomic, Piece, Together
from .work_queue import Work, WorkQueue

if TYPE_CHECKING:
    from typing_extensions import Buffer as BufferLike


class Batch:
    """Reads, writes and atomics, collected in an `async with` and posted at its end.

    They go to the device in the order of the calls, with one doorbell as long as the send queue
    has room, and the end of the scope waits for all of them.  What is not allowed raises at once,
    from its own call.  An exception in the scope drops them all.  The peer's device carries them
    out in order; but what a read returns may be from after a later write (verbs: only a fence
    would hold it back), so do not read and write the same bytes in one batch.

    Cancelled while it waits, the operations are done nevertheless, with their memory held.
    """

    def __init__(self, one_sided: OneSided, queue: WorkQueue, check: Callable[[], None]) -> None:
        self._one_sided = one_sided
        self._queue = queue
        self._check = check
        self._loop = asyncio.get_running_loop()
        self._memory: ExitStack | None = None  # inside the scope
        self._items: list[Piece | Atomic] = []
        self._landed: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._items)

    def _collecting(self) -> ExitStack:
        if self._memory is None:
            raise BufferStateError("a batch collects inside its async with statement only")
        self._check()
        return self._memory

    def write(self, source: LocalMemory | BufferLike, target: Remote) -> None:
        """As `Connection.write`, done when the scope has ended."""
        local = self._collecting().enter_context(self._one_sided.source(source))
        self._items += self._one_sided.transfer(verbs.WROpcode.RDMA_WRITE, local, target)

    def read(self, source: Remote, target: LocalMemory | BufferLike) -> None:
        """As `Connection.read`; the bytes are there when the scope has ended."""
        local, landed = self._collecting().enter_context(self._one_sided.target(target))
        self._items += self._one_sided.transfer(verbs.WROpcode.RDMA_READ, local, source)
        self._landed.append(landed)

    def compare_and_swap(self, target: Remote, expected: int, desired: int) -> asyncio.Future[int]:
        """As `Connection.compare_and_swap`; the future has the old value after the scope."""
        self._collecting()
        return self._add(self._one_sided.compare_and_swap_work(target, expected, desired))

    def fetch_and_add(self, target: Remote, add: int) -> asyncio.Future[int]:
        """As `Connection.fetch_and_add`; the future has the old value after the scope."""
        self._collecting()
        return self._add(self._one_sided.fetch_and_add_work(target, add))

    def _add(self, atomic: Atomic) -> asyncio.Future[int]:
        self._items.append(atomic)
        return atomic.future

    async def __aenter__(self) -> Self:
        if self._memory is not None:
            raise BufferStateError("this batch is collecting already")
        self._memory = ExitStack()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._memory is not None
        memory, self._memory = self._memory, None
        items, self._items = self._items, []
        landed, self._landed = self._landed, []
        with memory:
            if exc is not None:
                drop(items)
                return
            try:
                self._check()
            except BaseException:
                drop(items)
                raise
            await self._run(items)
            for bring in landed:
                bring()

    async def _run(self, items: list[Piece | Atomic]) -> None:
        lengths = [item.length for item in reversed(items) if isinstance(item, Piece)]
        together = Together(self._loop, lengths)
        works: list[Work] = [
            item.work(together) if isinstance(item, Piece) else item for item in items
        ]
        self._queue.post_together(works)
        waiters: list[asyncio.Future[int] | asyncio.Future[None]] = [
            item.future for item in items if isinstance(item, Atomic)
        ]
        if lengths:
            waiters.append(together.future)
        if waiters:
            await asyncio.wait(waiters)
        failures = [error for waiter in waiters if (error := waiter.exception()) is not None]
        if failures:  # the others only tell that the connection ended with it
            raise next(
                (one for one in failures if isinstance(one, WorkCompletionError)), failures[0]
            )


def drop(items: list[Piece | Atomic]) -> None:
    """Nothing of it was posted."""
    for item in items:
        if isinstance(item, Atomic):
            item.future.cancel()
            item.release()
