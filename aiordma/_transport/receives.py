"""The receives of one connection: posted before the peer may send, and again as they are used.

Some facts, and what they mean here:

- A receive is a block of the pool.  One that a message arrived in is the user's until it is
  released; so there is a new one for it, once the message has been taken.
- One that a control message arrived in is posted again at once, whatever the pool has left: a
  connection whose users hold all of the pool must still answer its peer.  So receives can grow only
  when there are blocks for all of them; those wait here until each small one has been used up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .._core import protocol
from .._core.receive_sizes import OwnReceives
from ..config import Config
from ..errors import RDMAError
from ..mr_pool import Block
from .memory import Memory
from .work_queue import WorkQueue


class Arrivals(Protocol):
    """Whom frames are for."""

    def received(self, receive: Receive, byte_len: int) -> None: ...

    def written(self, receive: Receive, byte_len: int, imm: int) -> None: ...


class Receive:
    """A posted receive, in a block of the pool."""

    __slots__ = ("address", "arrivals", "block", "length", "lkey")

    def __init__(self, arrivals: Arrivals, block: Block, length: int) -> None:
        self.arrivals = arrivals
        self.block = block
        self.address = block.address
        self.length = length
        self.lkey = block.lkey

    def done(self, byte_len: int) -> None:
        self.arrivals.received(self, byte_len)

    def written(self, byte_len: int, imm: int) -> None:
        self.arrivals.written(self, byte_len, imm)

    def release(self) -> None:
        self.block.release()


class Receives:
    """`tell` sends a control message at once, or says that it cannot; `on_posted` hears of receives
    that were posted again for messages that had been taken.
    """

    def __init__(
        self,
        *,
        arrivals: Arrivals,
        queue: WorkQueue,
        memory: Memory,
        config: Config,
        tell: Callable[[protocol.Message], bool],
        on_posted: Callable[[int], None],
    ) -> None:
        self._arrivals = arrivals
        self._queue = queue
        self._pool = memory.pool
        self._supply = memory.supply(self.post_again, brief=True, kept=True)
        self._count = config.data_receives + config.control_receives
        self._sizes = OwnReceives(config.eager_size, config.max_eager_size)
        self._tell = tell
        self._on_posted = on_posted
        self._taken = 0
        self._refill = max(1, config.data_receives // 4)
        self._used = 0
        # The receives that are still too small, and a larger block for each of them.
        self._too_small = 0
        self._larger: list[Block] = []
        self._ended = False

    def post_all(self) -> None:
        for _ in range(self._count):
            self._post(self._pool.block(self._sizes.size))

    def _post(self, block: Block) -> None:
        self._sizes.posted += 1
        self._queue.post_receive(Receive(self._arrivals, block, self._sizes.size))

    def used(self, receive: Receive, length: int) -> None:
        """Something has arrived: a frame of so many bytes, or what would have made one."""
        self._used += 1
        self._sizes.arrived(length)
        if self._too_small and receive.length < self._sizes.size:
            self._too_small -= 1

    def repeat(self, receive: Receive) -> None:
        """Posts it again: nobody keeps what arrived there."""
        block = receive.block
        if block.size < self._sizes.size:
            block.release()
            block = self._larger.pop()
        self._post(block)

    def taken(self) -> None:
        """The messages of a frame are the user's now: its block will not come back soon."""
        self._taken += 1
        if self._taken >= self._refill:
            self.post_again()

    def post_again(self) -> None:
        """Posts receives for the messages that were taken, which the peer may then fill."""
        if self._ended:
            return
        if self._sizes.wanted != self._sizes.size:
            self._change()
        posted = 0
        while posted < self._taken:
            block: Block | None
            if len(self._larger) > self._too_small:
                block = self._larger.pop()
            else:
                block = self._supply.block(self._sizes.size)
            if block is None:
                break  # the pool is exhausted: this is called again when memory has come back
            self._post(block)
            posted += 1
        self._taken -= posted
        self._on_posted(posted)

    def _change(self) -> None:
        """Posts receives of another size from now on, if there is memory, and tells the peer.

        The peer hears of it before it gets a credit for one of them.
        """
        sizes = self._sizes
        larger: list[Block] = []
        if sizes.wanted > sizes.size:
            try:
                self._pool.require_spare(self._count * sizes.wanted)
                for _ in range(sizes.posted - self._used):
                    larger.append(self._pool.block(sizes.wanted))
            except (RDMAError, OSError):
                self._release(larger)
                sizes.stay()
                return
        if not self._tell(protocol.ReceiveSize(0, sizes.posted, sizes.wanted)):
            self._release(larger)
            return  # the next time, then
        sizes.change()
        self._release(self._larger)
        self._larger = larger
        self._too_small = len(larger)

    @staticmethod
    def _release(blocks: list[Block]) -> None:
        while blocks:
            blocks.pop().release()

    def close(self) -> None:
        """The queue pair is destroyed: there is nobody to be told of anything."""
        del self._arrivals, self._tell, self._on_posted

    def end(self) -> None:
        """Nothing is posted any more."""
        self._ended = True
        self._release(self._larger)
