"""The methods of a connection that work with memory: its own, what both sides share, one-sided."""

from __future__ import annotations

from collections.abc import Callable

from .._core.arguments import I32_MAX, choice, integer, truth
from .._core.operations import OperationKind
from .._core.region import ATOMIC_SIZE, RegionToken, Rights
from .._datapath import one_sided
from .._datapath.session import MessageMethods
from .._memory.registration_cache import CacheStatistics
from ..dmabuf import DmabufRegion
from ..mr_pool import Buffer, LocalMemory, PoolStatistics, Region
from ..verbs._memory.buffers import AnyMemory, bytes_of
from .arguments import remote_memory
from .batch import Batch, MovingBatch, add_numbers, number, swap_numbers
from .lease_thread import Lease, lease_seconds
from .lifecycle import ConnectionLifecycle
from .memory import UserMemory
from .observation import Statistics
from .remote_memory import Remote, RemoteMemory, RemoteRegion
from .shares import Share


class MemoryMethods(ConnectionLifecycle, MessageMethods):
    """The methods of a Connection that work with memory."""

    _statistics: Statistics

    def _lease(self, lease: Lease) -> float | None:
        return lease_seconds(lease, self._endpoint.config.lease)

    def alloc(self, size: int) -> Buffer:
        """Leases `size` bytes of registered memory from the pool; contents undefined.

        QuotaError when the pool has reached its limit (`Config.pool_limit`), or others wait.
        """
        self._check()
        return self._memory.pool.alloc(size)

    async def lease(self, size: int) -> Buffer:
        """As `alloc`, but waits until so much has come back, first come first served.

        Cancelling gives up the wait.  QuotaError at once for more than the limit allows at all.
        A task that holds memory while it waits for more can wait for ever, as with any lock: take
        what is needed together at once, or wait with a timeout.  The end of the connection ends it
        too.
        """
        self._check()
        return await self._memory.lease(integer("size", size), internal=False)

    def pool_statistics(self) -> PoolStatistics:
        """The memory pool that all connections of this loop and device share, as it is now."""
        return self._memory.pool.statistics()

    def registration_statistics(self) -> CacheStatistics:
        """Registrations of memory that a memoryview of yours keeps in its place; see `Config`.

        Shared by all connections of this loop and device.
        """
        return self._memory.registrations.statistics()

    def register(self, memory: AnyMemory) -> Region:
        """Registers memory of the caller's, any buffer or tensor (`verbs.bytes_of`).

        The object is pinned until `Region.close`.  Read-only memory can be sent from and written
        from, not read into.
        """
        self._check()
        return Region(self._memory.pd.reg_mr(memory))

    def register_dmabuf(
        self, fd: int, length: int, *, offset: int = 0, writable: bool = True
    ) -> DmabufRegion:
        """Registers memory of another device, as of a GPU, of which `fd` is a dma-buf.

        `length` bytes from `offset`, for `read`, `write`, batches and `send_region`; see
        `DmabufRegion`.  The fd may be closed afterwards.  UnsupportedError where the device or its
        driver cannot; VerbsError (EINVAL) for a range that the dma-buf does not have.
        """
        self._check()
        fd, length = integer("fd", fd, 0, I32_MAX), integer("length", length)
        offset, writable = integer("offset", offset), truth("writable", writable)
        return DmabufRegion(self._memory.pd, fd, length, offset, writable)

    async def send_region(
        self, region: LocalMemory, *, access: Rights = Rights.READ, lease: Lease = "default"
    ) -> Share:
        """Lets the peer use memory of this side, which it gets by `recv_region`.

        A Buffer, Region or slice becomes a RemoteRegion there, with exactly these bytes and rights,
        for `lease` seconds: "default" is `Config.lease`, a minute unless it is set; None is without
        an end, until the Share that is returned is revoked, or the connection ends.  `Share.renew`
        gives it longer.  Cancelled, nothing is shared.  If the peer has got the key already, that
        is revoked: should the peer use it, the connection breaks, and no memory is touched.
        UnencryptedError with `encrypt=True`, as for all calls that share memory.
        """
        self._check()
        rights = choice("access", access, Rights)
        return await self._sharing.share(region, rights, self._lease(lease))

    def share(
        self, region: LocalMemory, *, access: Rights = Rights.READ, lease: Lease = "default"
    ) -> Share:
        """As `send_region`, but the peer is not told: send it `Share.token.pack()` yourself.

        The peer of this connection can use it, for as long as it is good, with its rights and on
        these bytes alone.  Messages of this connection may carry it at once; on another channel
        send it after `await share.ready()`, since its key takes its turn in the send queue.
        Where the device has no memory windows any peer of the event loop that has the token can
        use it: it is a password (docs/security.md).
        """
        self._check()
        rights = choice("access", access, Rights)
        return self._sharing.open_up(region, rights, self._lease(lease))

    def open_region(self, token: bytes | bytearray | memoryview | RegionToken) -> RemoteRegion:
        """The peer's memory by a token that came on a channel of your own.

        ProtocolError for what is no token, ValueError for one of this side's own or of another
        connection, LeaseEndedError for one that has ended, as soon as the peer has told so.  A
        forged one costs the connection when it is used, as with all that the peer's device refuses.
        UnencryptedError with `encrypt=True`.
        """
        self._check()
        known = token if isinstance(token, RegionToken) else RegionToken.unpack(bytes_of(token))
        return self._sharing.from_token(known)

    async def recv_region(self) -> RemoteRegion:
        """The next region that the peer has shown by `send_region`; cancelling loses nothing."""
        self._affinity.check(self)
        return await self._sharing.next(self._sharing.arrived)

    async def request_region(
        self, size: int, *, access: Rights = Rights.READ | Rights.WRITE, lease: Lease = "default"
    ) -> RemoteRegion:
        """Borrows `size` bytes of the peer's memory, zeroed, within the peer's quota.

        For `lease` seconds from the call: "default" is this side's `Config.lease`; None is without
        an end, until it is released or handed over, or the connection ends.  `RemoteRegion.renew`
        asks for longer.  The peer may grant less (`Config.max_lease`), which `lease_left` of the
        region tells.  Cancelled, the memory goes back as soon as the peer grants it.
        RequestRefusedError when the peer refuses, UnencryptedError with `encrypt=True`.
        """
        self._check()
        size, rights = integer("size", size, 1), choice("access", access, Rights)
        return await self._sharing.request(size, rights, self._lease(lease))

    async def hand_over(self, region: RemoteRegion) -> None:
        """Gives borrowed memory (`request_region`) back to its owner, with what is in it.

        It cannot be used here any more, and is a Buffer of the peer: see `recv_buffer`.  What was
        written before is there before.  Cancelled, it is handed over all the same.  The peer does
        not get what has ended there meanwhile: with its lease, or with its only rail.
        """
        self._check()
        remote_memory(region, RemoteRegion)._check(self._owner)
        await region._hand_over()

    async def recv_buffer(self) -> Buffer:
        """The next memory of this side that the peer had borrowed and has handed over.

        The caller's from now on, as from `alloc`.  Cancelling loses nothing.
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
        self._check()
        remote_memory(remote, RemoteMemory)
        memory = UserMemory(self._memory, data, target=reads)
        async with memory as local:
            if reads:
                await self.read(remote, local, progress=progress)
                memory.land()
            else:
                await self.write(local, remote, imm=imm, progress=progress)

    def batch(self) -> Batch:
        """Operations that are posted with one doorbell and waited for as one; see `Batch`."""
        self._check()
        made = Batch if self._rails is None else MovingBatch
        return made(self._messages, self._memory, self._check, self._statistics)

    async def compare_and_swap(self, target: Remote, expected: int, desired: int) -> int:
        """Atomically replaces 8 bytes at the peer if they are `expected`; returns what was there.

        The numbers are unsigned 64-bit in the peer's byte order, at an address that is a multiple
        of 8.  It has swapped if and only if the result equals `expected`.  Cancelled after it was
        posted, it is executed, and the old number is lost.  RemoteRangeError, before anything is
        posted, for another length than 8, another alignment, or a right that the peer has not
        given.
        """
        numbers = swap_numbers(expected, desired)
        return await self._atomic(OperationKind.COMPARE_AND_SWAP, target, *numbers)

    async def fetch_and_add(self, target: Remote, add: int) -> int:
        """Atomically adds to 8 bytes at the peer (modulo 2^64); returns what was there before.

        Byte order, address, cancellation and RemoteRangeError as with `compare_and_swap`.
        """
        return await self._atomic(OperationKind.FETCH_AND_ADD, target, *add_numbers(add))

    async def _atomic(
        self, kind: OperationKind, target: Remote, compare_add: int, swap: int
    ) -> int:
        self._check()
        remote_memory(target, RemoteMemory)
        with await self._memory.lease(ATOMIC_SIZE, internal=True) as old:
            chain = one_sided.new_chain(self._queue, kind)
            chain.atomic(kind, old, target, compare_add, swap)
            await one_sided.start(self._queue, chain)
            self._statistics.atomics += 1
            return number(old)
