"""Batches of operations that are posted with one doorbell and awaited together."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Self, TypeAlias

from .._core.arguments import integer
from .._core.async_only import AsyncContext
from .._core.operations import OperationKind
from .._core.region import ATOMIC_SIZE
from .._datapath.message import Counts
from .._datapath.one_sided import Batch as BatchOfTransfers
from .._datapath.one_sided import WRChain, new_chain, start
from .._datapath.session import Session
from .._event_loop.futures import settle
from ..errors import BufferStateError
from ..mr_pool import Buffer, LocalMemory
from ..verbs._memory.buffers import AnyMemory
from .arguments import check_remote_memory
from .memory import Memory, UserMemory
from .remote_memory import Remote, RemoteMemory

Atomics: TypeAlias = list[tuple[Buffer, asyncio.Future[int]]]


class Batch(BatchOfTransfers, AsyncContext):
    """A batch of reads, writes and atomics, posted together at the end of an `async with` block.

    The operations are posted in call order, with a single doorbell if the send queue has room. The
    end of the block waits for all operations to complete. Calls with invalid arguments raise
    immediately. If the block raises an exception, nothing is posted.

    The peer's device executes the operations in order. However, a read may return data from a later
    write, because verbs guarantee this order only with a fence. Do not read and write the same
    bytes in one batch.

    If you cancel the wait at the end of the block, operations that have been posted still complete,
    and their memory is held until then. The old values of atomics are lost. Operations that were
    waiting for room in the send queue are dropped, along with all later operations.
    """

    def __init__(
        self, session: Session, memory: Memory, check: Callable[[], None], counts: Counts
    ) -> None:
        self._session = session
        self._memory = memory
        self._check = check
        self._counts = counts
        self._latest_user_memory: UserMemory | None = None
        self._read_targets: list[UserMemory] = []
        self._atomics: Atomics = []

    def __len__(self) -> int:
        return len(self._chain) if self._chain is not None else 0

    def _check_collecting(self) -> WRChain:
        """Return the batch's chain. Raises an error if no operation may be added now."""
        if self._chain is None:
            raise BufferStateError("a batch can be used only inside its `async with` block")
        self._check()
        return self._chain

    # The compiled base class (one_sided.pyx) calls `_register_local` only for unregistered memory.
    # On registered memory, operations therefore report an ended connection only at the end of the
    # block.

    def _register_local(
        self, memory: LocalMemory | AnyMemory, remote: Remote, target: bool
    ) -> LocalMemory:
        """Register the local memory of an operation, and check its remote memory.

        `target` says whether the operation is a read, which fills the local memory.
        """
        self._check_collecting()
        check_remote_memory(remote, RemoteMemory)
        if isinstance(memory, LocalMemory):
            return memory
        registered = UserMemory(self._memory, memory, target=target)
        local = self._held.enter_context(registered)
        self._latest_user_memory = registered
        return local

    def _record_target(self) -> None:
        """Record that a read fills the memory that `_register_local` registered last."""
        assert self._latest_user_memory is not None
        self._read_targets.append(self._latest_user_memory)

    def compare_and_swap(self, target: Remote, expected: int, desired: int) -> asyncio.Future[int]:
        """Add a `Connection.compare_and_swap`. After the block, the future holds the old value."""
        return self._atomic(
            OperationKind.COMPARE_AND_SWAP, target, *swap_operands(expected, desired)
        )

    def fetch_and_add(self, target: Remote, add: int) -> asyncio.Future[int]:
        """Add a `Connection.fetch_and_add`. After the block, the future holds the old value."""
        return self._atomic(OperationKind.FETCH_AND_ADD, target, *add_operands(add))

    def _atomic(
        self, kind: OperationKind, target: Remote, compare_add: int, swap: int
    ) -> asyncio.Future[int]:
        chain = self._check_collecting()
        check_remote_memory(target, RemoteMemory)
        old = self._held.enter_context(self._memory.pool.alloc(ATOMIC_SIZE))
        chain.atomic(kind, old, target, compare_add, swap)
        future = self._queue.table.wakeups.loop.create_future()
        self._atomics.append((old, future))
        return future

    async def __aenter__(self) -> Self:
        if self._chain is not None:
            raise BufferStateError("this batch has already been entered")
        self._queue = self._session.lead
        self._held = ExitStack()  # closed at the end of the block
        self._collect(new_chain(self._queue, OperationKind.BATCH))
        return self

    async def __aexit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        assert self._chain is not None
        chain, self._chain = self._chain, None
        read_targets, self._read_targets = self._read_targets, []
        self._latest_user_memory = None
        atomics, self._atomics = self._atomics, []
        with self._held:
            try:
                if exc is None:
                    self._check()
                    await start(self._queue, chain)
                    for target in read_targets:
                        target.copy_back()
                    settle_atomics(atomics, None)
                    self._count(self._counts, len(atomics))
            except Exception as error:
                settle_atomics(atomics, error)
                raise
            finally:
                cancel_atomics(atomics)  # those that are still pending
                # An unposted chain is released only with its last reference. The traceback of an
                # error keeps this frame alive, so delete the frame's references.
                del chain, atomics


class MovingBatch(Batch):
    """A batch on a connection that may switch to another rail while it collects operations."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        assert self._chain is not None
        self._session.outbox.batches.add(self._chain)
        return self

    async def __aexit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        assert self._chain is not None
        error = self._session.outbox.remove_batch(self._chain)
        self._queue = self._session.lead  # the chain has moved with each change of the lead rail
        if exc is None and error is not None:
            await super().__aexit__(type(error), error, None)
            raise error
        await super().__aexit__(kind, exc, traceback)


def settle_atomics(atomics: Atomics, error: Exception | None) -> None:
    """Complete the futures with the old values, or with the error that the batch raises too."""
    for old, future in atomics:
        settle(future, None if error else atomic_value(old), error)


def cancel_atomics(atomics: Atomics) -> None:
    for _, future in atomics:
        future.cancel()


def swap_operands(expected: int, desired: int) -> tuple[int, int]:
    """Return the fields `compare_add` and `swap` of the work request."""
    return integer("expected", expected), integer("desired", desired)


def add_operands(add: int) -> tuple[int, int]:
    """Return the fields `compare_add` and `swap`, which is not used, of the work request."""
    return integer("add", add, -(1 << 63)) % (1 << 64), 0  # modulo 2^64


def atomic_value(old: Buffer) -> int:
    return int.from_bytes(old.view, sys.byteorder)
