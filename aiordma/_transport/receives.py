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

from .._core import protocol
from .._core.receive_sizes import OwnReceives
from .._native import Traffic
from ..config import Config
from ..errors import RDMAError
from ..mr_pool import Block
from .memory import Memory
from .work_queue import WorkQueue


class Receives:
    """`tell` sends a control message at once, or says that it cannot; `on_posted` hears of receives
    that were posted again for messages that had been taken.
    """

    def __init__(
        self,
        *,
        traffic: Traffic,
        queue: WorkQueue,
        memory: Memory,
        config: Config,
        tell: Callable[[protocol.Message], bool],
        on_posted: Callable[[int], None],
    ) -> None:
        self._traffic = traffic
        self._queue = queue
        self._pool = memory.pool
        self._source = memory.block_source(self.post_again, internal=True, exempt=True)
        self._count = config.data_receives + config.control_receives
        self._sizes = OwnReceives(config.eager_size, config.max_eager_size)
        traffic.large_size = self._sizes.largest
        self._tell = tell
        self._on_posted = on_posted
        self._taken = 0
        self.refill = max(1, config.data_receives // 4)
        """After how many frames that were taken it is worth while."""
        self._used = 0
        # The receives that are still too small, and a larger block for each of them.
        self._too_small = 0
        self._larger: list[Block] = []
        self._ended = False

    def post_all(self) -> None:
        size = self._sizes.size
        posted = self._queue.post_ready(self._pool, self._count, size)
        self._sizes.posted += posted
        for _ in range(posted, self._count):
            self._post(self._pool.block(size))

    def _post(self, block: Block) -> None:
        self._sizes.posted += 1
        self._queue.post_receive(block, self._sizes.size)

    def used(self, posted: int, length: int) -> None:
        """Something has arrived: a frame of so many bytes, or what would have made one.

        In a receive that was posted with so many.
        """
        self._catch_up()
        self._used += 1
        self._sizes.arrived(length)
        if self._too_small and posted < self._sizes.size:
            self._too_small -= 1
            self._traffic.watching = self._too_small > 0
        self._leave_to_c()

    def _catch_up(self) -> None:
        """Counts what C has only counted: frames, and receives that it has posted again."""
        traffic, sizes = self._traffic, self._sizes
        count, traffic.used = traffic.used, 0
        fitted, traffic.fitted = traffic.fitted, 0
        oversized, traffic.oversized = traffic.oversized, 0
        posted, traffic.reposted = traffic.reposted, 0
        sizes.posted += posted
        if count:
            self._used += count
            if fitted < count - oversized:
                sizes.arrived(sizes.largest, count - oversized - fitted)
            sizes.arrived(0, fitted)

    def _leave_to_c(self) -> None:
        """Posting receives again, while nothing else has to be thought of."""
        plain = not (self._taken or self._larger)
        self._traffic.receive_size = self._sizes.size if plain else 0
        self._traffic.patience = self._sizes.patience

    def repeat(self, block: Block) -> None:
        """Posts it again at once: its frame is not kept."""
        if block.size < self._sizes.size:
            block.release()
            block = self._larger.pop()
        self._post(block)

    def taken(self, count: int) -> None:
        """The messages of so many frames are the user's now, and their blocks."""
        self._taken += count
        self.post_again()

    def post_again(self) -> None:
        """Posts receives for the messages that were taken, which the peer may then fill."""
        if self._ended:
            return
        self.change_if_due()
        posted = 0
        if not self._larger:
            posted = self._queue.post_ready(self._source.pool, self._taken, self._sizes.size)
            self._sizes.posted += posted
        while posted < self._taken:
            block: Block | None
            if len(self._larger) > self._too_small:
                block = self._larger.pop()
            else:
                block = self._source.block(self._sizes.size)
            if block is None:
                break  # the pool is exhausted: this is called again when memory has come back
            self._post(block)
            posted += 1
        self._taken -= posted
        self._leave_to_c()
        self._on_posted(posted)

    def change_if_due(self) -> None:
        """Has receives of another size from now on, if that would be right and can be told now."""
        self._catch_up()
        if self._sizes.wanted != self._sizes.size:
            self._change()
        self._leave_to_c()

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
        self._traffic.watching = self._too_small > 0
        self._traffic.grown = sizes.size > sizes.smallest

    @staticmethod
    def _release(blocks: list[Block]) -> None:
        while blocks:
            blocks.pop().release()

    def close(self) -> None:
        """The queue pair is destroyed: the parts let go of each other."""
        del self._traffic, self._tell, self._on_posted

    def end(self) -> None:
        """Nothing is posted any more."""
        self._ended = True
        self._release(self._larger)
