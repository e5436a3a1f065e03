"""Reads, writes and atomics on the peer's memory.

Everything that can be known before posting is checked before posting: a range or a right that the
peer's device refuses costs the connection, one that is refused here costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from .. import verbs
from .._core.operations import OperationKind
from .._core.region import ATOMIC_SIZE, Rights
from ..mr_pool import Block, Buffer, LocalMemory, Region
from .memory import Memory
from .messages import Messages
from .sharing import RemoteRegion, RemoteSlice, Sharing
from .transfers import Atomic, Piece, Progress, Together
from .work_queue import WorkQueue

if TYPE_CHECKING:
    from typing_extensions import Buffer as BufferLike

Remote = RemoteRegion | RemoteSlice

# Unregistered memory up to this size is copied through the pool; beyond, it is registered for
# the one operation.  A copy of 64 KiB costs a few microseconds, a registration on a card tens.
STAGED = 64 << 10

# The longest single work request; longer transfers are several of them, one after another.
TRANSFER_SIZE = 8 << 20

Opcode = verbs.WROpcode


def buffer_view(data: BufferLike) -> memoryview:
    """Any contiguous buffer as bytes.  TypeError or BufferError for what is none."""
    view = memoryview(data)
    if not view.nbytes:
        return memoryview(bytearray())  # an empty array has a shape that cannot be cast
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")


def writable_view(data: BufferLike) -> memoryview:
    """As `buffer_view`; ValueError for what cannot be read into."""
    view = buffer_view(data)
    if view.readonly:
        raise ValueError(f"cannot read into {type(data).__name__}: it is read-only")
    return view


def staged(view: memoryview) -> bool:
    """Whether it goes through the pool."""
    return len(view) <= STAGED


def nothing() -> None:
    """For memory that needs no copying."""


# Registered memory that is read into, and what brings the bytes to where they are wanted.
Landing = tuple[LocalMemory, Callable[[], None]]


class OneSided:
    """The one-sided operations of one connection."""

    def __init__(
        self,
        queue: WorkQueue,
        messages: Messages,
        sharing: Sharing,
        memory: Memory,
        check: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._messages = messages
        self._memory = memory
        self._pool = memory.pool
        self._sharing = sharing
        self._check = check
        self._loop = asyncio.get_running_loop()

    async def write(
        self,
        source: LocalMemory | BufferLike,
        target: Remote,
        imm: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._check()
        with await self._source(source) as local:
            pieces = self.transfer(Opcode.RDMA_WRITE, local, target)
            if imm is None:
                await self._all(pieces, progress)
            else:
                await self._write_with_imm(pieces, local, target, imm, progress)

    async def read(
        self,
        source: Remote,
        target: LocalMemory | BufferLike,
        progress: Progress | None = None,
    ) -> None:
        self._check()
        with await self._target(target) as (local, landed):
            await self._all(self.transfer(Opcode.RDMA_READ, local, source), progress)
            landed()

    # ---- the local side ------------------------------------------------------------------

    async def _source(
        self, memory: LocalMemory | BufferLike
    ) -> AbstractContextManager[LocalMemory]:
        if isinstance(memory, LocalMemory):
            return nullcontext(memory)
        view = buffer_view(memory)
        staging = await self._memory.lease(len(view), brief=True) if staged(view) else None
        return self._with_bytes(view, staging)

    def source(self, memory: LocalMemory | BufferLike) -> AbstractContextManager[LocalMemory]:
        """Registered memory with these bytes, for the time of the operation.

        QuotaError when they would have to wait for memory of the pool.
        """
        if isinstance(memory, LocalMemory):
            return nullcontext(memory)
        view = buffer_view(memory)
        return self._with_bytes(view, self._pool.alloc(len(view)) if staged(view) else None)

    def _with_bytes(
        self, view: memoryview, staging: Buffer | None
    ) -> AbstractContextManager[LocalMemory]:
        if staging is None:
            return Region(self._pool.pd.reg_mr(view, verbs.AccessFlags.NONE))
        staging.view[:] = view
        return staging

    async def _target(self, memory: LocalMemory | BufferLike) -> AbstractContextManager[Landing]:
        if isinstance(memory, LocalMemory):
            return nullcontext((memory, nothing))
        view = writable_view(memory)
        staging = await self._memory.lease(len(view), brief=True) if staged(view) else None
        return self._landing(view, staging)

    def target(self, memory: LocalMemory | BufferLike) -> AbstractContextManager[Landing]:
        """Registered memory to read into, and what brings it to where it is wanted.

        QuotaError when it would have to wait for memory of the pool.
        """
        if isinstance(memory, LocalMemory):
            return nullcontext((memory, nothing))
        view = writable_view(memory)
        return self._landing(view, self._pool.alloc(len(view)) if staged(view) else None)

    @contextmanager
    def _landing(self, view: memoryview, staging: Buffer | None) -> Iterator[Landing]:
        if staging is None:
            with Region(self._pool.pd.reg_mr(view, verbs.AccessFlags.LOCAL_WRITE)) as region:
                yield region, nothing
        else:
            with staging:

                def copy() -> None:
                    view[:] = staging.view

                yield staging, copy

    # ---- transfers -----------------------------------------------------------------------

    def transfer(self, opcode: int, local: LocalMemory, remote: Remote) -> list[Piece]:
        """The pieces of a read or write that is allowed; raises for one that is not."""
        writing = opcode == Opcode.RDMA_WRITE
        self._usable(remote)
        remote.range.require(Rights.WRITE if writing else Rights.READ)
        if not writing and not local.writable:
            raise ValueError(f"cannot read into {local!r}: it is read-only")
        length = len(local)
        if length != len(remote):
            raise ValueError(f"{length} bytes here and {len(remote)} there: slice one of them")
        kind = OperationKind.WRITE if writing else OperationKind.READ
        return [
            Piece(kind, opcode, local, remote.range, start, min(TRANSFER_SIZE, length - start))
            for start in range(0, length, TRANSFER_SIZE)
        ]

    async def _all(self, pieces: list[Piece], progress: Progress | None) -> None:
        if len(pieces) == 1 and progress is None:
            future: asyncio.Future[None] = self._loop.create_future()
            self._queue.post(pieces[0].work(future))
            await future
        elif pieces:
            together = Together(self._loop, [piece.length for piece in reversed(pieces)], progress)
            self._queue.post_together([piece.work(together) for piece in pieces])
            await together.future

    async def _write_with_imm(
        self,
        pieces: list[Piece],
        local: LocalMemory,
        remote: Remote,
        imm: int,
        progress: Progress | None,
    ) -> None:
        """The last piece carries it, and takes its turn among the messages."""
        if not pieces:
            pieces = [Piece(OperationKind.WRITE, Opcode.RDMA_WRITE, local, remote.range, 0, 0)]
        last = pieces.pop()
        await self._all(pieces, progress)
        last.opcode = Opcode.RDMA_WRITE_WITH_IMM
        future: asyncio.Future[None] = self._loop.create_future()
        self._messages.write(last.work(future, imm), future)
        await future
        if progress is not None:
            progress(len(local))

    # ---- atomics -------------------------------------------------------------------------

    async def compare_and_swap(self, target: Remote, expected: int, desired: int) -> int:
        block = await self._memory.block(ATOMIC_SIZE)
        return await self._alone(self._compare_and_swap(block, target, expected, desired))

    async def fetch_and_add(self, target: Remote, add: int) -> int:
        block = await self._memory.block(ATOMIC_SIZE)
        return await self._alone(self._fetch_and_add(block, target, add))

    async def _alone(self, work: Atomic) -> int:
        self._queue.post(work)
        return await work.future

    def compare_and_swap_work(self, target: Remote, expected: int, desired: int) -> Atomic:
        """To be posted; QuotaError when it would have to wait for memory of the pool."""
        block = self._pool.block(ATOMIC_SIZE)
        return self._compare_and_swap(block, target, expected, desired)

    def fetch_and_add_work(self, target: Remote, add: int) -> Atomic:
        """To be posted; QuotaError when it would have to wait for memory of the pool."""
        return self._fetch_and_add(self._pool.block(ATOMIC_SIZE), target, add)

    def _compare_and_swap(
        self, block: Block, target: Remote, expected: int, desired: int
    ) -> Atomic:
        return self._atomic(
            block,
            OperationKind.COMPARE_AND_SWAP,
            Opcode.ATOMIC_CMP_AND_SWP,
            target,
            lambda: (unsigned("expected", expected), unsigned("desired", desired)),
        )

    def _fetch_and_add(self, block: Block, target: Remote, add: int) -> Atomic:
        return self._atomic(
            block,
            OperationKind.FETCH_AND_ADD,
            Opcode.ATOMIC_FETCH_AND_ADD,
            target,
            lambda: (any_sign("add", add), 0),
        )

    def _atomic(
        self,
        block: Block,
        kind: OperationKind,
        opcode: verbs.WROpcode,
        remote: Remote,
        operands: Callable[[], tuple[int, int]],
    ) -> Atomic:
        """An atomic that is allowed; one that is not raises, and gives the block back."""
        try:
            self._check()
            self._usable(remote)
            remote.range.require_atomic()
            compare_add, swap = operands()
        except BaseException:
            block.release()
            raise
        future: asyncio.Future[int] = self._loop.create_future()
        target = remote.range
        return Atomic(kind, opcode, block, target.address, target.rkey, compare_add, swap, future)

    def _usable(self, remote: Remote) -> None:
        region = remote.region if isinstance(remote, RemoteSlice) else remote
        region.check(self._sharing)


def unsigned(name: str, value: int) -> int:
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{name} must be an unsigned 64-bit number, not {value}")
    return value


def any_sign(name: str, value: int) -> int:
    """Modulo 2^64."""
    if not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"{name} must fit 64 bits, not {value}")
    return value % (1 << 64)
