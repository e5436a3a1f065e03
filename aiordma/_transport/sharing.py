"""Memory that the other side may use: shared, lent, handed over, taken back.

Some facts, and what they mean here:

- A remote key is a bearer token over a whole memory region.  So every share is a registration of
  its own over exactly the bytes that are shared, with exactly the rights that were named.
- Only deregistering makes a key stop working; a message that asks the peer to stop does not.  So a
  lease ends here, on this side's monotonic clock, whatever the peer does or says.
- A peer can ask for anything any number of times.  What it borrows and what it shows is counted
  against `Config.lend_quota` and `Config.max_regions` before anything is allocated, and memory is
  zeroed before it is lent, since it may hold what another connection left there.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from .. import verbs
from .._core import protocol
from .._core.region import RegionToken, RemoteRange, Rights
from .._datapath.memory import Remote
from .._loop.wait_queue import WaitQueue
from ..config import Config
from ..errors import BufferStateError, ProtocolError, QuotaError, RDMAError, RequestRefusedError
from ..mr_pool import Block, Buffer, LocalMemory, MemoryPool

if TYPE_CHECKING:
    from .._datapath.channel import MessageChannel

A = TypeVar("A")

ZEROS = bytes(1 << 16)


def zero(view: memoryview) -> None:
    for start in range(0, len(view), len(ZEROS)):
        part = view[start : start + len(ZEROS)]
        part[:] = ZEROS[: len(part)]


def access_flags(rights: Rights) -> verbs.AccessFlags:
    """Registration flags for remote `rights`; remote writing needs local writing too."""
    flags = verbs.AccessFlags(int(rights))
    if rights & (Rights.WRITE | Rights.ATOMIC):
        flags |= verbs.AccessFlags.LOCAL_WRITE
    return flags


class Share:
    """This side's memory as the peer may use it, until `revoke`, the lease's end, or the end of
    the connection, whichever is first.  The memory stays registered and pinned until then.
    """

    def __init__(
        self,
        sharing: Sharing,
        region_id: int,
        memory: LocalMemory,
        rights: Rights,
        lease: float | None,
    ) -> None:
        self._sharing = sharing
        self._memory = memory
        self._mr = memory.expose(sharing.pool.pd, access_flags(rights), 0, len(memory))
        self._timer = (
            asyncio.get_running_loop().call_later(lease, self.revoke) if lease is not None else None
        )
        self.region_id = region_id
        self.rights = rights
        self.token = RegionToken(
            region_id,
            self._mr.addr,
            self._mr.length,
            self._mr.rkey,
            rights,
            0 if lease is None else max(1, round(lease * 1000)),
        )

    def __repr__(self) -> str:
        state = "revoked" if self.revoked else "active"
        return f"<Share {self.region_id:#x} of {self._memory!r}, {self.rights!r}, {state}>"

    @property
    def revoked(self) -> bool:
        """Whether the memory has been taken back: the peer's key does nothing any more."""
        return self._mr.closed

    def revoke(self) -> None:
        """Takes the memory back: when this returns the key works no more.  Idempotent.

        An operation of the peer that is under way fails there with RemoteAccessError, which
        breaks the connection, as verbs have it; agree on the end first where that matters.
        """
        if self._timer is not None:
            self._timer.cancel()
        self._mr.close()
        self._sharing.forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.revoke()


class Loan(Share):
    """Memory of this side's pool that the peer asked for."""

    def __init__(
        self,
        sharing: Sharing,
        region_id: int,
        buffer: Buffer,
        rights: Rights,
        lease: float | None,
    ) -> None:
        self.buffer = buffer
        super().__init__(sharing, region_id, buffer, rights, lease)

    def revoke(self) -> None:
        super().revoke()
        self.buffer.release()

    def hand_over(self) -> HandedOver:
        """Ends the peer's access; the memory with what the peer wrote is the caller's."""
        super().revoke()
        return HandedOver(self.buffer)


