# The receives of one connection. They are posted before the peer may send, and reposted after use.
#
# - Each receive uses a pool block. A block with a message belongs to the user until the message is
#   released. Once the user has taken the message, a new block is posted in its place.
# - The receive of a control frame is reposted immediately, even if the pool is exhausted.
#   Otherwise, a connection whose users hold the whole pool could not respond to its peer.
# - Receives start small. They grow after GROW_AFTER messages that fit only into large receives, and
#   shrink after SHRINK_AFTER consecutive frames that fit into small ones. A ReceiveSize message
#   tells the peer which receive is the first of the new size. Receives grow only if the pool has
#   blocks for all of them.

cimport cython

from .memory cimport release_all
from .rail cimport CHAIN

from aiordma._core import protocol
from aiordma.errors import RDMAError


cdef enum:
    GROW_AFTER = 4
    SHRINK_AFTER = 256

RETRY_AFTER: float = 0.1  # seconds until memory for a receive is requested again


@cython.final
cdef class ReceiveSizes:
    """The size of the receives, small or as large as allowed, depending on recent frames."""

    def __cinit__(self, size: int, largest: int):
        self.smallest, self.largest = size, largest
        self.use(size)

    def use(self, size: int, too_small: int = 0):
        """Use `size` from the next receive on, and reset the counters.

        At most `too_small` of the receives that are already posted are smaller.
        """
        self.size, self.all_fit_from = size, self.used_up + too_small
        self.large_frames = self.small_frames = 0

    cdef uint32_t preferred_size(self) noexcept:
        """Return the size that suits the recent frames."""
        if self.size == self.smallest:
            return self.largest if self.large_frames >= GROW_AFTER else self.smallest
        return self.smallest if self.small_frames >= SHRINK_AFTER else self.largest

    # ---- for tests ----

    def size_after(self, length: int) -> int:
        """Return the suitable size after a frame of this length has used a receive."""
        self.count_frame(length)
        return self.preferred_size()

    @property
    def smaller(self) -> int:
        return self.too_small()


@cython.final
cdef class Receives(RailObserver):
    """The receives of a rail, of the size that the session has chosen."""

    def __init__(
        self, Controls controls not None, SendQueue queue not None, ReceiveSizes sizes not None,
        memory: Memory, config: Config,
    ):
        self.controls, self.queue, self.sizes = controls, queue, sizes
        self.pool = memory.pool
        # Receives hold their blocks for a long time, so the blocks are exempt from the limit for
        # internal requests that overtake waiting users.
        self.block_source = memory.block_source(self.on_memory, internal=True, exempt=True)
        self.count = config.data_receives + config.control_receives
        self.repost_after = max(1, config.data_receives // 4)
        self.larger_blocks = []

    def post_all(self):
        post_cached(self, self.count)
        while self.posted < self.count:
            self.post(self.pool._block(self.sizes.size))

    cdef int post(self, PoolBlock block) except -1:
        self.posted += 1
        self.queue.post_receives([block], self.sizes.size)
        return 0

    cdef int repost_block(self, PoolBlock block) except -1:
        """Post a receive again after its contents have been handled."""
        if block.size < self.sizes.size:
            block.end_lease()
            block = self.larger_blocks.pop()  # `update_size` reserved one for each smaller block
        return self.post(block)

    def on_memory(self):
        self.retrying = False
        self.repost()

    cdef int repost(self) except -1:
        """Repost receives whose messages were taken, and return their credits to the peer."""
        cdef uint32_t posted = 0
        cdef PoolBlock block
        if self.ended:
            return 0
        self.update_size()
        if not self.larger_blocks:
            posted = post_cached(self, self.to_repost)
        while posted < self.to_repost:
            # Use a larger block if the smaller receives that remain do not need all of them.
            if len(self.larger_blocks) > <Py_ssize_t> self.sizes.too_small():
                block = self.larger_blocks.pop()
            else:
                try:
                    block = self.block_source.block(self.sizes.size)
                except (RDMAError, OSError, MemoryError):
                    # Retry later instead of raising the error, because the caller still has to
                    # deliver a message.
                    retry_later(self)
                    break
            if block is None:
                break  # the pool is exhausted and will call `on_memory`
            self.post(block)
            posted += 1
        self.to_repost -= posted
        self.controls.outbox.credits.reposted_data(posted)
        return self.controls.session.flush()

    cdef int update_size(self) except -1:
        """Change the size of the receives if that is due and the peer can be told now."""
        cdef uint32_t new_size = self.sizes.preferred_size()
        cdef list new_blocks = []
        if new_size == self.sizes.size:
            return 0
        if new_size > self.sizes.size:
            try:
                self.pool._require_spare(self.count * new_size)
                while len(new_blocks) < <Py_ssize_t> (self.posted - self.sizes.used_up):
                    new_blocks.append(self.pool._block(new_size))
            except (RDMAError, OSError, MemoryError):
                release_all(new_blocks)
                self.sizes.use(self.sizes.size)  # restarts the counters before the next attempt
                return 0
        # Announce the new size before the peer gets a credit for one of these receives.
        if not self.controls.send_now(protocol.ReceiveSize(0, self.posted, new_size)):
            release_all(new_blocks)
            return 0  # the next call tries again
        self.sizes.use(new_size, len(new_blocks))
        release_all(self.larger_blocks)
        self.larger_blocks = new_blocks
        return 0

    def lead_changed(self, SendQueue lead not None) -> None:
        """Post the receives of the previous lead on the new lead, in the same order."""
        cdef PoolBlock block
        cdef list blocks = self.queue.take_receives()
        self.queue, self.pool = lead, lead.driver.pool
        try:
            while blocks:
                block = blocks.pop(0)
                lead.post_receives([block], <uint32_t> block.size)
        finally:
            release_all(blocks)

    def end(self):
        self.ended = True
        release_all(self.larger_blocks)


cdef uint32_t post_cached(Receives receives, uint32_t most) except? 0xFFFFFFFF:
    """Post receives in free blocks, at most `most`, and return their number."""
    cdef uint32_t posted = 0, count
    cdef list blocks
    cdef PoolBlock block
    while posted < most:
        blocks = []
        while len(blocks) < CHAIN and posted + len(blocks) < most:
            block = (<BlockCache> receives.pool).take_fast(receives.sizes.size)
            if block is None:
                break
            blocks.append(block)
        count = receives.queue.post_receives(blocks, receives.sizes.size)
        posted += count
        if count < CHAIN:
            break
    receives.posted += posted
    return posted


cdef int retry_later(Receives receives) except -1:
    if not receives.retrying:
        receives.retrying = True
        receives.queue.table.wakeups.loop.call_later(RETRY_AFTER, receives.on_memory)
    return 0
