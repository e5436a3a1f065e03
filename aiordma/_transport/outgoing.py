"""What is on its way out besides messages, but in their order."""

from __future__ import annotations

import asyncio

from .._native import Outgoing, Run
from .work_queue import Work


class OutgoingWrite(Outgoing):
    """A write with immediate data, which uses up a receive of the peer as a message does."""

    __slots__ = ("work",)

    def __init__(self, work: Work | Run, future: asyncio.Future[None]) -> None:
        super().__init__(b"", None, future)
        self.work = work

    def drop(self) -> None:
        self.work.release()
