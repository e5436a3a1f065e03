"""A connection: the user's face of the parts in this folder, and its life and death.

One event decides how a connection ended: the first of the user's `close`, the peer's goodbye, a
failed work request, a disconnect, a broken protocol.  From then on every waiter fails, with that
event as the cause; messages that had arrived can still be received; the resources go at once.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
import weakref
from asyncio import _get_running_loop
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from .. import loop_end
from .._core import protocol
from .._core.authentication import transcript
from .._core.handshake import Hello
from .._core.region import RegionToken, Rights
from ..config import Config
from ..dmabuf import DmabufRegion
from ..errors import (
    AuthenticationError,
    ConnectionBrokenError,
    ConnectionClosedError,
    MessageTooLongError,
    ProtocolError,
    RDMAError,
    WorkCompletionError,
)
from ..home import Home
from ..mr_pool import Buffer, LocalMemory, PoolStatistics, Region
from ..registration_cache import CacheStatistics
from ..verbs.buffers import AnyMemory, bytes_of
from .authentication import Authentication
from .batch import Batch
from .inbox import Target
from .keep_alive import KeepAlive
from .memory import Memory
from .message import Message
from .messages import Messages
from .one_sided import OneSided, Remote
from .security import Security
from .sharing import RemoteRegion, Share, Sharing
from .side import Side
from .transfers import Progress
from .work_queue import WorkQueue

logger = logging.getLogger("aiordma.connection")

Address = tuple[str, int]


class Link(Protocol):
    """How the connection came about, and how its end is told to the other side."""

    @property
    def local_address(self) -> Address | None: ...

    @property
    def peer_address(self) -> Address | None: ...

    def close(self) -> None:
        """Disconnects, before the queue pair is destroyed.  Never raises, never blocks."""

    def release(self) -> None:
        """Gives the rest back, after the queue pair is destroyed."""


class Received(NamedTuple):
    """What `recv_into` has put there."""

    length: int
    """Bytes of the message."""
    imm: int | None
    """The sender's immediate data."""


