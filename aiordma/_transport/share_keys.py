"""The key of a share, which is only valid on the queue pair of its connection.

It is the key of a type 2 memory window that is bound on the connection's send queue. The window is
bound to the registration that the memory already has, so that sharing does not register it again.
If the device does not enforce a window's bounds, a part of registered memory is registered again.
If the device or the registration does not support windows, the key is that of a separate memory
region. That key is valid on every queue pair of the protection domain, so any connection of the
loop whose peer knows it can use it.

The design follows from these facts:

- Freeing a window ends its key immediately, even during an operation of the peer.
- A bind is processed in order with other work of the send queue. If it finds that its window is
  gone, it fails and ends the connection. A window whose bind is in progress is therefore
  invalidated right after the bind and then freed. The key pins the memory until then, because a
  registration cannot end while a window is bound to it. The peer is told of a share only after its
  bind (`ready`).
- Only the loop processes the completion of a bind. While the loop is busy, a bind that seems to be
  in progress has most likely completed. At the end of a lease, the window is therefore freed
  anyway, after a pause (`GRACE`) in which a running loop would have closed it as above.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from .. import verbs
from .._core.operations import OperationKind
from .._core.region import Rights
from .._datapath.rail import SendQueue
from .._datapath.windows import BindRequest, Window
from .._datapath.work_queue import WorkRequest
from .._event_loop.futures import settle
from ..mr_pool import LocalMemory, MemoryPool
from ..verbs._memory.memory_region import in_domain

GRACE = 0.01
"""The time after a lease, in seconds, for the loop to close a key whose bind is in progress."""

LOCAL_INV = int(verbs.WROpcode.LOCAL_INV)


def access_flags(rights: Rights) -> verbs.AccessFlags:
    """Return the access flags for `rights`. Remote writes and atomics require LOCAL_WRITE."""
    flags = verbs.AccessFlags(int(rights))
    if rights & (Rights.WRITE | Rights.ATOMIC):
        flags |= verbs.AccessFlags.LOCAL_WRITE
    return flags


class ShareKey:
    """A share key that uses a memory region, for memory or devices that do not support windows."""

    def __init__(self, mr: verbs.MemoryRegion) -> None:
        self._mr = mr
        self.rkey = mr.rkey
        self.address = mr.addr
        self.length = mr.length
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A future that completes when the key works, or fails if the key will never work."""
        self._on_ready: Callable[[], None] | None = None
        self.withdraw_announcement: Callable[[], None] = lambda: None
        """A function that withdraws the message announcing the key, unless it has been sent."""
        self._begin()

    def _begin(self) -> None:
        self.ready.set_result(None)

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the key works or has been closed."""
        if self.ready.done():
            callback()
        else:
            self._on_ready = callback

    def transfer_callback(self, key: ShareKey) -> None:
        """Transfer the `on_ready` callback to `key`, which replaces this key."""
        on_ready, self._on_ready = self._on_ready, None
        if on_ready is not None:
            key.on_ready(on_ready)

    def notify_ready(self) -> None:
        """Call and remove the `on_ready` callback, if any."""
        on_ready, self._on_ready = self._on_ready, None
        if on_ready is not None:
            on_ready()

    @property
    def closed(self) -> bool:
        """Whether the key no longer works."""
        return self._mr.closed

    def try_end(self) -> bool:
        """End the key. Returns False, and has no effect, if the key's bind is in progress.

        Any thread may call this method, but not concurrently with `close`.
        """
        self._mr.close()
        return True

    def force_end(self) -> None:
        """End the key. A bind that is still in progress then fails and ends the connection."""
        self._mr.close()

    def close(self) -> None:
        """End the key. A second call has no effect."""
        self._mr.close()


class WindowKey(ShareKey):
    """A share key that uses a type 2 memory window."""

    def __init__(
        self,
        queue: SendQueue,
        mr: verbs.MemoryRegion,
        memory: LocalMemory,
        rights: Rights,
        *,
        owns_region: bool = False,
    ) -> None:
        self._owns_region = owns_region
        self._queue = queue
        self._window = Window(mr.pd.alloc_mw(verbs.MWType.TYPE_2))
        self._memory = memory
        self._rights = rights
        self._in_flight: set[WorkRequest] = set()
        self._closing = False  # whether `close` was called
        self._expired = False  # whether `force_end` was called
        self._freed = False  # whether the window was freed
        self._pins_memory = False  # only between `close` and `_free`
        self._bind: Bind | None = None  # None once the device has finished the bind
        super().__init__(mr)
        self.address, self.length = memory.address, len(memory)

    def _begin(self) -> None:
        self._bind = bind = Bind(self, self._window, self._mr, self._memory, int(self._rights))
        self.rkey = bind.next_key
        self._in_flight.add(bind)
        self._queue.post(bind)

    def _settle_ready(self, error: BaseException | None) -> None:
        if settle(self.ready, None, error) and error is None:
            self.notify_ready()

    @property
    def closed(self) -> bool:
        return self._closing or self._expired or self._freed

    def on_finished(self, work: WorkRequest) -> None:
        """Remove a finished request. If none remains and the key is closing, free the window."""
        self._in_flight.discard(work)
        if work is self._bind:
            self._bind = None
        self._settle_ready(None)
        if self._closing and not self._in_flight:
            self._free_and_unpin()

    def failed(self, error: BaseException) -> None:
        """Fail `ready` with `error`, and free the window if the key is closing."""
        self._bind = None
        self._settle_ready(error)
        if self._closing:
            self._free_and_unpin()  # windows must be freed before their queue pair is destroyed

    def try_end(self) -> bool:
        if self._in_flight:
            return False
        self._free()  # no request is in progress, and none will be posted
        return True

    def force_end(self) -> None:
        self._expired = True
        bind = self._bind
        if bind is not None:
            bind.expired = True
        if bind is None or bind.was_posted:  # an unposted bind is dropped once expired
            self._free()

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if self._freed:  # the lease thread has ended the key
            return
        if self._in_flight and not self._queue.failed:
            self._queue.withdraw(self._in_flight.copy())
        if self._in_flight and not self._queue.failed and self._queue.free:
            invalidation = Invalidation(self, self._window.rkey)
            self._in_flight.add(invalidation)
            self._queue.post_checked(invalidation)
        elif not self._in_flight or self._queue.failed:
            self._free()
        # Otherwise, the send queue is full, and `on_finished` frees the window after the bind.
        if not self._freed:
            self._memory.root.pinned.pin()
            self._pins_memory = True

    def _free(self) -> None:
        self._window.close()
        if self._owns_region:
            self._mr.close()
        self._freed = True

    def _free_and_unpin(self) -> None:
        self._free()
        if self._pins_memory:
            self._pins_memory = False
            self._memory._unpin()


class KeyRequest:
    """A mix-in for window requests that reports their outcome to the key."""

    key: WindowKey

    def done(self, _: int) -> None:
        self.key.on_finished(cast("WorkRequest", self))

    def failed(self, error: BaseException) -> None:
        self.key.failed(error)

    def release(self) -> None:
        """Report a request that has failed or was never posted."""
        self.key.on_finished(cast("WorkRequest", self))


class Bind(KeyRequest, BindRequest):
    """A request that binds a key's window."""

    def __init__(
        self,
        key: WindowKey,
        window: Window,
        mr: verbs.MemoryRegion,
        memory: LocalMemory,
        access: int,
    ) -> None:
        super().__init__(OperationKind.BIND, window, mr, memory.address, len(memory), access)
        self.key = key


