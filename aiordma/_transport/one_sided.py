"""Reads, writes and atomics on the peer's memory.

Everything that can be known before posting is checked before posting: a range or a right that the
peer's device refuses costs the connection, one that is refused here costs nothing.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from .. import verbs
from .._core.operations import OperationKind
from .._core.region import ATOMIC_SIZE, Rights
from ..mr_pool import Block, LocalMemory, MemoryPool, Region
from .sharing import RemoteRegion, RemoteSlice, Sharing
from .work_queue import SIGNALED, Work, WorkQueue

if TYPE_CHECKING:
    from typing_extensions import Buffer as BufferLike

Remote = RemoteRegion | RemoteSlice

# Unregistered memory up to this size is copied through the pool; beyond, it is registered for
# the one operation.  A copy of 64 KiB costs a few microseconds, a registration on a card tens.
STAGED = 64 << 10

# The longest single work request; longer transfers are several of them, one after another.
TRANSFER_SIZE = 8 << 20

Opcode = verbs.WROpcode


class Transfer(Work):
    """One read or write of registered memory."""

    __slots__ = ("future", "local")

    def __init__(
        self,
        kind: OperationKind,
        opcode: int,
        local: LocalMemory,
        address: int,
        length: int,
        remote_address: int,
        rkey: int,
        future: asyncio.Future[None],
    ) -> None:
        super().__init__(kind, opcode, address, length, local.lkey, remote_address, rkey)
        local.pin()
        self.local = local
        self.future = future

    def done(self, byte_len: int) -> None:
        self.local.unpin()
        if not self.future.done():
            self.future.set_result(None)

    def failed(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def release(self) -> None:
        self.local.unpin()


class Atomic(Work):
    """One atomic operation; its result lands in a block of the pool."""

    __slots__ = ("atomic_opcode", "block", "compare_add", "future", "swap")

    def __init__(
        self,
        kind: OperationKind,
        opcode: verbs.WROpcode,
        block: Block,
        remote_address: int,
        rkey: int,
        compare_add: int,
        swap: int,
        future: asyncio.Future[int],
    ) -> None:
        super().__init__(kind, opcode, block.address, ATOMIC_SIZE, block.lkey, remote_address, rkey)
        self.atomic_opcode = opcode
        self.block = block
        self.compare_add = compare_add
        self.swap = swap
        self.future = future

    def post(self, qp: verbs.QueuePair, wr_id: int) -> None:
        qp.post_send_atomic(
            wr_id,
            self.atomic_opcode,
            SIGNALED,
            self.address,
            self.lkey,
            self.remote_address,
            self.rkey,
            self.compare_add,
            self.swap,
        )

    def done(self, byte_len: int) -> None:
        old = int.from_bytes(self.block.view[:ATOMIC_SIZE], sys.byteorder)
        self.block.release()
        if not self.future.done():
            self.future.set_result(old)

    def failed(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def release(self) -> None:
        self.block.release()


def buffer_view(data: BufferLike) -> memoryview:
    """Any contiguous buffer as bytes.  TypeError or BufferError for what is none."""
    view = memoryview(data)
    if not view.nbytes:
        return memoryview(bytearray())  # an empty array has a shape that cannot be cast
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")


class OneSided:
    """The one-sided operations of one connection."""

    def __init__(
        self, queue: WorkQueue, pool: MemoryPool, sharing: Sharing, check: Callable[[], None]
    ) -> None:
        self._queue = queue
        self._pool = pool
        self._sharing = sharing
        self._check = check
        self._loop = asyncio.get_running_loop()

    async def write(self, source: LocalMemory | BufferLike, target: Remote) -> None:
        self._check()
        if isinstance(source, LocalMemory):
            await self._transfer(Opcode.RDMA_WRITE, source, target)
            return
        view = buffer_view(source)
        if len(view) > STAGED:
            with Region(self._pool.pd.reg_mr(view, verbs.AccessFlags.NONE)) as region:
                await self._transfer(Opcode.RDMA_WRITE, region, target)
        else:
            with self._pool.alloc(len(view)) as buffer:
                buffer.view[:] = view
                await self._transfer(Opcode.RDMA_WRITE, buffer, target)

    async def read(self, source: Remote, target: LocalMemory | BufferLike) -> None:
        self._check()
        if isinstance(target, LocalMemory):
            await self._transfer(Opcode.RDMA_READ, target, source)
            return
        view = buffer_view(target)
        if view.readonly:
            raise ValueError(f"cannot read into {type(target).__name__}: it is read-only")
        if len(view) > STAGED:
            with Region(self._pool.pd.reg_mr(view, verbs.AccessFlags.LOCAL_WRITE)) as region:
                await self._transfer(Opcode.RDMA_READ, region, source)
        else:
            with self._pool.alloc(len(view)) as buffer:
                await self._transfer(Opcode.RDMA_READ, buffer, source)
                view[:] = buffer.view

    async def _transfer(self, opcode: int, local: LocalMemory, remote: Remote) -> None:
        self._check()
        writing = opcode == Opcode.RDMA_WRITE
        kind = OperationKind.WRITE if writing else OperationKind.READ
        self._usable(remote)
        remote.range.require(Rights.WRITE if writing else Rights.READ)
        if not writing and not local.writable:
            raise ValueError(f"cannot read into {local!r}: it is read-only")
        length = len(local)
        if length != len(remote):
            raise ValueError(f"{length} bytes here and {len(remote)} there: slice one of them")
        if not length:
            return
        futures = []
        for start in range(0, length, TRANSFER_SIZE):
            future: asyncio.Future[None] = self._loop.create_future()
            work = Transfer(
                kind,
                opcode,
                local,
                local.address + start,
                min(TRANSFER_SIZE, length - start),
                remote.range.address + start,
                remote.range.rkey,
                future,
            )
            futures.append(future)
            self._queue.post(work)
        if len(futures) == 1:
            await futures[0]
        else:
            await asyncio.gather(*futures)

    async def compare_and_swap(self, target: Remote, expected: int, desired: int) -> int:
        return await self._atomic(
            OperationKind.COMPARE_AND_SWAP,
            Opcode.ATOMIC_CMP_AND_SWP,
            target,
            unsigned("expected", expected),
            unsigned("desired", desired),
        )

    async def fetch_and_add(self, target: Remote, add: int) -> int:
        if not -(1 << 63) <= add < 1 << 64:
            raise ValueError(f"add must fit 64 bits, not {add}")
        return await self._atomic(
            OperationKind.FETCH_AND_ADD, Opcode.ATOMIC_FETCH_AND_ADD, target, add % (1 << 64), 0
        )

    async def _atomic(
        self,
        kind: OperationKind,
        opcode: verbs.WROpcode,
        remote: Remote,
        compare_add: int,
        swap: int,
    ) -> int:
        self._check()
        self._usable(remote)
        remote.range.require_atomic()
        future: asyncio.Future[int] = self._loop.create_future()
        target = remote.range
        block = self._pool.block(ATOMIC_SIZE)
        self._queue.post(
            Atomic(kind, opcode, block, target.address, target.rkey, compare_add, swap, future)
        )
        return await future

    def _usable(self, remote: Remote) -> None:
        region = remote.region if isinstance(remote, RemoteSlice) else remote
        region.check(self._sharing)


def unsigned(name: str, value: int) -> int:
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{name} must be an unsigned 64-bit number, not {value}")
    return value
