"""Operations that are posted together, with one doorbell, and waited for as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Self, TypeVar

from .._core.operations import OperationKind
from .._datapath.channel import Counts
from .._datapath.futures import OpFuture
from .._datapath.one_sided import Batch as BatchOfTransfers
from .._datapath.one_sided import WRChain
from .._datapath.work_queue import SendQueue
from ..errors import BufferStateError
from ..mr_pool import LocalMemory
from ..verbs._memory.buffers import AnyMemory
from .one_sided import OneSided, Remote
from .transfers import Atomic, Batched

T = TypeVar("T")

NOTHING: AbstractContextManager[object] = nullcontext()


class Batch(BatchOfTransfers):
    """Reads, writes and atomics, collected in an `async with` and posted at its end.

    They go to the device in the order of the calls, with one doorbell as long as the send queue
    has room, and the end of the scope waits for all of them.  What is not allowed raises at once,
    from its own call.  An exception in the scope drops them all.  The peer's device carries them
    out in order; but what a read returns may be from after a later write (verbs: only a fence
    would hold it back), so do not read and write the same bytes in one batch.

    Cancelled while it waits, the operations that have been posted are done nevertheless, with their
    memory held; those that still waited for room are not, nor those behind them.
    """

    def __init__(
        self,
        one_sided: OneSided,
        queue: SendQueue,
        check: Callable[[], None],
        counts: Counts,
    ) -> None:
        self._one_sided = one_sided
        self._queue = queue
        self._check = check
        self._counts = counts
        self._memory: ExitStack | None = None
        self._atomics: list[Atomic] = []
        self._landed: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._transfer) if self._transfer is not None else 0

    def _collecting(self) -> WRChain:
        if self._transfer is None:
            raise BufferStateError("a batch collects inside its async with statement only")
        self._check()
        return self._transfer

    def _held(self, memory: AbstractContextManager[T]) -> T:
        """Until the end of the scope."""
        if self._memory is None:
            self._memory = ExitStack()
        return self._memory.enter_context(memory)

    # The common case is compiled (one_sided.pyx); the end of the scope checks the connection in any
    # case.

    def _write(self, source: LocalMemory | AnyMemory, target: Remote) -> None:
        transfer = self._collecting()
        local = self._held(self._one_sided.source(source))
        self._one_sided.add_write(transfer, local, target)

    def _read(self, source: Remote, target: LocalMemory | AnyMemory) -> None:
        transfer = self._collecting()
        local, landed = self._held(self._one_sided.target(target))
        self._one_sided.add_read(transfer, local, source)
        self._landed.append(landed)

    def compare_and_swap(self, target: Remote, expected: int, desired: int) -> asyncio.Future[int]:
        """As `Connection.compare_and_swap`; the future has the old value after the scope."""
        transfer = self._collecting()
        return self._add(self._one_sided.add_compare_and_swap(transfer, target, expected, desired))

    def fetch_and_add(self, target: Remote, add: int) -> asyncio.Future[int]:
        """As `Connection.fetch_and_add`; the future has the old value after the scope."""
        return self._add(self._one_sided.add_fetch_and_add(self._collecting(), target, add))

    def _add(self, atomic: Atomic) -> asyncio.Future[int]:
        self._atomics.append(atomic)
        return atomic.future

    async def __aenter__(self) -> Self:
        if self._transfer is not None:
            raise BufferStateError("this batch is collecting already")
        self._collect(self._one_sided.transfer(OperationKind.BATCH))
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._transfer is not None
        transfer, self._transfer = self._transfer, None
        atomics, self._atomics = self._atomics, []
        landed, self._landed = self._landed, []
        memory, self._memory = self._memory or NOTHING, None
        with memory:
            if exc is not None:
                drop(transfer, atomics)
                return
            try:
                self._check()
            except BaseException:
                drop(transfer, atomics)
                raise
            if transfer.entries:
                done = OpFuture(self._queue.table)
                transfer.waiter = Batched(done, atomics) if atomics else done
                self._queue.post(transfer)
                try:
                    await done
                except asyncio.CancelledError:
                    self._queue.withdraw((transfer,))
                    raise
                finally:
                    del done  # the frames of its error have this one
            for bring in landed:
                bring()
            self._count(self._counts, len(atomics))


def drop(transfer: WRChain, atomics: list[Atomic]) -> None:
    """Releases a batch of which nothing was posted."""
    transfer.release()
    for atomic in atomics:
        atomic.cancel()
