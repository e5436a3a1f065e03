"""One-sided work requests: the pieces of reads and writes, and atomics."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from .. import verbs
from .._core.operations import OperationKind
from .._core.region import ATOMIC_SIZE, RemoteRange
from ..mr_pool import Block, LocalMemory
from .work_queue import SIGNALED, Work

Progress = Callable[[int], object]


class Together:
    """Several pieces of work that are waited for as one: until the last, or the first failure.

    It is given to each piece in place of a future.  `progress` hears how many bytes are done; the
    pieces of one queue pair complete in their order.
    """

    __slots__ = ("_done", "_pieces", "_progress", "future")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pieces: list[int],
        progress: Progress | None = None,
    ) -> None:
        self.future: asyncio.Future[None] = loop.create_future()
        self._pieces = pieces  # bytes of each that is not done, the last one first
        self._progress = progress
        self._done = 0

    def done(self) -> bool:
        return self.future.done()

    def set_result(self, _: object) -> None:
        self._done += self._pieces.pop()
        if self._progress is not None:
            self._progress(self._done)
        if not self._pieces and not self.future.done():
            self.future.set_result(None)

    def set_exception(self, error: BaseException) -> None:
        self.future.set_exception(error)


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
        future: asyncio.Future[None] | Together,
        imm: int = 0,
    ) -> None:
        super().__init__(kind, opcode, address, length, local.lkey, remote_address, rkey, imm)
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

    def request(self, wr_id: int) -> verbs.SendWorkRequest:
        request = super().request(wr_id)
        request.compare_add = self.compare_add
        request.swap = self.swap
        return request

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


class Piece:
    """A part of a read or write, as long as one work request may be."""

    __slots__ = ("kind", "length", "local", "opcode", "remote", "start")

    def __init__(
        self,
        kind: OperationKind,
        opcode: int,
        local: LocalMemory,
        remote: RemoteRange,
        start: int,
        length: int,
    ) -> None:
        self.kind = kind
        self.opcode = opcode
        self.local = local
        self.remote = remote
        self.start = start
        self.length = length

    def work(self, future: asyncio.Future[None] | Together, imm: int = 0) -> Transfer:
        """What is posted; pins the memory, so it must then be posted, or released."""
        return Transfer(
            self.kind,
            self.opcode,
            self.local,
            self.local.address + self.start,
            self.length,
            self.remote.address + self.start,
            self.remote.rkey,
            future,
            imm,
        )