class HandedOver:
    """Memory that came back with what the peer wrote, and waits for `recv_buffer`.

    Not a Buffer yet: one that was never received is not the user's to release, so it returns to the
    pool without a warning.
    """

    __slots__ = ("_block", "_length")

    def __init__(self, buffer: Buffer) -> None:
        self._length = len(buffer)
        self._block: Block | None = buffer.give_up()

    def __len__(self) -> int:
        return self._length

    def take(self) -> Buffer:
        block, self._block = self._block, None
        assert block is not None
        return Buffer(block, self._length)

    def __del__(self) -> None:
        if self._block is not None:
            self._block.release()


class RemoteMemory(Remote):
    """What an operation is aimed at; its numbers are those of `range`."""

    __slots__ = ("range",)

    def _aim(self, range: RemoteRange) -> None:
        self.range = range
        self.address = range.address
        self.length = range.length
        self.rkey = range.rkey
        self.allowed = int(range.token.access)

    def check(self, sharing: Sharing) -> None:
        """Raises unless the region is this connection's and still this side's to use."""
        region = self.root
        if sharing is not region.user:
            raise ValueError(f"{region!r} belongs to another connection")
        if not region.usable:
            raise BufferStateError(f"{region!r} cannot be used again")


class RemoteRegion(RemoteMemory):
    """Memory of the peer that this side may use; slice it to name the bytes of an operation."""

    def __init__(self, sharing: Sharing, token: RegionToken, *, lent: bool) -> None:
        self._sharing = sharing
        self._lent = lent
        self.user = sharing
        self.usable = True
        self.token = token
        self._aim(RemoteRange.of(token))

    def __repr__(self) -> str:
        state = "" if self.usable else " given up"
        return (
            f"<RemoteRegion {self.token.region_id:#x} of {len(self)} bytes, "
            f"{self.token.access!r}{state}>"
        )

    def __getitem__(self, key: slice) -> RemoteSlice:
        """The part `[start:stop]`; a bound outside raises RemoteRangeError, nothing is clipped."""
        return RemoteSlice(self, self.range[key])

    @property
    def rights(self) -> Rights:
        """What the owner allows here."""
        return self.token.access

    @property
    def lent(self) -> bool:
        """Whether it came from `request_region`, and so can be handed over."""
        return self._lent

    def give_up(self) -> None:
        """It is the owner's again: every use from now on fails.  Internal to the library."""
        self.usable = False

    async def release(self) -> None:
        """Tells the owner that the region is needed no more.  Idempotent."""
        if self.usable:
            self.usable = False
            await self._sharing.tell(protocol.RegionRelease(0, self.token.region_id))


class RemoteSlice(RemoteMemory):
    """A part of a RemoteRegion."""

    __slots__ = ("region",)

    def __init__(self, region: RemoteRegion, range: RemoteRange) -> None:
        self.region = region
        self.root = region
        self._aim(range)

    def __repr__(self) -> str:
        return f"<{self.region!r}[{self.range.offset}:{self.range.offset + self.range.length}]>"

    def __getitem__(self, key: slice) -> RemoteSlice:
        return RemoteSlice(self.region, self.range[key])


