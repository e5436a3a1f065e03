"""One-sided work requests: reads, writes and atomics, many of them as one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Protocol

from .. import verbs
from .._core.operations import OperationKind
from .._core.region import ATOMIC_SIZE
from .._native import Run
from ..mr_pool import Block

Progress = Callable[[int], object]


class Waiter(Protocol):
    """Who waits for transfers: a future, or what does as one."""

    def done(self) -> bool: ...

    def set_result(self, result: None, /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...


class Transfer(Run):
    """Requests that are posted, and done, as one.

    When the send queue has no room for all, those that it has room for go first, as a `part`.
    """

    __slots__ = ("kind", "waiter")

    def __init__(self, user: object, kind: OperationKind, waiter: Waiter) -> None:
        self.user = user
        self.kind = kind
        self.waiter = waiter

    @property
    def entries(self) -> int:
        return len(self)

    def part(self, entries: int) -> Part:
        part = Part(self.user, self.kind, self.waiter)
        part.take(self, entries)
        return part

    def post(self, qp: verbs.QueuePair, wr_id: int) -> None:
        qp.post_run(self, wr_id)

    def done(self, byte_len: int) -> None:
        self.release()
        if not self.waiter.done():
            self.waiter.set_result(None)

    def failed(self, error: BaseException) -> None:
        if not self.waiter.done():
            self.waiter.set_exception(error)


class Part(Transfer):
    """What went before the rest, for which the waiter waits."""

    __slots__ = ()

    def done(self, byte_len: int) -> None:
        self.release()


class Pieces:
    """Waits for the pieces of a long transfer; `progress` hears how many bytes are done."""

    __slots__ = ("_done", "_lengths", "_progress", "future")

    def __init__(
        self, future: asyncio.Future[None], lengths: list[int], progress: Progress
    ) -> None:
        self.future = future
        self._lengths = lengths[::-1]  # of those that are not done: they end in their order
        self._progress = progress
        self._done = 0

    def done(self) -> bool:
        return self.future.done()

    def set_result(self, _: None) -> None:
        self._done += self._lengths.pop()
        self._progress(self._done)
        if not self._lengths and not self.future.done():
            self.future.set_result(None)

    def set_exception(self, error: BaseException) -> None:
        self.future.set_exception(error)


class Atomic:
    """Where the old value of an atomic operation lands: a block of the pool, then a future."""

    __slots__ = ("block", "future")

    def __init__(self, block: Block, future: asyncio.Future[int]) -> None:
        self.block: Block | None = block
        self.future = future

    def _take(self) -> Block:
        block, self.block = self.block, None
        assert block is not None
        return block

    def done(self) -> bool:
        return self.block is None

    def set_result(self, _: None) -> None:
        block = self._take()
        old = int.from_bytes(block.view[:ATOMIC_SIZE], sys.byteorder)
        block.release()
        if not self.future.done():
            self.future.set_result(old)

    def set_exception(self, error: BaseException) -> None:
        self._take().release()
        if not self.future.done():
            self.future.set_exception(error)

    def drop(self) -> None:
        """It is not posted after all."""
        self._take().release()
        self.future.cancel()


class Batched:
    """Waits for the requests of a batch, and tells those who wait for the atomics among them."""

    __slots__ = ("_atomics", "_over", "future")

    def __init__(self, future: asyncio.Future[None], atomics: list[Atomic]) -> None:
        self.future = future
        self._atomics = atomics
        self._over = False

    def done(self) -> bool:
        return self._over

    def set_result(self, _: None) -> None:
        self._over = True
        for atomic in self._atomics:
            atomic.set_result(None)
        if not self.future.done():
            self.future.set_result(None)

    def set_exception(self, error: BaseException) -> None:
        self._over = True
        for atomic in self._atomics:
            atomic.set_exception(error)
            atomic.future.exception()  # seen: the batch tells it too
        if not self.future.done():
            self.future.set_exception(error)