@dataclass(slots=True)
class Statistics:
    """Counts since the connection was made."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    reads: int = 0
    writes: int = 0
    atomics: int = 0


class Connection:
    """One RDMA connection.  Made by `connect`, a `Listener` or `start_server`, never directly.

    Belongs to the event loop it was made in; not thread-safe.  Every await may be cancelled: what
    was posted to the device is then finished by the device, its memory held until that moment,
    and order is kept.  After the end every call raises ConnectionClosedError (closed in order, by
    this side or by the peer's goodbye) or ConnectionBrokenError (its `__cause__` says why).
    """

    def __init__(self, side: Side, config: Config, security: Security) -> None:
        assert side.qp is not None
        self._side = side
        self._security = security
        self._authentication: Authentication | None = None
        self._keep_alive: KeepAlive | None = None
        self._config = config
        self._home = Home()
        self._loop = self._home.loop
        self._loop_end = loop_end.of_running_loop()
        self._link: Link | None = None
        self._peer: Hello | None = None
        self._root: BaseException | None = None
        self._closing = False
        self._said_goodbye = False
        self._last_word: RDMAError | None = None
        self._closed = asyncio.Event()
        self._on_closed: Callable[[], None] | None = None
        self._statistics = Statistics()
        # The device knows the parts, and the parts know this only weakly: who drops a connection
        # is rid of it (`__del__`).
        self._waiter_error = WaiterErrors()
        driver = side.driver
        self._queue = WorkQueue(driver, side.qp, weakly(self._end), self._waiter_error)
        self._memory = Memory(driver.pool, driver.registrations, config, self._waiter_error)
        self._messages = Messages(
            queue=self._queue,
            memory=self._memory,
            config=config,
            on_control=weakly(self._control),
            on_protocol_error=weakly(self._protocol_error),
            waiter_error=self._waiter_error,
        )
        self._messages.gated = security.auth is not None
        self._queue.on_room = self._messages.pump
        self._sharing = Sharing(driver.pool, config, self._messages, self._waiter_error)
        self._one_sided = OneSided(
            self._queue, self._messages, self._sharing, self._memory, weakly(self._check)
        )
        self._queue.user = self._sharing
        self._queue.accepting = True
        self._loop_end.add(self)

    def _post_receives(self) -> None:
        """Before the peer may send: the queue pair is in INIT or beyond."""
        self._messages.post_receives()

    async def _start(self, link: Link, peer: Hello, *, client: bool) -> None:
        """The link is up: shows the peer that both have the same key, if one was given.

        Raises when they have not, and when the queue pair has failed meanwhile.
        """
        if self._root is not None:
            raise self._waiter_error(self._root)
        self._link = link
        self._waiter_error.peer = link.peer_address
        self._peer = peer
        key = self._security.auth
        if self._config.keep_alive is not None:
            self._keep_alive = KeepAlive(
                self._queue,
                self._config.keep_alive,
                self._config.keep_alive_timeout,
                weakly(self._silent),
            )
        if key is None:
            self._messages.start(peer.eager_size, peer.data_receives, peer.control_receives)
            return
        self._authentication = handshake = Authentication(
            key, self._transcript(peer, client=client), self._messages.send_control, client=client
        )
        self._messages.start(peer.eager_size, peer.data_receives, peer.control_receives)
        handshake.begin()
        await handshake.done

    def _transcript(self, peer: Hello, *, client: bool) -> bytes:
        qp = self._side.qp
        assert qp is not None
        ours, theirs = (self._side.hello, qp.qp_num), (peer, qp.query().dest_qp_num)
        (here, number), (there, peer_number) = (ours, theirs) if client else (theirs, ours)
        return transcript(here, there, number, peer_number)

    def _give_up(self, link: Link, error: BaseException) -> None:
        """The handshake failed: everything goes, and nobody was waiting yet."""
        self._link = link
        if self._closed.is_set():  # the queue pair failed first, and went without the link
            link.release()
        self._end(error)

    # ---- what it is ----------------------------------------------------------------------

    def __repr__(self) -> str:
        if self._root is not None:
            state = "closed" if isinstance(self._root, ConnectionClosedError) else "broken"
        else:
            state = "closing" if self._closing else "open"
        return f"<Connection on {self.device} with {self.peer_address}, {state}>"

    @property
    def device(self) -> str:
        """The name of the device that carries it."""
        return self._side.driver.context.name

    @property
    def local_address(self) -> Address | None:
        """(host, port) of this side; None when the link has none."""
        return self._link.local_address if self._link else None

    @property
    def peer_address(self) -> Address | None:
        """(host, port) of the peer; None when the link has none."""
        return self._link.peer_address if self._link else None

    @property
    def closed(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._root is not None

    @property
    def max_message(self) -> int:
        """The longest message that the peer takes, in bytes."""
        assert self._peer is not None
        return self._peer.max_message

    def statistics(self) -> Statistics:
        """What has been sent, received and done so far; the object goes on counting."""
        return self._statistics

    # ---- messages ------------------------------------------------------------------------

    async def send(
        self, data: Message | LocalMemory | AnyMemory, *, imm: int | None = None
    ) -> None:
        """Sends one message of any size: any buffer or tensor (`verbs.bytes_of`), registered
        memory, or a received Message.

        Returns when the peer's device has it (small messages) or the peer has read it (large
        ones); until then the buffer must not change.  `imm` is an unsigned 32-bit number that
        travels beside the data.  Messages arrive in the order of the calls.  Waits while the peer
        has no room, and while the memory pool has none.  Cancelled before it was posted, the
        message is not sent; after that it is.
        Raises MessageTooLongError before anything is sent.
        """
        length, future = self._send(data, imm)
        await future
        self._statistics.messages_sent += 1
        self._statistics.bytes_sent += length

    def send_nowait(
        self, data: Message | LocalMemory | AnyMemory, *, imm: int | None = None
    ) -> asyncio.Future[None]:
        """As `send`, for code that cannot await: the message has its place in the order now.

        The future ends as `send` would; until then the buffer must not change.  Cancelling it is
        cancelling `send`.  There is no backpressure but the future: bound what you have under way.
        """
        length, future = self._send(data, imm)

        def count(future: asyncio.Future[None]) -> None:
            if not future.cancelled() and future.exception() is None:
                self._statistics.messages_sent += 1
                self._statistics.bytes_sent += length

        future.add_done_callback(count)
        return future

    def _send(
        self, data: Message | LocalMemory | AnyMemory, imm: int | None
    ) -> tuple[int, asyncio.Future[None]]:
        self._check()
        if isinstance(data, Message):
            view = data.data
        else:
            view = data.view if isinstance(data, LocalMemory) else bytes_of(data)
        if len(view) > self.max_message:
            raise MessageTooLongError(len(view), self.max_message)
        if imm is not None:
            check_imm(imm)
        return len(view), self._messages.send(view, imm)

    async def recv(self) -> Message:
        """The next message, as a leased view of the memory it arrived in; see `Message`.

        Waits for memory too, where a long message comes and the pool is exhausted; QuotaError for
        one that it can never hold, which stays for `recv_into`.  Cancelling loses nothing.
        Messages that arrived before the end can still be received after it; then
        ConnectionClosedError or ConnectionBrokenError.
        """
        if _get_running_loop() is not self._loop:
            self._home.check(self)
        message = await self._messages.inbox.recv()
        self._statistics.messages_received += 1
        self._statistics.bytes_received += len(message)
        return message

    async def recv_into(self, memory: LocalMemory | AnyMemory) -> Received:
        """The next message, into memory of the caller's: how long it is, and its immediate data.

        Registered memory, or any writable buffer, at least as long as the message; a long message
        is read straight into it, so this is how one that is larger than the pool is received.
        MessageTooLongError when it does not fit: the message stays for the next call.  The memory
        may have been written to after a cancellation, and for as long as what was posted before it
        is under way; the message is not lost.  The end as with `recv`.
        """
        self._home.check(self)
        if isinstance(memory, LocalMemory):
            target = Target(memory.view, memory)
        else:
            target = Target(bytes_of(memory), None, memory)
        if target.view.readonly:
            raise ValueError(f"cannot receive into {type(memory).__name__}: it is read-only")
        received = Received(*await self._messages.inbox.recv_into(target))
        self._statistics.messages_received += 1
        self._statistics.bytes_received += received.length
        return received

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages until the connection is closed in order; ConnectionBrokenError otherwise."""
        while True:
            try:
                message = await self.recv()
            except ConnectionClosedError:
                return
            yield message

    # ---- memory --------------------------------------------------------------------------

    def alloc(self, size: int) -> Buffer:
        """Leases `size` bytes of registered memory from the pool; contents undefined.

        QuotaError when the pool has reached its limit (`Config.pool_limit`), or others wait.
        """
        self._check()
        return self._memory.pool.alloc(size)

    async def lease(self, size: int) -> Buffer:
        """As `alloc`, but waits until so much has come back, first come first served.

        Cancelling leaves the line.  QuotaError at once for more than the limit allows at all.
        Who holds memory while waiting for more can wait for ever, as with any lock: take what is
        needed together at once, or wait with a timeout.  The end of the connection ends it too.
        """
        self._check()
        return await self._memory.lease(size, brief=False)

    def pool_statistics(self) -> PoolStatistics:
        """The memory pool that all connections of this loop and device share, as it is now."""
        return self._memory.pool.statistics()

    def registration_statistics(self) -> CacheStatistics:
        """Registrations of memory that a memoryview of yours keeps in its place; see `Config`.

        Shared by all connections of this loop and device.
        """
        return self._memory.registrations.statistics()

    def register(self, memory: AnyMemory) -> Region:
        """Registers the caller's own memory, any buffer or tensor, for operations.

        The object is pinned until `Region.close`.  Read-only memory can be sent from and written
        from, not read into.
        """
        self._check()
        return Region(self._side.driver.pd.reg_mr(memory))

    def register_dmabuf(
        self, fd: int, length: int, *, offset: int = 0, writable: bool = True
    ) -> DmabufRegion:
        """Registers memory of another device, as of a GPU, of which `fd` is a dma-buf.

        `length` bytes from `offset`, for `read`, `write`, batches and `send_region`; see
        `DmabufRegion`.  The fd may be closed afterwards.  UnsupportedError where the device or its
        driver cannot; VerbsError (EINVAL) for a range that the dma-buf does not have.
        """
        self._check()
        return DmabufRegion(self._side.driver.pd, fd, length, offset, writable)

    async def send_region(
        self,
        region: LocalMemory | RemoteRegion,
        *,
        access: Rights = Rights.READ,
        lease: float | None = None,
    ) -> Share | None:
        """Lets the peer use memory of this side, or hands borrowed memory back to its owner.

        A Buffer, Region or slice becomes a RemoteRegion at the peer, with exactly these bytes
        and rights, for `lease` seconds (None: until the Share that is returned is revoked, or the
        connection ends).  A RemoteRegion from `request_region` becomes a Buffer at the peer, and
        cannot be used here any more; nothing is returned.
        """
        self._check()
        if isinstance(region, RemoteRegion):
            await self._sharing.hand_over(region)
            return None
        check_lease(lease)
        return await self._sharing.share(region, access, lease)

    def share(
        self,
        region: LocalMemory,
        *,
        access: Rights = Rights.READ,
        lease: float | None = None,
    ) -> Share:
        """As `send_region`, but tells nobody: `Share.token.pack()` is for a channel of your own.

        Whoever gets to know the token and has a connection with this process can use it, for as
        long as it is good, in the way that it says and on these bytes alone: it is a password.
        """
        self._check()
        check_lease(lease)
        return self._sharing.open_up(region, access, lease)

    def open_region(self, token: bytes | bytearray | memoryview | RegionToken) -> RemoteRegion:
        """The peer's memory by a token that came on a channel of your own.

        ProtocolError for what is no token.  That it is good shows when it is used: a wrong one
        costs the connection, as with all that the peer's device refuses.
        """
        self._check()
        known = token if isinstance(token, RegionToken) else RegionToken.unpack(token)
        return self._sharing.told(known)

    async def recv_region(self) -> RemoteRegion | Buffer:
        """The next region the peer sent: its memory (RemoteRegion), or this side's, which it had
        borrowed and now hands over (Buffer).  Cancelling loses nothing.
        """
        self._home.check(self)
        return await self._sharing.receive()

    async def request_region(
        self,
        size: int,
        *,
        access: Rights = Rights.READ | Rights.WRITE,
        lease: float | None = None,
    ) -> RemoteRegion:
        """Borrows `size` bytes of the peer's memory, zeroed, within the peer's quota.

        RequestRefusedError when the peer says no.
        """
        self._check()
        check_lease(lease)
        if not 1 <= size < 1 << 64:
            raise ValueError(f"a region has at least one byte, not {size}")
        return await self._sharing.request(size, access, lease)

    # ---- one-sided operations ------------------------------------------------------------

    async def write(
        self,
        source: LocalMemory | AnyMemory,
        target: Remote,
        *,
        imm: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Writes registered memory, or any buffer, to the peer's memory of the same length.

        Returns when the bytes are in the peer's memory.  Its program is not told, unless there is
        immediate data: then an empty message with `imm` (an unsigned 32-bit number) wakes its
        `recv`, in its turn among the messages, and waits for room as they do.  `source` must not
        change meanwhile.  Long transfers go in pieces, several under way at a time; `progress` is
        called with the number of bytes that are there.  RemoteRangeError before anything is posted
        when the range or the right is not there.
        """
        self._check()
        done = self._queue.write(source, target) if imm is None and progress is None else None
        if done is not None:
            await done
        else:
            if imm is not None:
                check_imm(imm)
            await self._one_sided.write(source, target, imm, progress)
        self._statistics.writes += 1

    async def read(
        self,
        source: Remote,
        target: LocalMemory | AnyMemory,
        *,
        progress: Progress | None = None,
    ) -> None:
        """Reads the peer's memory into registered memory, or any writable buffer, as long.

        Pieces, `progress` and RemoteRangeError as with `write`.
        """
        self._check()
        done = self._queue.read(target, source) if progress is None else None
        if done is not None:
            await done
        else:
            await self._one_sided.read(source, target, progress)
        self._statistics.reads += 1

    def batch(self) -> Batch:
        """Operations that are posted with one doorbell and waited for as one; see `Batch`."""
        self._check()
        return Batch(self._one_sided, self._queue, self._check)

    async def compare_and_swap(self, target: Remote, expected: int, desired: int) -> int:
        """Atomically replaces 8 bytes at the peer if they are `expected`; returns what was there.

        The numbers are unsigned 64-bit in the peer's byte order, at an address that is a multiple
        of 8.  It has swapped if and only if the result equals `expected`.
        """
        old = await self._one_sided.compare_and_swap(target, expected, desired)
        self._statistics.atomics += 1
        return old

    async def fetch_and_add(self, target: Remote, add: int) -> int:
        """Atomically adds to 8 bytes at the peer (modulo 2^64); returns what was there before."""
        old = await self._one_sided.fetch_and_add(target, add)
        self._statistics.atomics += 1
        return old

    # ---- life and death ------------------------------------------------------------------

    def _check(self) -> None:
        if _get_running_loop() is not self._loop:
            self._home.check(self)
        if self._root is not None:
            raise self._waiter_error(self._root)
        if self._closing:
            raise ConnectionClosedError("the connection is being closed")

    def _control(self, message: protocol.Message) -> None:
        authentication = self._authentication
        if isinstance(message, protocol.AuthHello | protocol.AuthAnswer | protocol.AuthProof):
            if authentication is None:
                raise ProtocolError("the peer wants to show that it has a key; none was given here")
            try:
                authentication.control(message)
            except AuthenticationError as error:
                self._refuse(error)
            else:
                # Now, not when the one who waits wakes: what comes next may be here already.
                self._messages.gated = not authentication.done.done()
            return
        if self._messages.gated and not isinstance(message, protocol.Goodbye):
            raise ProtocolError(
                "the peer asks for something before it has shown that it has the key"
            )
        match message:
            case protocol.Goodbye(code=protocol.GoodbyeCode.NORMAL):
                self._parted(ConnectionClosedError(by_peer=True))
            case protocol.Goodbye(code=protocol.GoodbyeCode.NOT_AUTHENTICATED):
                self._parted(AuthenticationError("the peer says that it has not the same key"))
            case protocol.Goodbye():
                self._parted(
                    ConnectionBrokenError(f"the peer gave up (code {message.code}): {message.text}")
                )
            case protocol.Ping():
                self._messages.send_control(protocol.Pong(message.request_id))
            case _:
                self._sharing.control(message)

    def _parted(self, error: RDMAError) -> None:
        """The peer has said its last word.

        It may have taken messages of ours whose completions lie behind this one in the completion
        queue, since nothing orders those of sends and receives: they have this turn of the loop.
        """
        self._last_word = error
        self._messages.peer_has_left = True
        self._loop.call_soon(self._end, error)

    def _protocol_error(self, error: ProtocolError) -> None:
        logger.warning("%r: %s", self, error)
        self._give_reason(protocol.GoodbyeCode.PROTOCOL_ERROR, error)

    def _refuse(self, error: AuthenticationError) -> None:
        logger.warning("%r: %s", self, error)
        self._give_reason(protocol.GoodbyeCode.NOT_AUTHENTICATED, error)

    def _give_reason(self, code: protocol.GoodbyeCode, error: RDMAError) -> None:
        """The peer's device may still take it; nobody waits for that."""
        self._messages.send_control(protocol.Goodbye(0, code, str(error)))
        self._end(error)

    def _disconnected(self, reason: str) -> None:
        """The other side is gone.  A goodbye may lie in the completion queue still: look first."""
        if self._root is None:
            self._side.driver.poll()
        self._end(ConnectionBrokenError(reason))

    def _silent(self, seconds: float) -> None:
        self._end(
            ConnectionBrokenError(
                f"the peer's device has not been heard for {seconds:g} seconds and does not answer "
                f"(Config.keep_alive)"
            )
        )

    def _end(self, root: BaseException) -> None:
        """The one event that ended the connection; later ones change nothing."""
        if self._root is not None:
            return
        if self._last_word is not None:
            root = self._last_word
        elif self._said_goodbye and isinstance(root, ConnectionBrokenError | WorkCompletionError):
            # Nothing was under way any more: what looks like a break is the peer's answer.
            root = ConnectionClosedError()
        self._root = root
        if self._keep_alive is not None:
            self._keep_alive.stop()
        if self._authentication is not None and not self._authentication.done.done():
            self._authentication.done.set_exception(self._waiter_error(root))
            self._authentication.done.exception()  # seen, also if nobody waits yet
        self._queue.fail(root)
        self._memory.end(root)
        self._sharing.end(root)
        self._messages.end(root)
        # Not from here: this may be the middle of a drain, or of a post.
        self._loop.call_soon(self._tear_down)

    async def _end_with_loop(self) -> None:
        self._end(ConnectionClosedError("its event loop has ended"))
        await self._closed.wait()

    def _end_without_loop(self) -> None:
        self._root = self._root or ConnectionClosedError("its event loop has been closed")
        if not self._closed.is_set():
            self._tear_down()

    def _tear_down(self) -> None:
        if self._link is not None:
            self._link.close()
        self._queue.close()
        self._messages.close()
        self._side.close()
        if self._link is not None:
            self._link.release()
        self._closed.set()
        self._loop_end.remove(self)
        if self._on_closed is not None:
            self._on_closed()

    async def close(self) -> None:
        """Ends the connection in order: waits for what is under way, says goodbye, disconnects.

        Waits at most `Config.close_timeout` for the peer.  Messages that have arrived can still
        be received.  A second call waits for the first.  Cancelled, it aborts.
        """
        if self._home.is_parents:
            return
        self._home.check(self)
        if self._root is None and not self._closing:
            self._closing = True
            self._queue.accepting = False
            try:
                async with asyncio.timeout(self._config.close_timeout):
                    await self._messages.drained()
                    self._said_goodbye = True
                    await self._sharing.tell(protocol.Goodbye(0, protocol.GoodbyeCode.NORMAL, ""))
            except (TimeoutError, RDMAError):
                pass  # the peer is gone, or does not read: it will see the disconnect
            finally:
                self._end(ConnectionClosedError())
        await self._closed.wait()

    def abort(self) -> None:
        """Ends the connection now: work under way is dropped, the peer sees a broken connection.

        The resources are given back in the next turn of the loop; `wait_closed` waits for that.
        """
        if not self._home.is_parents:
            self._home.check(self)
            self._end(ConnectionClosedError("the connection was aborted"))

    async def wait_closed(self) -> None:
        """Waits until the connection has ended, in whatever way, and given back its resources."""
        if not self._home.is_parents:
            self._home.check(self)
            await self._closed.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        """Dropped while it is open: it ends as by `abort`.  In any thread, at any time."""
        if getattr(self, "_loop_end", None) is None or self._root is not None:
            return  # it has never begun, or has ended
        if self._home.is_parents:
            return
        error = ConnectionClosedError("the connection was dropped")
        try:
            self._loop.call_soon_threadsafe(self._end, error)
        except RuntimeError:  # the loop has been closed
            self._end_without_loop()
        warnings.warn(
            f"{self!r}{self._home.made()} was not closed",
            ResourceWarning,
            source=self,
            stacklevel=1,
        )


class WaiterErrors:
    """Makes a fresh exception for one waiter; the cause is shared."""

    def __init__(self) -> None:
        self.peer: Address | None = None

    def __call__(self, root: BaseException) -> BaseException:
        if isinstance(root, ConnectionClosedError):
            return ConnectionClosedError(str(root), by_peer=root.by_peer)
        error: Exception
        if isinstance(root, ProtocolError | AuthenticationError):
            error = type(root)(str(root))
        else:
            error = ConnectionBrokenError(f"the connection with {self.peer} broke: {root}")
        error.__cause__ = root
        return error


def weakly(method: Callable[..., object]) -> Callable[..., None]:
    """Calls a method of an object as long as there is one, and keeps nobody alive."""
    ref = weakref.WeakMethod(method)

    def call(*arguments: object) -> None:
        found = ref()
        if found is not None:
            found(*arguments)

    return call


def check_imm(imm: int) -> None:
    if not 0 <= imm < 1 << 32:
        raise ValueError(f"imm must be an unsigned 32-bit number, not {imm}")


def check_lease(lease: float | None) -> None:
    if lease is not None and not 0 < lease <= 0xFFFFFFFF / 1000:
        raise ValueError(f"a lease is more than 0 and at most 4294967 seconds, not {lease}")
