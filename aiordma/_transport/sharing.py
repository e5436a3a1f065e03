"""Memory that the other side may use: sharing, lending, handing over and revoking.

The design follows from these facts:

- Whoever has a remote key can access everything that it covers. Each share therefore has its own
  key, for exactly the shared bytes, with exactly the given rights, and only for the queue pair of
  this connection (`share_keys`).
- Access ends only when the key ends. A message that asks the peer to stop is not enough. A lease
  therefore ends here, by this side's monotonic clock, regardless of the peer and of this event loop
  (`lease_thread.py`).
- The user of a region counts the lease by its own clock, from a moment before the owner's: from its
  request, or from the arrival of the grant. The owner starts to count when the delivery of the
  grant is confirmed. The clocks need not agree, and the user stops first. There are two exceptions:
  if the user's event loop saw the grant late, or if it received the grant twice, because the first
  one was acknowledged and then lost with the lead. The owner also tells the user when the lease
  ends (RegionEnd).
- A peer can send any request any number of times. Memory that it borrows or shares is counted
  against `Config.lend_quota` and `Config.max_regions` before anything is allocated. Memory is
  zeroed before it is lent, because it may contain data of another connection.

"Shared memory" in docs/design.md lists the steps from `share` to the end of a region.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .._core import protocol
from .._core.region import RegionToken, Rights
from .._datapath.work_queue import RailObserver
from .._event_loop.futures import settle
from .._event_loop.wait_queue import WaitQueue
from .._native import fork
from ..config import Config
from ..errors import (
    ProtocolError,
    QuotaError,
    RDMAError,
    RequestRefusedError,
    UnencryptedError,
    cause_text,
)
from ..mr_pool import Buffer, LocalMemory
from .lease_thread import milliseconds
from .remote_memory import RemoteRegion, RemoteRegions
from .shares import HandedOver, Loan, Share, Shares

if TYPE_CHECKING:
    from .._datapath.memory import Clock
    from .._datapath.protocols import Owner
    from .._datapath.rail import SendQueue
    from .._datapath.session import Session
    from .._event_loop.driver import Driver

A = TypeVar("A")

logger = logging.getLogger("aiordma.connection")

LIMITS = frozenset({protocol.ErrorCode.QUOTA, protocol.ErrorCode.ACCESS})
"""The error codes of refusals caused by local settings, which the user may want to change."""

ZEROS = bytes(1 << 16)


def zero(view: memoryview) -> None:
    for start in range(0, len(view), len(ZEROS)):
        part = view[start : start + len(ZEROS)]
        part[:] = ZEROS[: len(part)]


class ArrivalQueue(deque[A]):
    """A queue of regions or buffers for the program, and the tasks waiting to receive them."""

    def __init__(self) -> None:
        super().__init__()
        self.waiters: WaitQueue = WaitQueue()

    def add(self, arrived: A) -> None:
        self.append(arrived)
        self.waiters.wake()


class Request(NamedTuple):
    """A request to the peer that is waiting for a response."""

    response: asyncio.Future[Any]
    sent_at: float
    message: protocol.Message


class Sharing(RailObserver):
    """The memory that the two sides of a connection share with each other."""

    def __init__(self, driver: Driver, config: Config, messages: Session, owner: Owner) -> None:
        self.owner = owner
        """The connection object, which also owns the regions that the peer shares."""
        self.clock: Clock = driver.clock
        self.shares: Shares = Shares(config, messages)
        self.remote_regions: RemoteRegions = RemoteRegions(messages)
        self._config = config
        self._controls = messages.controls
        self._waiter_error = owner.error_for
        self._loop = asyncio.get_running_loop()
        self._fork_generation = fork.generation()
        sealing = messages.outbox.sealing
        self._forbids_memory_access = sealing is not None and not sealing.memory_in_clear
        self._requests: dict[int, Request] = {}
        self.arrived: ArrivalQueue[RemoteRegion] = ArrivalQueue()
        self._handed_over: ArrivalQueue[HandedOver] = ArrivalQueue()
        self._request_waiters = WaitQueue()
        self._lead_change_waiters = WaitQueue()
        self._end_error: BaseException | None = None

    def begin(self, own_granter: int, peer_granter: int) -> None:
        """Set the upper bits of the region ids that this side and the peer assign."""
        self.shares.begin(own_granter)
        self.remote_regions.begin(own_granter, peer_granter)

    def check_allowed(self) -> None:
        """Raise UnencryptedError if the connection does not allow unencrypted memory access."""
        if self._forbids_memory_access:
            raise UnencryptedError

    # ---- this side's memory --------------------------------------------------------------

    def create_share(
        self, memory: LocalMemory, rights: Rights, lease: float | None, *, start_lease: bool = True
    ) -> Share:
        """Create a share that the peer can use once it has the token.

        If `start_lease` is True, the lease starts immediately.
        """
        self.check_allowed()
        if not isinstance(memory, LocalMemory):
            raise TypeError(
                f"{memory!r} is not registered local memory (from Connection.register or alloc); "
                f"use hand_over to return borrowed memory"
            )
        memory._check()
        share = Share(self, self.shares.next_id(), memory, rights, lease)
        if start_lease:
            share._restart_lease(lease)
        self.shares.add(share)
        return share

    def open_region(self, token: RegionToken) -> RemoteRegion:
        """Return the region for a token passed in by the program."""
        self.check_allowed()
        self.remote_regions.check(token)
        known = self.remote_regions.by_id.get(token.region_id)
        # Ignore the rkey, which changes whenever the owner switches to another lead.
        if known is not None and known._usable and replace(known.token, rkey=token.rkey) == token:
            return known
        return self.remote_regions.track(RemoteRegion(self, token, lent=False), granted=False)

    async def send_region(self, memory: LocalMemory, rights: Rights, lease: float | None) -> Share:
        """Share memory, and wait until the peer's device has received the token."""
        share = self.create_share(memory, rights, lease, start_lease=False)
        sent: asyncio.Future[None] | None = None
        try:
            share._create_rail_keys()
            await share.ready()  # the peer cannot use the share earlier
            share._restart_lease(lease)
            sent = self.send(protocol.RegionGrant(0, share.token, share._rail_keys()))
            self.shares.on_grant_sent(share)
            await sent
        except BaseException:
            # The caller does not get the Share and may reuse the memory. End the share even if the
            # peer has already received the token.
            if sent is not None:
                self._controls.withdraw(sent)
            share._end(notify=sent is not None)
            raise
        share._restart_lease(lease)  # again, now that the peer's device has the token
        return share

    def lead_changed(self, lead: SendQueue) -> None:
        """Wake the tasks waiting in `wait_lead_change`."""
        self._lead_change_waiters.wake_all()

    async def wait_lead_change(self) -> None:
        """Wait until another rail is the lead, or raise the error that ended the connection."""
        if self._end_error is None:
            await self._lead_change_waiters.wait()
        self.check_end()

    def check_end(self) -> None:
        """Raise the error that ended the connection, if it has ended."""
        if self._end_error is not None:
            raise self._waiter_error(self._end_error)

    def notify(self, message: protocol.Message) -> Callable[[], None]:
        """Queue a control message without waiting, unless the connection has ended.

        Returns a function that withdraws the message, unless it has already been sent.
        """
        if self.ended:
            return lambda: None
        sent = self.send(message)
        # Retrieve the error, so that asyncio does not log it.
        sent.add_done_callback(lambda sent: sent.cancelled() or sent.exception())
        return partial(self._controls.withdraw, sent)

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        """Schedule a function in the event loop, unless the loop is closed. Thread-safe."""
        if self._fork_generation == fork.generation():
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(callback, *args)

    def _lend(self, request: protocol.RegionRequest) -> None:
        """Grant or refuse the peer's request to borrow memory."""
        code = protocol.ErrorCode
        if missing := request.access & ~self._config.max_rights:
            text = f"the owner does not grant {missing!r} (Config.max_rights of the owner)"
            self._refuse(request.request_id, code.ACCESS, text)
            return
        try:
            self.shares.check_quota(request.length, len(self._handed_over))
            buffer = self.shares.pool.alloc(request.length)
            zero(buffer.view)
            lease = self.shares.lease_for(request.lease_ms)
            try:
                loan = Loan(self, self.shares.next_id(), buffer, request.access, lease)
            except BaseException:
                buffer.release()
                raise
        except QuotaError as error:
            self._refuse(request.request_id, code.QUOTA, cause_text(error))
        except (RDMAError, OSError, ValueError, MemoryError) as error:
            self._refuse(request.request_id, code.INTERNAL, cause_text(error))
        else:
            self.shares.add(loan)
            loan._create_rail_keys()
            loan._on_ready(partial(self._grant, request.request_id, loan, lease))

    def _grant(self, request_id: int, loan: Loan, lease: float | None) -> None:
        """Grant the peer's request to borrow memory, now that the loan's keys work."""
        internal = protocol.ErrorCode.INTERNAL
        try:
            if loan._restart_lease(lease):  # the key works from now on
                grant = protocol.RegionGrant(request_id, loan.token, loan._rail_keys())
                self._controls.send(grant)
                self.shares.on_grant_sent(loan)
            else:
                text = "the borrowed memory was released before the request was granted"
                self._refuse(request_id, internal, text)
        except RDMAError as error:
            self._refuse(request_id, internal, cause_text(error))

    def _refuse(self, request_id: int, code: protocol.ErrorCode, text: str) -> None:
        if code in LIMITS:
            logger.info("rejecting a memory request of %s: %s", self.owner.peer_name, text)
        self._controls.send(protocol.Error(request_id, code, text))

    def _renew_lease(self, request: protocol.RegionRenew) -> None:
        """Grant or refuse the peer's request to renew a lease."""
        share = self.shares.by_id.get(request.region_id)
        lease = self.shares.lease_for(request.lease_ms)
        request_id, code = request.request_id, protocol.ErrorCode
        if share is not None and not isinstance(share, Loan):
            text = "the region was not borrowed: only the owner can renew the lease (Share.renew)"
            self._refuse(request_id, code.ACCESS, text)
            return
        try:
            if share is not None and share._restart_lease(lease, extend_only=True):
                renewed = protocol.RegionLease(request_id, share.region_id, milliseconds(lease))
                self._controls.send(renewed)
            else:
                self._refuse(request_id, code.UNKNOWN_REGION, "its lease has ended")
        except RDMAError as error:
            self._refuse(request_id, code.INTERNAL, cause_text(error))

    # ---- the peer's memory ---------------------------------------------------------------

    async def request(self, length: int, rights: Rights, lease: float | None) -> RemoteRegion:
        """Borrow memory from the peer."""
        self.check_allowed()
        region: RemoteRegion = await self.send_request(
            lambda number: protocol.RegionRequest(number, length, rights, milliseconds(lease)),
            discard=RemoteRegion._drop,
        )
        return region

    async def send_request(
        self,
        make: Callable[[int], protocol.Message],
        discard: Callable[[Any], None] = lambda _: None,
    ) -> Any:
        """Send a request and return the response.

        Args:
            make: A function that creates the request for a given request id.
            discard: A function that disposes of the response if the task is cancelled.
        """
        while len(self._requests) >= protocol.MAX_UNANSWERED and self._end_error is None:
            await self._request_waiters.wait()
        request_id = self._controls.new_request_id()
        future: asyncio.Future[Any] = self._loop.create_future()
        message = make(request_id)
        self._requests[request_id] = Request(future, self.clock.now(), message)
        try:
            await self.send(message)
            return await future
        except asyncio.CancelledError:
            # If a grant arrives later, `_deliver_loan` returns the region, because the future has
            # been cancelled.
            if future.done() and not future.cancelled() and future.exception() is None:
                discard(future.result())
            future.cancel()
            raise
        except BaseException:
            # A task that is garbage-collected after its loop was closed also ends here, with
            # GeneratorExit. Its future cannot be cancelled without the loop.
            self._finish_request(request_id)
            if future.done() and not future.cancelled():
                future.exception()  # mark it as retrieved, because the same error is raised here
            raise
        finally:
            del future  # its error's traceback refers to this frame

    def _finish_request(self, request_id: int) -> Request | None:
        """Remove and return a request (None if unknown), and wake a task waiting to send one."""
        request = self._requests.pop(request_id, None)
        self._request_waiters.wake()
        return request

    def release_region(self, region_id: int) -> None:
        """Tell the owner of a region that this side no longer uses it."""
        self.remote_regions.end(region_id)
        self.notify(protocol.RegionRelease(0, region_id))

    async def receive_buffer(self) -> Buffer:
        handed = await self.next(self._handed_over)
        self.shares.lent_bytes -= len(handed)
        return handed.take()

    async def next(self, arrivals: ArrivalQueue[A]) -> A:
        """Remove and return the first item of `arrivals`. Wait for it if necessary."""
        self.check_allowed()
        while not arrivals:
            self.check_end()
            await arrivals.waiters.wait()
        return arrivals.popleft()

    def send(self, message: protocol.Message) -> asyncio.Future[None]:
        """Send a control message. The future completes when the peer's device has received it."""
        self.check_end()
        future: asyncio.Future[None] = self._loop.create_future()
        self._controls.send(message, future)
        return future

    # ---- control messages of the peer ----------------------------------------------------

    def handle_control(self, message: protocol.Message) -> None:
        if self._forbids_memory_access and not isinstance(message, protocol.Error):
            raise ProtocolError(
                f"the peer sent a {type(message).__name__}, but this connection does not "
                f"allow memory operations (encrypt=True)"
            )
        match message:
            case protocol.RegionRequest():
                self._lend(message)
            case protocol.RegionGrant():
                self._on_grant(message)
            case protocol.RegionReturn():
                share = self.shares.by_id.get(message.region_id)
                # If the loan is missing, its lease may have just expired. This is not an error.
                if isinstance(share, Loan):
                    handed = share.hand_over()
                    # The memory counts as lent until the program has received it.
                    self.shares.lent_bytes += len(handed)
                    self._handed_over.add(handed)
            case protocol.RegionRelease():
                share = self.shares.by_id.get(message.region_id)
                if share is not None:
                    share._end(notify=False)
            case protocol.RegionRenew():
                self._renew_lease(message)
            case protocol.RegionLease():
                self._on_lease_renewed(message)
            case protocol.RegionKey():
                self.remote_regions.add_key(message.region_id, message.rail, message.rkey)
            case protocol.RegionEnd():
                self.remote_regions.on_region_end(message.region_id)
            case protocol.Error():
                request = self._finish_request(message.request_id)
                if request is None:
                    raise ProtocolError("the peer refused a request that this side did not make")
                peer = self.shares.lead_queue.peer
                refused = RequestRefusedError(message.code, message.text, peer=peer)
                settle(request.response, None, refused)
            case _:
                raise ProtocolError(f"the peer sent an unexpected {type(message).__name__}")

    def _on_grant(self, grant: protocol.RegionGrant) -> None:
        if not grant.request_id:  # the peer has called `send_region`
            if (
                len(self.arrived) + len(self.remote_regions.pending_delivery)
                >= self._config.max_regions
            ):
                raise ProtocolError(
                    f"the peer has handed over too many regions: more than "
                    f"{self._config.max_regions} are waiting to be received (Config.max_regions)"
                )
            region = RemoteRegion(self, grant.token, lent=False)
            self.remote_regions.track_granted(region, grant.keys, self.arrived.add)
            return
        request = self._requests.get(grant.request_id)
        if request is None or not isinstance(requested := request.message, protocol.RegionRequest):
            raise ProtocolError("the peer granted a request that this side did not make")
        # At most one region per request and `max_regions` unrequested ones may wait for their keys.
        if (
            len(self.remote_regions.pending_delivery)
            >= len(self._requests) + self._config.max_regions
        ):
            raise ProtocolError("the peer granted a request more than once")
        if grant.token.length != requested.length or requested.access & ~grant.token.access:
            raise ProtocolError(
                f"the peer granted {grant.token.length} bytes with {grant.token.access!r}, but "
                f"{requested.length} bytes with {requested.access!r} were requested"
            )
        region = RemoteRegion(self, grant.token, lent=True, lease_start=request.sent_at)
        deliver = partial(self._deliver_loan, request, grant.request_id)
        self.remote_regions.track_granted(region, grant.keys, deliver)

    def _deliver_loan(self, request: Request, request_id: int, region: RemoteRegion) -> None:
        self._finish_request(request_id)
        if not settle(request.response, region):  # the request was cancelled
            region._drop()

    def _on_lease_renewed(self, lease: protocol.RegionLease) -> None:
        """Restart the lease of a region, after this side's request or because the owner renewed it.

        The new lease counts from this side's request or, without a request, from the arrival of the
        message. Both are earlier than the owner's start, so that this side stops first.
        """
        lease_start = self.clock.now()
        if lease.request_id:
            request = self._requests.get(lease.request_id)
            requested = request.message if request is not None else None
            if (
                request is None
                or not isinstance(requested, protocol.RegionRenew)
                or requested.region_id != lease.region_id
            ):
                raise ProtocolError("the peer renewed a lease that it was not asked to renew")
            self._finish_request(lease.request_id)
            lease_start = request.sent_at
            settle(request.response)
        region = self.remote_regions.by_id.get(lease.region_id)
        if region is not None:
            region._start_lease(lease_start, lease.lease_ms)

    # ---- the end -------------------------------------------------------------------------

    def end(self, error: BaseException) -> None:
        """Invalidate all keys, and fail all waiting tasks with `error`."""
        if self._end_error is not None:
            return
        self._end_error = error
        self.end_keys()
        for region in list(self.remote_regions.by_id.values()):
            region._wake()
        for request in self._requests.values():
            settle(request.response, None, self._waiter_error(error))
        self._requests.clear()
        self.remote_regions.pending_delivery.clear()
        self.arrived.waiters.wake_all()
        self._handed_over.waiters.wake_all()
        self._request_waiters.wake_all()
        self._lead_change_waiters.wake_all()

    def end_keys(self) -> None:
        """End all shares and their keys, without notifying the peer."""
        for share in list(self.shares.by_id.values()):
            try:
                share._end(notify=False)
            except (RDMAError, OSError) as error:  # one failure must not keep other shares open
                if not self._loop.is_closed():
                    self._loop.call_exception_handler(
                        {
                            "message": f"aiordma: {share!r} could not release its memory",
                            "exception": error,
                        }
                    )

    @property
    def ended(self) -> bool:
        """Whether the connection has ended or was inherited from the parent process by a fork."""
        return self._end_error is not None or self._fork_generation != fork.generation()

    @property
    def shared(self) -> int:
        """The number of regions that the peer may use."""
        return len(self.shares.by_id)

    def figures(self) -> dict[str, int]:
        """Return statistics about the shared memory in both directions. Thread-safe."""
        return {
            "shared_regions": self.shared,
            "lent_bytes": self.shares.lent_bytes,
            "remote_regions": len(self.remote_regions.by_id),
        }