class Invalidation(KeyRequest, WorkRequest):
    """A request that invalidates a window whose bind is still in progress."""

    def __init__(self, key: WindowKey, rkey: int) -> None:
        super().__init__(OperationKind.INVALIDATE, LOCAL_INV, 0, 0, 0, imm=rkey)
        self.key = key


def pool_of(queue: SendQueue) -> MemoryPool:
    """Return the memory pool of a rail's device."""
    return cast("MemoryPool", queue.driver.pool)


def make_key(queue: SendQueue, memory: LocalMemory, rights: Rights) -> ShareKey:
    """Create a key for local memory on one rail, using a window if possible."""
    pool = pool_of(queue)
    flags = access_flags(rights)
    mr: verbs.MemoryRegion | None = getattr(memory.root.pinned, "region", None)  # None: a dma-buf
    if pool.has_windows and mr is not None and len(memory):
        needed = (flags & verbs.AccessFlags.LOCAL_WRITE) | verbs.AccessFlags.MW_BIND
        if mr.access & needed == needed:
            if pool.enforces_window_bounds or len(memory) == mr.length:
                return WindowKey(queue, in_domain(mr, pool.pd), memory, rights)
            own = memory._expose(pool.pd, needed, 0, len(memory))
            try:
                return WindowKey(queue, own, memory, rights, owns_region=True)
            except BaseException:
                own.close()
                raise
    return ShareKey(memory._expose(pool.pd, flags, 0, len(memory)))
