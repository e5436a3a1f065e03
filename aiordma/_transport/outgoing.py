"""What is on its way out: messages that wait for their turn, frames that were posted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from .. import verbs
from .._core.operations import OperationKind
from .._native import Run
from ..mr_pool import Block
from .work_queue import Work

SEND = int(verbs.WROpcode.SEND)


class Sender(Protocol):
    """Whose frames they are."""

    under_way: int


class FrameSend(Work):
    """A frame on its way out, in a block of the pool; each of `futures` ends with it."""

    __slots__ = ("block", "futures")

    def __init__(self, block: Block, length: int, futures: Sequence[asyncio.Future[None]]) -> None:
        super().__init__(OperationKind.SEND, SEND, block.address, length, block.lkey)
        self.block = block
        self.futures = futures

    def done(self, byte_len: int) -> None:
        self.release()
        for future in self.futures:
            if not future.done():
                future.set_result(None)

    def failed(self, error: BaseException) -> None:
        for future in self.futures:
            if not future.done():
                future.set_exception(error)

    def release(self) -> None:
        self.block.release()


class MessagesSend(FrameSend):
    """One with messages of the user."""

    __slots__ = ("messages",)

    def __init__(
        self,
        messages: Sender,
        block: Block,
        length: int,
        futures: Sequence[asyncio.Future[None]],
    ) -> None:
        super().__init__(block, length, futures)
        self.messages = messages
        messages.under_way += 1

    def release(self) -> None:
        self.messages.under_way -= 1
        self.block.release()


class SpareSend(FrameSend):
    """One whose block goes back to the spare ones."""

    __slots__ = ("spares",)

    def __init__(
        self,
        spares: list[Block],
        block: Block,
        length: int,
        futures: Sequence[asyncio.Future[None]],
    ) -> None:
        super().__init__(block, length, futures)
        self.spares = spares

    def release(self) -> None:
        self.spares.append(self.block)


class Outgoing:
    """A message that waits for its turn, and for that of the work before it (`WorkQueue.turn`)."""

    __slots__ = ("future", "imm", "turn", "view")
    can_be_bundled = True

    def __init__(self, view: memoryview, imm: int | None, future: asyncio.Future[None]) -> None:
        self.view = view
        self.imm = imm
        self.future = future
        self.turn = 0

    def drop(self) -> None:
        """It will not be sent."""


class OutgoingWrite(Outgoing):
    """A write with immediate data, which uses up a receive of the peer as a message does."""

    __slots__ = ("work",)
    can_be_bundled = False

    def __init__(self, work: Work | Run, future: asyncio.Future[None]) -> None:
        super().__init__(memoryview(b""), None, future)
        self.work = work

    def drop(self) -> None:
        self.work.release()