class ArrivalQueue(deque[A]):
    """What has come from the peer and has not been taken, and the tasks that wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waiters = WaitQueue()

    def add(self, arrived: A) -> None:
        self.append(arrived)
        self.waiters.wake()


class Sharing:
    """Both directions of shared memory on one connection."""

    def __init__(
        self,
        pool: MemoryPool,
        config: Config,
        messages: MessageChannel,
        waiter_error: Callable[[BaseException], BaseException],
    ) -> None:
        self.pool = pool
        self._config = config
        self._messages = messages
        self._waiter_error = waiter_error
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._shares: dict[int, Share] = {}
        self._lent_bytes = 0  # what was handed over and not yet received included
        self._requests: dict[int, asyncio.Future[RemoteRegion]] = {}
        self._arrived: ArrivalQueue[RemoteRegion] = ArrivalQueue()
        self._handed_over: ArrivalQueue[HandedOver] = ArrivalQueue()
        self._requesters = WaitQueue()
        self._ended: BaseException | None = None

    # ---- this side's memory --------------------------------------------------------------

    def open_up(self, memory: LocalMemory, rights: Rights, lease: float | None) -> Share:
        """The peer may use it, if it gets to know the token."""
        if not isinstance(memory, LocalMemory):
            raise TypeError(
                f"{memory!r} is not registered memory of this side (Connection.register, alloc); "
                f"borrowed memory goes back by hand_over"
            )
        share = Share(self, next(self._ids), memory, rights, lease)
        self._shares[share.region_id] = share
        return share

    def from_token(self, token: RegionToken) -> RemoteRegion:
        """The token has come by another way."""
        return RemoteRegion(self, token, lent=False)

    async def share(self, memory: LocalMemory, rights: Rights, lease: float | None) -> Share:
        share = self.open_up(memory, rights, lease)
        told = self._tell(protocol.RegionGrant(0, share.token))
        try:
            await told
        except BaseException:
            # A caller that gave up does not expect the memory to be used, so it is withdrawn, even
            # if the peer has been told of it.
            self._messages.withdraw_control(told)
            share.revoke()
            raise
        return share

    def forget(self, share: Share) -> None:
        known = self._shares.pop(share.region_id, None)
        if known is not None and isinstance(share, Loan):
            self._lent_bytes -= len(share.buffer)

    def _lend(self, request: protocol.RegionRequest) -> None:
        """Answers the peer's request for memory, one way or the other."""
        answer: protocol.Message
        try:
            self._check_quota(request.length)
            buffer = self.pool.alloc(request.length)
            zero(buffer.view)
            lease = request.lease_ms / 1000 if request.lease_ms else None
            try:
                loan = Loan(self, next(self._ids), buffer, request.access, lease)
            except BaseException:
                buffer.release()
                raise
        except QuotaError as error:
            answer = protocol.Error(request.request_id, protocol.ErrorCode.QUOTA, str(error))
        except (RDMAError, OSError, ValueError) as error:
            answer = protocol.Error(request.request_id, protocol.ErrorCode.INTERNAL, str(error))
        else:
            self._shares[loan.region_id] = loan
            self._lent_bytes += request.length
            answer = protocol.RegionGrant(request.request_id, loan.token)
        self._messages.send_control(answer)

    def _check_quota(self, length: int) -> None:
        lent = self._lent_bytes
        quota = self._config.lend_quota
        if lent + length > quota:
            raise QuotaError(
                f"{length} bytes were asked for, {lent} of {quota} are lent already",
                amount=lent + length,
                limit=quota,
            )
        regions = len(self._shares) + len(self._handed_over)
        if regions >= self._config.max_regions:
            raise QuotaError(
                f"{regions} regions are shared already, or handed over and not received",
                amount=regions + 1,
                limit=self._config.max_regions,
            )

    # ---- the peer's memory ---------------------------------------------------------------

    async def request(self, length: int, rights: Rights, lease: float | None) -> RemoteRegion:
        while len(self._requests) >= protocol.MAX_UNANSWERED and self._ended is None:
            await self._requesters.wait()
        request_id = self._messages.request_id()
        lease_ms = 0 if lease is None else max(1, round(lease * 1000))
        future: asyncio.Future[RemoteRegion] = self._loop.create_future()
        self._requests[request_id] = future
        try:
            await self.tell(protocol.RegionRequest(request_id, length, rights, lease_ms))
            return await future
        except asyncio.CancelledError:
            # The grant may still come; then it goes back at once.
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(future.result())
            future.cancel()
            raise
        except BaseException:
            self._answered(request_id)
            if not future.cancel():
                future.exception()  # retrieved: the same end is raised from here
            raise

    def _answered(self, request_id: int) -> asyncio.Future[RemoteRegion] | None:
        """The request that is over now, if there was one; there is room for another."""
        future = self._requests.pop(request_id, None)
        self._requesters.wake()
        return future

    def _give_back(self, region: RemoteRegion) -> None:
        region.give_up()
        self._messages.send_control(protocol.RegionRelease(0, region.token.region_id))

    async def hand_over(self, region: RemoteRegion) -> None:
        region.check(self)
        if not region.lent:
            raise ValueError(f"{region!r} was not borrowed with request_region: it is the peer's")
        region.give_up()
        await self.tell(protocol.RegionReturn(0, region.token.region_id))

    async def receive(self) -> RemoteRegion:
        return await self._next(self._arrived)

    async def receive_buffer(self) -> Buffer:
        handed = await self._next(self._handed_over)
        self._lent_bytes -= len(handed)
        return handed.take()

    async def _next(self, arrivals: ArrivalQueue[A]) -> A:
        while not arrivals:
            if self._ended is not None:
                raise self._waiter_error(self._ended)
            await arrivals.waiters.wait()
        return arrivals.popleft()

    async def tell(self, message: protocol.Message) -> None:
        """Sends a control message and waits until the peer's device has it."""
        await self._tell(message)

    def _tell(self, message: protocol.Message) -> asyncio.Future[None]:
        if self._ended is not None:
            raise self._waiter_error(self._ended)
        future: asyncio.Future[None] = self._loop.create_future()
        self._messages.send_control(message, future)
        return future

    # ---- control messages of the peer ----------------------------------------------------

    def control(self, message: protocol.Message) -> None:
        match message:
            case protocol.RegionRequest():
                self._lend(message)
            case protocol.RegionGrant():
                self._granted(message)
            case protocol.RegionReturn():
                share = self._shares.get(message.region_id)
                # A loan whose lease has ended is gone here, and the peer cannot know yet.
                if isinstance(share, Loan):
                    handed = share.hand_over()
                    self._lent_bytes += len(handed)
                    self._handed_over.add(handed)
            case protocol.RegionRelease():
                share = self._shares.get(message.region_id)
                if share is not None:
                    share.revoke()
            case protocol.Error():
                future = self._answered(message.request_id)
                if future is None:
                    raise ProtocolError("the peer refuses a request that was not made")
                if not future.done():
                    future.set_exception(RequestRefusedError(message.code, message.text))
            case _:
                raise ProtocolError(f"the peer sent a {type(message).__name__}, unexpected here")

    def _granted(self, grant: protocol.RegionGrant) -> None:
        if not grant.request_id:
            if len(self._arrived) >= self._config.max_regions:
                raise ProtocolError(
                    f"the peer has shown more than {self._config.max_regions} regions before one "
                    f"was received"
                )
            self._arrived.add(RemoteRegion(self, grant.token, lent=False))
            return
        future = self._answered(grant.request_id)
        if future is None:
            raise ProtocolError("the peer grants a request that was not made")
        region = RemoteRegion(self, grant.token, lent=True)
        if future.done():
            self._give_back(region)
        else:
            future.set_result(region)

    # ---- the end -------------------------------------------------------------------------

    def end(self, error: BaseException) -> None:
        """Every key stops working, every waiter fails."""
        if self._ended is not None:
            return
        self._ended = error
        for share in list(self._shares.values()):
            share.revoke()
        for future in self._requests.values():
            if not future.done():
                future.set_exception(self._waiter_error(error))
        self._requests.clear()
        self._arrived.waiters.wake_all()
        self._handed_over.waiters.wake_all()
        self._requesters.wake_all()

    @property
    def shared(self) -> int:
        """How many regions the peer may use now."""
        return len(self._shares)
