"""Reads, writes and atomics on the peer's memory.

Everything that can be known before posting is checked before posting: a range or a right that the
peer's device refuses costs the connection, one that is refused here costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

from .. import verbs
from .._core.arguments import integer
from .._core.operations import OperationKind
from .._core.region import ATOMIC_SIZE, Rights
from .._datapath.channel import MessageChannel
from .._datapath.futures import OpFuture
from .._datapath.one_sided import TRANSFER_SIZE, WRChain
from .._datapath.work_queue import SendQueue
from ..mr_pool import Block, Buffer, LocalMemory
from ..verbs._memory.buffers import AnyMemory, bytes_of, keeper_of
from .arguments import remote_memory
from .memory import STAGING_LIMIT, Memory
from .remote_memory import RemoteMemory, RemoteRegion, RemoteSlice
from .sharing import Sharing
from .transfers import Atomic, Pieces, Progress, check_progress

Remote = RemoteRegion | RemoteSlice

T = TypeVar("T")

WRITE = int(verbs.WROpcode.RDMA_WRITE)
WRITE_WITH_IMM = int(verbs.WROpcode.RDMA_WRITE_WITH_IMM)
READ = int(verbs.WROpcode.RDMA_READ)
COMPARE_AND_SWAP = int(verbs.WROpcode.ATOMIC_CMP_AND_SWP)
FETCH_AND_ADD = int(verbs.WROpcode.ATOMIC_FETCH_AND_ADD)


def writable_view(data: AnyMemory) -> memoryview:
    """As `bytes_of`; ValueError for what cannot be read into."""
    view = bytes_of(data)
    if view.readonly:
        view.release()
        raise ValueError(f"cannot read into {type(data).__name__}: it is read-only")
    return view


def staged(view: memoryview) -> bool:
    """Whether it is copied through the pool."""
    return len(view) <= STAGING_LIMIT


def noop() -> None:
    """For memory that needs no copying."""


# Registered memory that is read into, and what brings the bytes to where they are wanted.
Landing = tuple[LocalMemory, Callable[[], None]]


class OneSided:
    """The one-sided operations of one connection."""

    def __init__(
        self,
        queue: SendQueue,
        messages: MessageChannel,
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
        source: LocalMemory | AnyMemory,
        target: Remote,
        imm: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._check()
        check_progress(progress)
        with await self._source(source) as local:
            if imm is None:
                transfer = self.transfer(OperationKind.WRITE)
                self.add_write(transfer, local, target)
                await self._run(transfer, progress)
            else:
                await self._write_with_imm(local, target, imm, progress)

    async def read(
        self,
        source: Remote,
        target: LocalMemory | AnyMemory,
        progress: Progress | None = None,
    ) -> None:
        self._check()
        check_progress(progress)
        with await self._target(target) as (local, landed):
            transfer = self.transfer(OperationKind.READ)
            self.add_read(transfer, local, source)
            await self._run(transfer, progress)
            landed()

    # ---- the local side ------------------------------------------------------------------

    async def _source(self, memory: LocalMemory | AnyMemory) -> AbstractContextManager[LocalMemory]:
        if isinstance(memory, LocalMemory):
            return nullcontext(memory)
        with bytes_of(memory) as view:
            _keeper = keeper_of(view)
            staging = await self._memory.lease(len(view), internal=True) if staged(view) else None
            return self._with_bytes(memory, view, staging)

    def source(self, memory: LocalMemory | AnyMemory) -> AbstractContextManager[LocalMemory]:
        """Registered memory with these bytes, for the time of the operation.

        QuotaError when they would have to wait for memory of the pool.
        """
        if isinstance(memory, LocalMemory):
            return nullcontext(memory)
        with bytes_of(memory) as view:
            staging = self._pool.alloc(len(view)) if staged(view) else None
            return self._with_bytes(memory, view, staging)

    def _with_bytes(
        self, memory: AnyMemory, view: memoryview, staging: Buffer | None
    ) -> AbstractContextManager[LocalMemory]:
        if staging is None:
            return self._memory.register(memory, view)
        staging.view[:] = view
        return staging

    async def _target(self, memory: LocalMemory | AnyMemory) -> AbstractContextManager[Landing]:
        if isinstance(memory, LocalMemory):
            return nullcontext((memory, noop))
        view = writable_view(memory)
        try:
            staging = await self._memory.lease(len(view), internal=True) if staged(view) else None
        except BaseException:
            view.release()
            raise
        return self._landing(memory, view, staging)

    def target(self, memory: LocalMemory | AnyMemory) -> AbstractContextManager[Landing]:
        """Registered memory to read into, and what brings it to where it is wanted.

        QuotaError when it would have to wait for memory of the pool.
        """
        if isinstance(memory, LocalMemory):
            return nullcontext((memory, noop))
        view = writable_view(memory)
        try:
            staging = self._pool.alloc(len(view)) if staged(view) else None
        except BaseException:
            view.release()
            raise
        return self._landing(memory, view, staging)

    @contextmanager
    def _landing(
        self, memory: AnyMemory, view: memoryview, staging: Buffer | None
    ) -> Iterator[Landing]:
        if staging is None:
            with self._memory.register(memory, view) as region:
                yield region, noop
        else:
            _keeper = keeper_of(view)
            with staging, view:

                def copy() -> None:
                    view[:] = staging.view

                yield staging, copy

    # ---- transfers -----------------------------------------------------------------------

    def transfer(self, kind: OperationKind) -> WRChain:
        return WRChain(self._sharing, kind)

    def add_write(self, transfer: WRChain, local: LocalMemory, remote: Remote) -> None:
        """Adds a write that is allowed; raises for one that is not."""
        if not transfer.write(local, remote):
            self._allowed(local, remote, Rights.WRITE)
            put(transfer, WRITE, local, remote, 0, len(local))

    def add_read(self, transfer: WRChain, local: LocalMemory, remote: Remote) -> None:
        """Adds a read that is allowed; raises for one that is not."""
        if not transfer.read(local, remote):
            self._allowed(local, remote, Rights.READ)
            put(transfer, READ, local, remote, 0, len(local))

    def _allowed(self, local: LocalMemory, remote: Remote, right: Rights) -> None:
        remote_memory(remote, RemoteMemory)._check(self._sharing)
        remote._range.require(right)
        if right is Rights.READ and not local.writable:
            raise ValueError(f"cannot read into {local!r}: it is read-only")
        if len(local) != len(remote):
            raise ValueError(f"{len(local)} bytes here and {len(remote)} there: slice one of them")

    async def _run(self, transfer: WRChain, progress: Progress | None) -> None:
        if not transfer.entries:
            return
        transfer.waiter = done = OpFuture(self._queue.table)
        runs = [transfer]
        if progress is not None:
            runs = one_by_one(transfer, Pieces(done, transfer.lengths, progress))
        for run in runs:
            self._queue.post(run)
        try:
            await self._end(done, runs)
        finally:
            del done  # the frames of its error have this one

    async def _end(self, done: Awaitable[T], runs: list[WRChain]) -> T:
        """Waits for the requests; cancelled, withdraws those that have not been posted."""
        try:
            return await done
        except asyncio.CancelledError:
            self._queue.withdraw(runs)
            raise
        finally:
            del done

    async def _write_with_imm(
        self, local: LocalMemory, remote: Remote, imm: int, progress: Progress | None
    ) -> None:
        """The last piece carries it, and takes its turn among the messages.

        It is done after all others, so they tell the future only of a failure.
        """
        self._allowed(local, remote, Rights.WRITE)
        length = len(local)
        before = max(0, length - 1) // TRANSFER_SIZE * TRANSFER_SIZE
        future: asyncio.Future[None] = self._loop.create_future()
        others = WRChain(self._sharing, OperationKind.WRITE, future)
        others.partial = True
        put(others, WRITE, local, remote, 0, before)
        last = WRChain(self._sharing, OperationKind.WRITE, future)
        put(last, WRITE_WITH_IMM, local, remote, before, length, imm)
        runs = [others] if others.entries else []
        if progress is not None:
            last.waiter = pieces = Pieces(future, others.lengths + last.lengths, progress)
            runs = one_by_one(others, pieces)
        for run in runs:
            self._queue.post(run)
        if future.done():  # the queue pair has failed meanwhile
            last.release()
        else:
            self._messages.write(last, future)
        try:
            await self._end(future, runs)
        except asyncio.CancelledError:
            self._messages.withdraw(future)
            raise
        finally:
            del future

    # ---- atomics -------------------------------------------------------------------------

    async def compare_and_swap(self, target: Remote, expected: int, desired: int) -> int:
        numbers = swap_numbers(expected, desired)
        return await self._alone(OperationKind.COMPARE_AND_SWAP, COMPARE_AND_SWAP, target, numbers)

    async def fetch_and_add(self, target: Remote, add: int) -> int:
        numbers = add_numbers(add)
        return await self._alone(OperationKind.FETCH_AND_ADD, FETCH_AND_ADD, target, numbers)

    async def _alone(
        self, kind: OperationKind, opcode: int, target: Remote, numbers: tuple[int, int]
    ) -> int:
        self._check()  # first: the pool may have gone with the last connection
        block = await self._memory.block(ATOMIC_SIZE)
        transfer = self.transfer(kind)
        transfer.waiter = atomic = self._atomic(transfer, block, opcode, target, numbers)
        self._queue.post(transfer)
        try:
            return await self._end(atomic.future, [transfer])
        finally:
            del atomic

    def add_compare_and_swap(
        self, transfer: WRChain, target: Remote, expected: int, desired: int
    ) -> Atomic:
        """Adds one; QuotaError when it would have to wait for memory of the pool."""
        numbers = swap_numbers(expected, desired)
        block = self._pool.block(ATOMIC_SIZE)
        return self._atomic(transfer, block, COMPARE_AND_SWAP, target, numbers)

    def add_fetch_and_add(self, transfer: WRChain, target: Remote, add: int) -> Atomic:
        """Adds one; QuotaError when it would have to wait for memory of the pool."""
        numbers = add_numbers(add)
        block = self._pool.block(ATOMIC_SIZE)
        return self._atomic(transfer, block, FETCH_AND_ADD, target, numbers)

    def _atomic(
        self,
        transfer: WRChain,
        block: Block,
        opcode: int,
        remote: Remote,
        numbers: tuple[int, int],
    ) -> Atomic:
        """Adds an atomic that is allowed; one that is not raises, and gives the block back."""
        try:
            self._check()
            remote_memory(remote, RemoteMemory)._check(self._sharing)
            remote._range.require_atomic()
        except BaseException:
            block.release()
            raise
        transfer.put(
            opcode, block, block.address, ATOMIC_SIZE, block.lkey, remote, remote.address, 0,
            *numbers,
        )  # fmt: skip
        return Atomic(block, self._loop.create_future())


def one_by_one(transfer: WRChain, pieces: Pieces) -> list[WRChain]:
    """Its requests as runs that tell `pieces`, each when it is done."""
    runs = [transfer.part(1) for _ in range(transfer.entries)]
    for run in runs:
        run.waiter, run.partial = pieces, False
    return runs


def put(
    transfer: WRChain,
    opcode: int,
    local: LocalMemory,
    remote: Remote,
    start: int,
    stop: int,
    imm: int = 0,
) -> None:
    """Adds `[start:stop]` in pieces; nothing at all is a piece only if it carries `imm`."""
    local.pin()  # raises after its release
    try:
        for at in range(start, stop, TRANSFER_SIZE) or [start][: opcode == WRITE_WITH_IMM]:
            length = min(TRANSFER_SIZE, stop - at)
            there = remote.address + at
            transfer.put(
                opcode, local.root.pinned, local.address + at, length, local.lkey, remote, there,
                imm,
            )  # fmt: skip
    finally:
        local.unpin()


def swap_numbers(expected: int, desired: int) -> tuple[int, int]:
    return integer("expected", expected), integer("desired", desired)


def add_numbers(add: int) -> tuple[int, int]:
    return integer("add", add, -(1 << 63)) % (1 << 64), 0  # modulo 2^64
