"""Reusable memory for long frames.

The kernel clears new memory before a process can access it. This takes as long as the copy that
follows, or several times as long if a virtual machine must get the pages from its host. C libraries
return blocks of this size to the kernel as soon as they are freed, and Dask configures them to do
so (`MALLOC_TRIM_THRESHOLD_`).

For this reason, a frame's memory is kept after its arrays have been freed, and is reused for
another frame of the same length. This often works, because the chunks of an array usually have the
same length. Unused memory is freed after a few seconds. Until it is freed, it counts as memory of
the process.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from distributed.protocol.utils import host_array

try:
    import numpy
except ImportError:  # optional, as in distributed
    numpy = None  # type: ignore[assignment]

from .framing import MIN_LONG_FRAME

# The time in seconds after which unused memory is freed. The value is an estimate. It should exceed
# the duration of most tasks, but stay below the 30 s after which Dask reports unmanaged memory as
# "old".
UNUSED_LIFETIME = 10.0
# The maximum number of unused blocks. The limit is low, because each new frame searches all blocks.
MAX_UNUSED_BLOCKS = 256


def rounded(length: int) -> int:
    """Round a length up so that similar lengths become equal.

    Rounding adds at most 1/32 of the length.
    """
    step = 1 << max(length.bit_length() - 6, 0)
    return -(-length // step) * step


class FrameMemory:
    """The memory for long frames received in one event loop.

    Up to `most` bytes of unused memory are kept for reuse.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int) -> None:
        self._loop = weakref.ref(loop)
        self.most = most
        self.unused_bytes = 0
        self._unused: deque[tuple[float, memoryview]] = deque()  # oldest first, with expiry times
        self._lent: dict[int, tuple[weakref.ref[Any], memoryview]] = {}
        # The blocks of freed frames. Any thread can append to this deque at any time.
        self._returned: deque[memoryview] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def lend(self, length: int, size: int | None = None) -> memoryview:
        """Return memory for a frame of `length` bytes.

        The memory is the beginning of a block of `size` bytes, or of `length` bytes by default.
        Once the memory is no longer referenced, a later call that needs a block of the same size
        can reuse this block.
        """
        size = size or length
        if numpy is None or not MIN_LONG_FRAME <= length <= size <= self.most:
            return host_array(length)
        self._reclaim()
        memory = self._take_unused(size)
        if memory is None:
            memory = host_array(size)
        # Views of the frame keep the frame alive. If the frame's base were an array, numpy would
        # make the views refer to the base instead.
        frame = numpy.frombuffer(memory, "u1", length)
        number = id(frame)
        self._lent[number] = weakref.ref(frame, lambda _: self._on_frame_freed(number)), memory
        return frame.data

    def lend_rounded(self, length: int) -> memoryview:
        """Return memory for a message, in a block whose size is rounded up.

        Because the size is rounded up, a new message can reuse the block of an earlier message with
        a slightly different length. For example, messages that contain similar arrays often differ
        only in the length of their headers.
        """
        return self.lend(length, rounded(length))

    def _take_unused(self, size: int) -> memoryview | None:
        for i in range(len(self._unused) - 1, -1, -1):
            if self._unused[i][1].nbytes == size:
                _, memory = self._unused[i]
                del self._unused[i]
                self.unused_bytes -= size
                return memory
        return None

    def _on_frame_freed(
        self, number: int, _is_finalizing: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        """Make a block available for reuse once its frame has been freed.

        A weak reference can call this in any thread and at any time, so it must not use a lock.
        """
        if _is_finalizing():  # asyncio's globals may be None
            return
        _, memory = self._lent.pop(number)
        loop = self._loop()
        if loop is None or loop.is_closed():
            return
        first = not self._returned
        self._returned.append(memory)
        if first:
            try:
                loop.call_soon_threadsafe(self._reclaim)
            except RuntimeError:  # the loop was closed after the check above
                self._returned.clear()

    def _reclaim(self) -> None:
        loop = self._loop()
        assert loop is not None
        while self._returned:
            memory = self._returned.popleft()
            self._unused.append((loop.time() + UNUSED_LIFETIME, memory))
            self.unused_bytes += memory.nbytes
        while self.unused_bytes > self.most or len(self._unused) > MAX_UNUSED_BLOCKS:
            self._drop()
        if self._unused and self._timer is None:
            self._timer = loop.call_at(self._unused[0][0], self._expire)

    def _expire(self) -> None:
        self._timer = None
        loop = self._loop()
        assert loop is not None
        now = loop.time()
        while self._unused and self._unused[0][0] <= now:
            self._drop()
        self._reclaim()

    def _drop(self) -> None:
        _, memory = self._unused.popleft()
        self.unused_bytes -= memory.nbytes


_memory_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, FrameMemory]
_memory_by_loop = weakref.WeakKeyDictionary()


def frame_memory(loop: asyncio.AbstractEventLoop, most: int) -> FrameMemory:
    """Return an event loop's frame memory, creating it on the first call.

    Every call sets the frame memory's limit on unused memory to `most` bytes.
    """
    memory = _memory_by_loop.get(loop)
    if memory is None:
        memory = _memory_by_loop[loop] = FrameMemory(loop, most)
    memory.most = most
    return memory
