"""A connection: the user's interface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

from .._core import connection_states, protocol
from .._core.arguments import I32_MAX, choice, integer, truth
from .._core.connection_states import CLOSING, LifecycleEvent
from .._core.handshake import Hello
from .._core.operations import OperationKind
from .._core.region import ATOMIC_SIZE, RegionToken, Rights
from .._core.snapshot_types import ConnectionState, traffic
from .._datapath import one_sided
from .._datapath.message import Counts
from .._datapath.one_sided import WRChain
from .._datapath.session import MessageMethods
from .._loop.shutdown import EXITS, background
from .._memory.registration_cache import CacheStatistics
from ..cm.address import Address
from ..dmabuf import DmabufRegion
from ..errors import ConnectionClosedError, RDMAError, host_port
from ..mr_pool import Buffer, LocalMemory, PoolStatistics, Region
from ..verbs import QueuePair
from ..verbs._memory.buffers import AnyMemory, bytes_of
from . import observation
from .arguments import remote_memory
from .batch import Batch, MovingBatch, add_numbers, number, swap_numbers
from .lease_thread import Lease, lease_seconds
from .lifecycle import ConnectionLifecycle
from .memory import UserMemory
from .rails import RailStatus
from .remote_memory import Remote, RemoteMemory, RemoteRegion
from .shares import Share

if TYPE_CHECKING:
    from .endpoint import RailEndpoint


@dataclass
class Statistics(Counts):
    """Counts since the connection was made."""

    # Each is a member of Counts: a plain default here would stand before it.
    messages_sent: int = field(default_factory=int)
    messages_received: int = field(default_factory=int)
    bytes_sent: int = field(default_factory=int)
    bytes_received: int = field(default_factory=int)
    reads: int = field(default_factory=int)
    writes: int = field(default_factory=int)
    atomics: int = field(default_factory=int)


class Begun(NamedTuple):
    """The facts of a connection from the moment when its user gets it."""

    since: float
    accepted: bool


class Connection(ConnectionLifecycle, MessageMethods):
    """One RDMA connection.  Made by `connect`, a `Listener` or `start_server`, never directly.

    Belongs to the event loop it was made in; not thread-safe.  Every await may be cancelled: what
    was posted to the device is then finished by the device, its memory held until that moment,
    and order is kept.  What has not been posted is not done.

    A message comes after those before it, and after all writes whose calls began before its own,
    awaited or not; so do the regions that are handed over or released, but that a write with
    immediate data, if it waits for the peer's room then, is refused.  Operations on the peer's
    memory begin in the order of their calls, and may pass messages that wait for the peer's room,
    or others that wait for memory of the pool.  What a read or an atomic sees may be from after a
    later write: await it first.

    After the end every call raises ConnectionClosedError (closed in order, by
    this side or by the peer's goodbye) or ConnectionBrokenError (its text says why).
    """

    def __init__(self, endpoint: RailEndpoint, hello: Hello) -> None:
        super().__init__(endpoint, hello)
        self._begun: Begun | None = None
        self._statistics = Statistics()
        self._request_data = b""
        self._messages.count_in(self._statistics)
        self._set_session(self._messages)
        observation.register(self._statistics)
        self._wire_seen: str | None = None
        self._wire_requested = False

    def _begin(self, *, accepted: bool) -> None:
        """Tells counts and hooks that its user is about to get it; it may have ended meanwhile."""
        self._begun = Begun(self._sharing.clock.now(), accepted)
        observation.begun(self, self._queue.peer, accepted=accepted)
        if self._state is connection_states.ConnectionState.CLOSED:
            self._report_end()
        elif self._rails is not None:
            self._rails.begin()

    def _report_end(self) -> None:
        if self._begun is not None:
            error, accepted = self._close_cause, self._begun.accepted
            assert error is not None
            observation.ended(self, self._queue.peer, error, accepted=accepted)

    def __del__(self) -> None:
        """Ends an open connection that was dropped as `abort` does.  In any thread, at any time."""
        super().__del__()
        if (counted := getattr(self, "_statistics", None)) is not None:
            observation.finalized(counted)

    # ---- what it is ----------------------------------------------------------------------

    def __repr__(self) -> str:
        if self._close_cause is not None:
            state = "closed" if isinstance(self._close_cause, ConnectionClosedError) else "broken"
        elif self._state in CLOSING:
            state = "closing"
        else:
            state = self._state.name.lower().replace("_", " ")
        peer = host_port(self.peer_address) if self.peer_address is not None else "a peer"
        return f"<Connection on {self.device} with {peer}, {state}>"

    @property
    def device(self) -> str:
        """The name of the device that carries it."""
        return self._of_lead.driver.context.name

    @property
    def _of_lead(self) -> RailEndpoint:
        lead = self._rails.lead if self._rails is not None else None
        return self._endpoint if lead is None or lead.endpoint is None else lead.endpoint

    @property
    def wire(self) -> str | None:
        """The medium of the bytes: "roce", "infiniband", "iwarp", or with the embedded device,
        which is software, "shared memory" or "tcp".

        None while the embedded device is still choosing, at most until the first message has
        arrived, and after the end.
        """
        qp = self._of_lead.qp
        return qp.wire if qp is not None and not qp.closed else None

    @property
    def local_address(self) -> Address | None:
        """(host, port) of this side; None when the link has none."""
        return self._link.local_address if self._link else None

    @property
    def peer_address(self) -> Address | None:
        """(host, port) of the peer; None when the link has none."""
        return self._link.peer_address if self._link else None

    @property
    def queue_pair(self) -> QueuePair:
        """Its queue pair, to look at, and for its raw handles (docs/raw-handles.md).

        What is posted or changed there breaks the connection: the connection keeps the account.
        """
        assert self._of_lead.qp is not None
        return self._of_lead.qp

    @property
    def rails(self) -> tuple[RailStatus, ...]:
        """Its queue pairs on this side's devices, as they are now, first that of the handshake.

        Where `connect` was given several devices there are others, one for each.  `device`, `wire`
        and `queue_pair` are those of the lead.
        """
        assert self._begun is not None
        if self._rails is not None:
            return tuple(self._rails.status())
        counts = self._statistics
        state: Literal["down", "lead"] = "down" if self.closed else "lead"
        since, error = self._begun.since, self._close_cause
        sent, received = counts.bytes_sent, counts.bytes_received
        return (RailStatus(self.device, state, since, error, sent, received),)

    @property
    def closed(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._close_cause is not None or (self._queue.failed and not self._queue.suspended)

    @property
    def request_data(self) -> bytes:
        """Data of the peer's `connect(data=...)`; b"" unless this listener has `on_request`."""
        return self._request_data

    @property
    def max_message(self) -> int:
        """The longest message that the peer takes, in bytes."""
        assert self._handshake.peer is not None
        return self._handshake.peer.max_message

    def statistics(self) -> Statistics:
        """Counts of messages, bytes and operations so far; the object goes on counting."""
        return self._statistics

    def _figures(self) -> ConnectionState:
        """Its part of `aiordma.snapshot`, since it has begun. Any thread may ask."""
        assert self._begun is not None
        queue = self._queue
        messages, memory = self._messages.figures(), self._sharing.figures()
        local, now = self.local_address, self._sharing.clock.now()
        return {
            "device": self.device,
            "loop": id(self._loop),
            "wire": self._wire_seen,
            "state": self._state.name,
            "accepted": self._begun.accepted,
            "local": host_port(local) if local is not None else None,
            "peer": queue.peer or None,
            "qp_num": queue.qp.qp_num,
            "age": now - self._begun.since,
            "traffic": traffic(partial(getattr, self._statistics)),
            "send_queue": queue.capacity,
            "outstanding": queue.outstanding,
            "messages_waiting": messages["messages_waiting"],
            "waiting_for_credits": 0 if messages["credits"] else messages["messages_waiting"],
            "waiting_for_send_queue": queue.outstanding - (queue.capacity - queue.free),
            "messages_unread": messages.get("arrived", 0),
            "shared_regions": memory["shared_regions"],
            "lent_bytes": memory["lent_bytes"],
            "remote_regions": memory["remote_regions"],
            "rails": [rail.figures(now) for rail in self.rails],
        }

    def _request_wire(self) -> asyncio.AbstractEventLoop | None:
        """The loop that is to call `_read_wire`; None if the wire is known or was requested."""
        if self._wire_seen is not None or self._wire_requested:
            return None
        self._wire_requested = True  # a loop that is stuck is asked once
        return self._loop

    def _read_wire(self) -> None:
        """In the thread of its loop, since it asks the device."""
        self._wire_requested = False
        with suppress(RDMAError, OSError):  # its device has failed
            self._wire_seen = self.wire

    def _lease(self, lease: Lease) -> float | None:
        return lease_seconds(lease, self._endpoint.config.lease)

    # ---- memory --------------------------------------------------------------------------

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
        return await self._sharing.receive()

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
        await self._sharing.hand_over(region)

    async def recv_buffer(self) -> Buffer:
        """The next memory of this side that the peer had borrowed and has handed over.

        The caller's from now on, as from `alloc`.  Cancelling loses nothing.
        """
        self._affinity.check(self)
        return await self._sharing.receive_buffer()

    # ---- one-sided operations ------------------------------------------------------------

    async def write(
        self,
        source: LocalMemory | AnyMemory,
        target: Remote,
        *,
        imm: int | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        """Writes registered memory, or any buffer, to the peer's memory of the same length.

        Returns when the bytes are in the peer's memory.  Its program is not told, unless there is
        immediate data: then an empty message with `imm` (an unsigned 32-bit number) wakes its
        `recv`, in its turn among the messages, and waits for room as they do; it returns when the
        peer's device has that too.  `source` must not change until it returns, or until the device
        has finished with it after a cancellation.
        Long transfers go in pieces, several under way at a time; `progress` is called with the
        number of bytes that have been written.

        Before anything is posted it raises RemoteRangeError for a right that the peer has not
        given, LeaseEndedError when the lease is over, ValueError for different lengths.
        """
        self._check()
        if isinstance(source, LocalMemory) and isinstance(target, RemoteMemory):
            await one_sided.write(self._queue, self._messages.outbox, source, target, imm, progress)
        else:
            remote_memory(target, RemoteMemory)
            async with UserMemory(self._memory, source, target=False) as local:
                await one_sided.write(
                    self._queue, self._messages.outbox, local, target, imm, progress
                )
        self._statistics.writes += 1

    async def read(
        self,
        source: Remote,
        target: LocalMemory | AnyMemory,
        *,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        """Reads the peer's memory into registered memory, or any writable buffer, as long.

        Returns when the bytes are in `target`, which must neither be read nor changed until then;
        after a cancellation the bytes of a read that was posted still arrive there.  Pieces,
        `progress`, RemoteRangeError, LeaseEndedError and ValueError as with `write`.
        """
        self._check()
        if isinstance(target, LocalMemory) and isinstance(source, RemoteMemory):
            await one_sided.read(self._queue, target, source, progress)
        else:
            remote_memory(source, RemoteMemory)
            memory = UserMemory(self._memory, target, target=True)
            async with memory as local:
                await one_sided.read(self._queue, local, source, progress)
                memory.land()
        self._statistics.reads += 1

    def batch(self) -> Batch:
        """Operations that are posted with one doorbell and waited for as one; see `Batch`."""
        self._check()
        if self._rails is not None:
            return MovingBatch(self._messages, self._memory, self._check, self._statistics)
        return Batch(self._queue, self._memory, self._check, self._statistics)

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
            chain = WRChain(self._queue, kind)
            chain.atomic(kind, old, target, compare_add, swap)
            await one_sided.start(self._queue, chain)
            self._statistics.atomics += 1
            return number(old)

    # ---- the end --------------------------------------------------------------------------

    async def close(self) -> None:
        """Ends the connection in order: waits for work under way, sends a goodbye, disconnects.

        Waits at most `Config.close_timeout` for the peer.  Messages that have arrived can still
        be received: all those whose `send` has returned at the peer, but for those behind a long
        one that this side has not read.  A second call waits for the first.  Cancelled, it aborts.
        """
        await self._close(protocol.GOODBYE)

    async def _close(self, goodbye: protocol.Goodbye) -> None:
        """As `close`; `goodbye` is what the peer is told."""
        if self._affinity.is_after_fork:
            return
        self._affinity.check(self)
        if self._advance(LifecycleEvent.CLOSE):
            self._messages.closing = True
            try:
                await self._messages.drained()
                if self._advance(LifecycleEvent.DRAINED):
                    await self._sharing.tell(goodbye)
                    self._finish(at_once=True)
            except RDMAError:
                pass  # the peer is gone, or does not read: it will see the disconnect
            finally:
                self._finish()
        await self._closed.wait()

    def _close_at_exit(self, error: BaseException) -> None:
        """Closes it without waiting, as the end of the loop does.

        An exception that ends the program leaves at once: what the peer, or a task that sees the
        end, does meanwhile could end the program otherwise.
        """
        if self._closed.is_set() or self._affinity.is_after_fork:
            return

        async def close() -> None:
            await asyncio.sleep(0)  # uvloop runs what is ready before the exception leaves it
            await self._close(protocol.failed(error))

        self._loop_shutdown.closing(self)
        self._closing_at_exit = background(self._loop, close())

    def abort(self) -> None:
        """Ends the connection now: work under way is dropped, the peer sees a broken connection.

        The resources are given back in the next iteration of the loop, which `wait_closed` waits
        for.
        """
        if not self._affinity.is_after_fork:
            self._affinity.check(self)
            self._end(ConnectionClosedError("the connection was aborted"))

    async def wait_closed(self) -> None:
        """Waits until the connection has ended, in whatever way, and given back its resources."""
        if not self._affinity.is_after_fork:
            self._affinity.check(self)
            await self._closed.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, exc: BaseException | None, traceback: object) -> None:
        """Closes it; if an exception leaves the block, the peer gets ConnectionBrokenError.

        The peer is told the type of the exception, not its text.  SystemExit and KeyboardInterrupt,
        which end the program, do not wait for that: the end of the loop does.
        """
        # An asynchronous generator whose user needs no more of it ends with GeneratorExit.
        if exc is None or isinstance(exc, GeneratorExit):
            await self.close()
        elif isinstance(exc, EXITS):
            self._close_at_exit(exc)
        else:
            await self._close(protocol.failed(exc))
