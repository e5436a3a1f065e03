"""Waiters of one-sided work other than futures.

Each implements the part of `Future` that a `WRChain` uses: `done`, and unless that is true
`set_result` or `set_exception`; and `cancel`, for work that has not been posted and will not be.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from .._core.arguments import refusal
from .._core.region import ATOMIC_SIZE
from ..mr_pool import Block

if TYPE_CHECKING:
    from .._datapath.futures import Waiter

Progress = Callable[[int], object]


def check_progress(progress: object) -> None:
    """TypeError for what cannot be called."""
    if progress is not None and not callable(progress):
        raise TypeError(refusal("progress", "a function of the bytes that are done", progress))


class Pieces:
    """Waits for the pieces of a long transfer; `progress` hears how many bytes are done."""

    __slots__ = ("_done", "_lengths", "_progress", "future")

    def __init__(self, future: Waiter, lengths: list[int], progress: Progress) -> None:
        self.future = future
        self._lengths = lengths[::-1]  # of those that are not done: they end in their order
        self._progress = progress
        self._done = 0

    def done(self) -> bool:
        return self.future.done()

    def set_result(self, _: None) -> None:
        self._done += self._lengths.pop()
        try:
            self._progress(self._done)
        except Exception as error:  # the user's own, raised by its await
            self.future.set_exception(error)
        if not self._lengths and not self.future.done():
            self.future.set_result(None)

    def set_exception(self, error: BaseException) -> None:
        self.future.set_exception(error)

    def cancel(self) -> bool:
        return self.future.cancel()


class Atomic:
    """The target of the old value of an atomic operation: a block of the pool, then a future."""

    __slots__ = ("block", "future")

    def __init__(self, block: Block, future: asyncio.Future[int]) -> None:
        self.block: Block | None = block
        self.future: asyncio.Future[int] = future

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

    def cancel(self) -> bool:
        self._take().release()
        return self.future.cancel()


class Batched:
    """Waits for the requests of a batch, and completes the futures of the atomics among them."""

    __slots__ = ("_atomics", "_over", "future")

    def __init__(self, future: Waiter, atomics: list[Atomic]) -> None:
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

    def cancel(self) -> bool:
        self._over = True
        for atomic in self._atomics:
            atomic.cancel()
        return self.future.cancel()
