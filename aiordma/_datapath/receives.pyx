# The receives of one connection: posted before the peer may send, and again as they are used.
#
# - A receive is a block of the pool.  One that holds a message is the user's until it is released; a new
#   one is posted in its place once the message has been taken.
# - One that a control frame arrived in is posted again at once, whatever the pool has left: a connection
#   whose users hold all of the pool must still answer its peer.
# - Receives begin small, and grow after GROW_AFTER messages that only large ones have room for. They
#   shrink after SHRINK_AFTER frames in a row that fit small ones.
#   The peer is told from which one on; they grow only when there are blocks for all of them.

cimport cython

from aiordma._core import protocol
from aiordma.errors import RDMAError


cdef enum:
    GROW_AFTER = 4
    SHRINK_AFTER = 256

RETRY_AFTER: float = 0.1  # seconds, when memory for a receive is refused


@cython.final
cdef class ReceiveQueue:
    """Posts receives, and chooses their size."""

    def __init__(self, MessageChannel channel not None, memory: Memory, config: Config):
        self.channel = channel
        self.queue = channel.queue
        self.pool = memory.pool
        self.source = memory.block_source(self.on_memory, internal=True, exempt=True)
        self.count = config.data_receives + config.control_receives
        self.size = self.smallest = config.eager_size
        self.largest = max(config.eager_size, config.max_eager_size)
        self.larger = []

    def post_all(self):
        self.posted = self.queue.post_cached(self.pool, self.count, self.size)
        while self.posted < self.count:
            self.post(self.pool._block(self.size))

    cdef int post(self, PoolBlock block) except -1:
        self.posted += 1
        return self.queue.post_block(block, self.size)

    cdef int used(self, uint32_t posted, uint64_t length) except -1:
        """Counts a frame of `length` bytes, which took a receive of `posted` bytes, towards the choice
        of the size of receives."""
        length += self.channel.room.tag_size
        self.used_up += 1
        if length <= self.smallest:
            self.enough += 1
        elif length <= self.largest:
            self.enough = 0
            self.missed += self.size == self.smallest
        if self.too_small and posted < self.size:
            self.too_small -= 1
        return 0

    cdef uint32_t wanted(self) noexcept:
        """The size of receives that fits the messages of late."""
        if self.size == self.smallest:
            return self.largest if self.missed >= GROW_AFTER else self.smallest
        return self.smallest if self.enough >= SHRINK_AFTER else self.largest

    cdef int repeat(self, PoolBlock block) except -1:
        """Posts a receive again whose contents have been handled."""
        if block.size < self.size:
            block.end_lease()
            block = self.larger.pop()
        return self.post(block)

    def on_memory(self):
        self.retrying = False
        self.repost()

    cdef int repost(self) except -1:
        """Posts receives for frames that were taken, which the peer may then fill."""
        cdef uint32_t posted = 0
        cdef PoolBlock block
        if self.ended:
            return 0
        self.change_if_due()
        if not self.larger:
            posted = self.queue.post_cached(self.pool, self.to_repost, self.size)
            self.posted += posted
        while posted < self.to_repost:
            if len(self.larger) > <Py_ssize_t> self.too_small:
                block = self.larger.pop()
            else:
                try:
                    block = self.source.block(self.size)
                except (RDMAError, OSError, MemoryError):
                    # The caller has a message to hand out, and no use for the error.
                    self.retry_later()
                    break
            if block is None:
                break  # the pool is exhausted: `on_memory` comes
            self.post(block)
            posted += 1
        self.to_repost -= posted
        self.channel.credits.reposted_data(posted)
        return self.channel.flush()

    cdef int retry_later(self) except -1:
        if not self.retrying:
            self.retrying = True
            self.queue.table.loop.call_later(RETRY_AFTER, self.on_memory)
        return 0

    cdef int change_if_due(self) except -1:
        """Changes the size of the receives if that is due and the peer can be told now."""
        cdef uint32_t wanted = self.wanted()
        cdef list larger = []
        if wanted == self.size:
            return 0
        if wanted > self.size:
            try:
                self.pool._require_spare(self.count * wanted)
                while len(larger) < <Py_ssize_t> (self.posted - self.used_up):
                    larger.append(self.pool._block(wanted))
            except (RDMAError, OSError, MemoryError):
                release_all(larger)
                self.missed = self.enough = 0  # after as many messages more
                return 0
        # The peer hears of it before it gets a credit for one of them.
        if not self.channel.send_control_now(protocol.ReceiveSize(0, self.posted, wanted)):
            release_all(larger)
            return 0  # the next time, then
        self.size = wanted
        self.missed = self.enough = 0
        release_all(self.larger)
        self.larger = larger
        self.too_small = len(larger)
        return 0

    def end(self):
        self.ended = True
        release_all(self.larger)


cdef int release_all(list blocks) except -1:
    while blocks:
        (<PoolBlock> blocks.pop()).end_lease()
    return 0
