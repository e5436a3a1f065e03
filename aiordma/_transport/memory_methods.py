"""The methods of a connection for local, shared and remote memory."""

from __future__ import annotations

from collections.abc import Callable

from .._core.arguments import I32_MAX, U32_MAX, choice, integer, truth
from .._core.operations import OperationKind
from .._core.region import ATOMIC_SIZE, RegionToken, Rights
from .._datapath import one_sided
from .._datapath.session import MessageMethods
from .._memory.registration_cache import CacheStatistics
from ..dmabuf import DmabufRegion
from ..mr_pool import Buffer, LocalMemory, PoolStatistics, Region
from ..verbs._memory.buffers import AnyMemory, bytes_of
from .arguments import check_remote_memory
from .batch import Batch, MovingBatch, add_operands, atomic_value, swap_operands
from .lease_thread import Lease, lease_seconds
from .lifecycle import ConnectionLifecycle
from .memory import UserMemory
from .observation import Statistics
from .remote_memory import Remote, RemoteMemory, RemoteRegion
from .shares import Share


class MemoryMethods(ConnectionLifecycle, MessageMethods):
    """The memory methods of `Connection`."""

    _statistics: Statistics

    def _lease(self, lease: Lease) -> float | None:
        return lease_seconds(lease, self._endpoint.config.lease)

    def alloc(self, size: int) -> Buffer:
        """Allocate `size` bytes of registered memory from the pool. The contents are undefined.

        Raises:
            QuotaError: If the pool has reached its limit (`LoopConfig.pool_limit`), or other
                requests are waiting for memory.
        """
        self._check()
        return self._memory.pool.alloc(size)

    async def lease(self, size: int) -> Buffer:
        """Allocate memory as `alloc` does, but wait until enough is free.

        Requests are served in order. You can cancel the wait, and it ends with the connection. As
        with any lock, a task that holds memory while it waits for more can cause a deadlock.
        Allocate all the memory you need at once, or wait with a timeout.

        Args:
            size: The number of bytes.

        Returns:
            The memory, which is yours until you release it.

        Raises:
            QuotaError: If the limit of the pool can never allow this size. This is raised
                immediately.
        """
        self._check()
        return await self._memory.lease(integer("size", size), internal=False)

    def pool_statistics(self) -> PoolStatistics:
        """Return the current state of the memory pool.

        All connections of this loop and device share it.
        """
        return self._memory.pool.statistics()

    def registration_statistics(self) -> CacheStatistics:
        """Return the state of the cache for registrations of your own memory.

        The cache is shared by all connections of this loop and device
        (`LoopConfig.cached_registrations`).
        """
        return self._memory.registrations.statistics()

    def register(self, memory: AnyMemory) -> Region:
        """Register your own memory, so that operations use it without a copy.

        Args:
            memory: Any buffer or tensor (`verbs.bytes_of`). The object is pinned until
                `Region.close`. Read-only memory can be the source of sends and writes, but not the
                target of reads.

        Returns:
            The registered memory.
        """
        self._check()
        return self._memory.register_region(memory)

    def register_dmabuf(
        self, fd: int, length: int, *, offset: int = 0, writable: bool = True
    ) -> DmabufRegion:
        """Register the memory of another device, such as a GPU, that is exported as a dma-buf.

        You can use it for `read`, `write`, batches and `send_region`; see `DmabufRegion`.

        Args:
            fd: The file descriptor of the dma-buf. You may close it after this call.
            length: The number of bytes to register.
            offset: The offset of the first byte in the dma-buf.
            writable: Whether operations may write to the memory.

        Returns:
            The registered memory.

        Raises:
            UnsupportedError: If the device or its driver does not support dma-bufs.
            VerbsError: If the range is not within the dma-buf (EINVAL).
        """
        self._check()
        fd, length = integer("fd", fd, 0, I32_MAX), integer("length", length)
        offset, writable = integer("offset", offset), truth("writable", writable)
        return self._memory.register_dmabuf(fd, length, offset, writable)

    async def send_region(
        self, region: LocalMemory, *, access: Rights = Rights.READ, lease: Lease = "default"
    ) -> Share:
        """Share memory of this side, and send the token to the peer.

        The peer calls `recv_region` and gets a RemoteRegion with exactly these bytes and rights.

        If you cancel the call, nothing is shared. If the peer has already received the token, the
        token is revoked, and using the token breaks the connection.

        Args:
            region: A Buffer, a Region, or a slice of one.
            access: The rights of the peer.
            lease: The time for which the peer may use the memory, in seconds. "default" means
                `Config.lease`, which is one minute by default. None means that the share lasts
                until you revoke it or the connection ends. `Share.renew` extends the time.

        Returns:
            The share, which can be revoked and renewed.

        Raises:
            UnencryptedError: If the connection has `encrypt=True`. All calls that share memory
                raise it.
        """
        self._check()
        rights = choice("access", access, Rights)
        return await self._sharing.send_region(region, rights, self._lease(lease))

    def share(
        self, region: LocalMemory, *, access: Rights = Rights.READ, lease: Lease = "default"
    ) -> Share:
        """Share memory of this side. You send the token to the peer yourself.

        Send `Share.token.pack()` in a message of this connection, or over another channel. Before
        you use another channel, call `await share.ready()`.

        Only the peer of this connection can use the token. If the device does not support memory
        windows, every peer of this event loop that learns the token can use it. In that case, treat
        the token like a password (docs/security.md).

        Args:
            region: A Buffer, a Region, or a slice of one.
            access: The rights of the peer.
            lease: The time for which the peer may use the memory, in seconds, as for `send_region`.

        Returns:
            The share, which can be revoked and renewed.
        """
        self._check()
        rights = choice("access", access, Rights)
        return self._sharing.create_share(region, rights, self._lease(lease))

    def open_region(self, token: bytes | bytearray | memoryview | RegionToken) -> RemoteRegion:
        """Open a region of the peer from a token that you received yourself.

        A forged token is detected only when you use the region. The connection then breaks.

        Args:
            token: The token, packed or as an object.

        Returns:
            The region of the peer.

        Raises:
            ProtocolError: If `token` is not a valid token.
            ValueError: If it is a token of this side or of another connection.
            LeaseEndedError: If the share has ended and the peer has reported this.
            UnencryptedError: If the connection has `encrypt=True`.
        """
        self._check()
        known = token if isinstance(token, RegionToken) else RegionToken.unpack(bytes_of(token))
        return self._sharing.open_region(known)

    async def recv_region(self) -> RemoteRegion:
        """Wait for the next region that the peer shares with `send_region`.

        If you cancel the wait, no region is lost.
        """
        self._affinity.check(self)
        return await self._sharing.next(self._sharing.arrived)

    async def request_region(
        self, size: int, *, access: Rights = Rights.READ | Rights.WRITE, lease: Lease = "default"
    ) -> RemoteRegion:
        """Borrow zeroed memory from the peer.

        The peer limits the amount with `Config.lend_quota`. If you cancel the call, memory that the
        peer grants later is returned.

        Args:
            size: The number of bytes.
            access: The rights that you need.
            lease: The time for which you need the memory, in seconds from the call. "default" means
                this side's `Config.lease`. None means that you keep the memory until you release
                it, hand it over, or the connection ends. The peer may grant less time
                (`Config.max_lease`), as `RemoteRegion.lease_remaining` shows.
                `RemoteRegion.renew` requests more time.

        Returns:
            The borrowed memory.

        Raises:
            RequestRefusedError: If the peer refuses.
            UnencryptedError: If the connection has `encrypt=True`.
        """
        self._check()
        size, rights = integer("size", size, 1), choice("access", access, Rights)
        return await self._sharing.request(size, rights, self._lease(lease))

    async def hand_over(self, region: RemoteRegion) -> None:
        """Return borrowed memory (`request_region`) to its owner together with its contents.

        The owner gets a Buffer from `recv_buffer`. The buffer contains everything that was written
        before this call. You cannot use the region afterwards. Cancelling the call does not stop
        the transfer. The owner does not get the memory if the lease ends or the only rail fails
        before the transfer.

        Args:
            region: A region from `request_region`.
        """
        self._check()
        check_remote_memory(region, RemoteRegion)._check_usable(self._owner)
        await region._hand_over()

    async def recv_buffer(self) -> Buffer:
        """Wait for the next memory that the peer has borrowed from this side and handed over.

        As with `alloc`, you own the buffer until you release it. If you cancel the wait, no buffer
        is lost.
        """
        self._affinity.check(self)
        return await self._sharing.receive_buffer()

    # ---- one-sided operations ------------------------------------------------------------

    async def _transfer(
        self,
        reads: bool,
        data: AnyMemory,
        remote: Remote,
        imm: int | None,
        progress: Callable[[int], object] | None,
    ) -> None:
        """Read into or write from `data`, which is registered or copied for this operation.

        The compiled `read` and `write` call this method for local memory that is not registered.
        """
        self._check()
        check_remote_memory(remote, RemoteMemory)
        if imm is not None:
            integer("imm", imm, 0, U32_MAX)
        one_sided.check_progress(progress)
        with bytes_of(data, target=reads) as view:
            length = len(view)
        remote._check_access(self._owner, Rights.READ if reads else Rights.WRITE, length)
        memory = UserMemory(self._memory, data, target=reads)
        async with memory as local:
            if reads:
                await self.read(remote, local, progress=progress)
                memory.copy_back()
            else:
                await self.write(local, remote, imm=imm, progress=progress)

    def batch(self) -> Batch:
        """Create a batch of operations that are posted with one doorbell and awaited together."""
        self._check()
        batch_class = Batch if self._rails is None else MovingBatch
        return batch_class(self._messages, self._memory, self._check, self._statistics)

    async def compare_and_swap(self, target: Remote, expected: int, desired: int) -> int:
        """Replace 8 bytes at the peer atomically with `desired` if they equal `expected`.

        If the call is cancelled after the operation was posted, the operation is still executed,
        and the old value is lost.

        Args:
            target: 8 bytes of the peer at an address that is a multiple of 8.
            expected: The value to compare with: an unsigned 64-bit number in the peer's byte order.
            desired: The new value, likewise.

        Returns:
            The old value. The bytes were replaced if and only if it equals `expected`.

        Raises:
            RemoteRangeError: If the length or alignment of `target` is wrong, or the peer has not
                granted the right. Nothing has been posted then.
        """
        operands = swap_operands(expected, desired)
        return await self._atomic(OperationKind.COMPARE_AND_SWAP, target, *operands)

    async def fetch_and_add(self, target: Remote, add: int) -> int:
        """Add a number to 8 bytes at the peer atomically, modulo 2^64.

        The byte order, alignment and effect of cancellation are as for `compare_and_swap`.

        Args:
            target: 8 bytes of the peer at an address that is a multiple of 8.
            add: The number to add.

        Returns:
            The value before the addition.

        Raises:
            RemoteRangeError: As for `compare_and_swap`.
        """
        return await self._atomic(OperationKind.FETCH_AND_ADD, target, *add_operands(add))

    async def _atomic(
        self, kind: OperationKind, target: Remote, compare_add: int, swap: int
    ) -> int:
        self._check()
        check_remote_memory(target, RemoteMemory)._check_access(
            self._owner, Rights.ATOMIC, ATOMIC_SIZE
        )
        with await self._memory.lease(ATOMIC_SIZE, internal=True) as old:
            chain = one_sided.new_chain(self._queue, kind)
            chain.atomic(kind, old, target, compare_add, swap)
            await one_sided.start(self._queue, chain)
            self._statistics.atomics += 1
            return atomic_value(old)
