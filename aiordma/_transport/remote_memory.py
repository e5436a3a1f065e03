"""The peer's memory as this side can use it: regions and slices of them."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Self, cast
from weakref import WeakValueDictionary

from .. import _transport
from .._core import protocol
from .._core.async_only import AsyncContext
from .._core.fields import Keys
from .._core.finalizers import finalizer
from .._core.region import NUMBER_BITS, RegionToken, RemoteRange, Rights
from .._datapath.memory import Local
from .._datapath.memory import Remote as RemoteBase
from .._datapath.work_queue import RailObserver
from .._event_loop.wait_queue import WaitQueue
from ..errors import BufferStateError, LeaseEndedError
from .lease_thread import lease_seconds, milliseconds

if TYPE_CHECKING:
    from .._datapath.rail import SendQueue
    from .._datapath.session import Session

MAX_ENDED = 4096
"""The maximum length of `_ended_runs`, which has two entries per run of consecutive ids.

A peer that follows the protocol never causes more runs than it has active regions.
"""


class RemoteMemory(RemoteBase):
    """The base class of RemoteRegion and RemoteSlice, the targets of remote operations."""

    __slots__ = ("_range",)

    _no_memory_hint = "the memory belongs to the peer; use Connection.read or write"

    def _set_range(self, range: RemoteRange) -> None:
        self._range: RemoteRange = range
        self.address: int = range.address
        self.length: int = range.length
        self.rkey: int = range.rkey
        self._allowed: int = int(range.token.access)

    def _check_operation(self, user: object, right: int, local: Local) -> None:
        """Raise if an operation that needs `right` cannot use this memory and `local` now.

        `user` is the owner object of the connection that posts the operation (`Sharing.owner`).
        """
        self._check_access(user, right, len(local))
        if self._root._user is None:
            raise BufferStateError(
                f"the operation was not executed: the connection has moved to a rail that does "
                f"not have the key for {self._root!r} yet; try again"
            )
        if right == Rights.READ and not local.writable:
            raise ValueError(f"cannot read into {local!r}: it is read-only")

    def _check_access(self, user: object, right: int, length: int) -> None:
        """Raise if an operation that needs `right` cannot access `length` bytes of this memory.

        An operation that has to wait for local memory performs this check before it waits.
        """
        self._check_usable(user)
        if right == Rights.ATOMIC:
            self._range.require_atomic()
        self._range.require(Rights(right))
        if length != len(self):
            raise ValueError(
                f"local memory has {length} bytes, but the peer's memory has {len(self)}; slice "
                "the longer one"
            )

    @property
    def _region(self) -> RemoteRegion:
        return cast("RemoteRegion", self._root)

    def _check_usable(self, user: object) -> None:
        """Raise if the region belongs to another connection or can no longer be used."""
        region = self._region
        if user is not region._sharing.owner:
            raise ValueError(f"{region!r} belongs to another connection")
        if region._has_ended:
            raise region._unusable_error()


class RemoteRegion(RemoteMemory, AsyncContext):
    """The peer's memory that this side may access. Slice a region to select bytes for an operation.

    The region is released at the end of an `async with` block. Borrowed memory is also returned to
    its owner when the region is garbage-collected. `token` is the token that the owner sent. Use
    `address`, `length` and `rkey` only in work requests that you post yourself.
    """

    def __init__(
        self,
        sharing: _transport.Sharing,
        token: RegionToken,
        *,
        lent: bool,
        lease_start: float | None = None,
    ) -> None:
        self._sharing, self._clock = sharing, sharing.clock
        self._lent = lent
        self._end_reason = ""
        self._changes = WaitQueue()
        self._user: object = sharing.owner
        """The connection, or None while the region has no key for the lead."""
        self._usable = True
        self.token = token
        self._set_range(RemoteRange.of(token))
        self._start_lease(self._clock.now() if lease_start is None else lease_start, token.lease_ms)

    def __repr__(self) -> str:
        state = "" if self._usable else f" {self._end_reason or 'given up'}"
        return (
            f"<RemoteRegion {self.token.region_id:#x} of {len(self)} bytes, "
            f"{self.token.access!r}{state}>"
        )

    def __getitem__(self, key: slice) -> RemoteSlice:
        """Return the slice `[start:stop]`.

        Raises:
            RemoteRangeError: If a bound is outside the region. Bounds are not clipped.
        """
        return RemoteSlice(self, self._range[key])

    @property
    def rights(self) -> Rights:
        """The rights that the owner has granted."""
        return self.token.access

    @property
    def lent(self) -> bool:
        """Whether the region was borrowed with `request_region` and can be handed over."""
        return self._lent

    @property
    def lease_remaining(self) -> float | None:
        """The remaining lease time in seconds, measured by this side's clock.

        None means that the lease has no time limit.
        """
        if self.ended:
            return 0.0
        remaining = max(0.0, self._deadline - self._clock.now())
        return None if math.isinf(remaining) else remaining

    @property
    def lease_left(self) -> float | None:
        """The previous name of `lease_remaining`."""
        return self.lease_remaining

    @property
    def _has_ended(self) -> bool:
        return not self._usable or self._deadline <= self._clock.now()

    @property
    def ended(self) -> bool:
        """Whether the region can no longer be used.

        This is the case if its lease has expired, its owner has revoked it, this side has released
        it, or the connection has ended.
        """
        return self._has_ended or self._sharing.ended

    async def wait_ended(self) -> None:
        """Wait until `ended` is True."""
        while not self.ended:
            # The timeout means that the lease has expired, unless it has just been renewed.
            with suppress(TimeoutError):
                async with asyncio.timeout(self.lease_remaining):
                    await self._changes.wait()

    async def renew(self, lease: float | None) -> None:
        """Ask the owner to extend the lease of borrowed memory.

        Args:
            lease: The new lease in seconds from now, or None for no time limit. The owner may grant
                a shorter lease (`Config.max_lease`). `lease_remaining` is the granted time.

        Raises:
            LeaseEndedError: If the lease has ended.
            RequestRefusedError: If the owner refuses.
        """
        lease_ms, region_id = milliseconds(lease_seconds(lease)), self.token.region_id
        self._check_usable(self._sharing.owner)
        await self._sharing.send_request(
            lambda number: protocol.RegionRenew(number, region_id, lease_ms)
        )

    def _start_lease(self, lease_start: float, lease_ms: int) -> None:
        """Start a lease of `lease_ms` milliseconds at time `lease_start`. 0 means no time limit."""
        self._deadline = lease_start + lease_ms / 1000 if lease_ms else math.inf
        self._wake()

    def _on_revoked(self) -> None:
        if self._usable:
            self._end_reason = "reclaimed by its owner"
            self._deadline: float = -math.inf
            self._mark_unusable()

    def _switch_lead(self, lead: int) -> bool:
        """Switch to the key for the new lead. Returns whether the region has this key.

        If the key is missing, the owner will send it or end the region. A region that was opened
        from a token is lost, because its owner does not send further keys.
        """
        rkey = (self._keys or {}).get(lead)
        if rkey is not None:
            self.rkey = rkey
            self._user = self._sharing.owner
        elif self._keys is not None:
            self._user = None
        elif not self.ended:
            self._end_reason, self._deadline = "lost with the rail that had its key", -math.inf
            self._usable = False  # the id stays valid, because the owner may send a new token
            self._wake()
        return rkey is not None

    def _unusable_error(self) -> BufferStateError:
        if self._usable:
            longer = (
                "renew the lease in time (RemoteRegion.renew), or request a longer lease (lease= "
                "or Config.lease; Config.max_lease of the owner)"
                if self.lent
                else "the owner can renew the lease in time (Share.renew), or share the memory "
                "for longer (lease= or Config.lease of the owner)"
            )
            return LeaseEndedError(
                f"the lease on {self!r} has ended: {longer}", self.token.region_id
            )
        if self._end_reason:
            return LeaseEndedError(f"{self!r} cannot be used again", self.token.region_id)
        return BufferStateError(f"{self!r} cannot be used again")

    def _mark_unusable(self) -> None:
        """Mark the region as unusable after the owner has revoked it or this side returns it."""
        self._usable: bool = False
        self._sharing.remote_regions.end(self.token.region_id)
        self._wake()

    def _drop(self) -> None:
        """Return a granted region that the requester no longer wants."""
        self._mark_unusable()
        self._sharing.release_region(self.token.region_id)

    def _wake(self) -> None:
        self._changes.wake_all()

    async def release(self) -> None:
        """Tell the owner that the region is no longer needed. A second call has no effect."""
        if self._usable:
            self._mark_unusable()
            await self._sharing.send(protocol.RegionRelease(0, self.token.region_id))

    async def _hand_over(self) -> None:
        """Return the region to its owner, who receives the contents as a Buffer."""
        if not self._lent:
            raise ValueError(
                f"cannot hand over {self!r}: the region was not borrowed with request_region"
            )
        self._mark_unusable()
        await self._sharing.send(protocol.RegionReturn(0, self.token.region_id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self.ended:
            await self.release()

    @finalizer
    def __del__(self) -> None:
        """Return borrowed memory to its owner. This can run in any thread, at any time."""
        if getattr(self, "_lent", False) and self._usable:  # even if its lease has expired
            self._sharing.call_soon(self._sharing.release_region, self.token.region_id)


class RemoteSlice(RemoteMemory):
    """A slice of a RemoteRegion. `region` is the whole region.

    Use `address`, `length` and `rkey` only in work requests that you post yourself.
    """

    __slots__ = ("region",)

    def __init__(self, region: RemoteRegion, range: RemoteRange) -> None:
        self.region: RemoteRegion = region
        self._root: RemoteRegion = region
        self._set_range(range)

    def __repr__(self) -> str:
        return f"<{self.region!r}[{self._range.offset}:{self._range.offset + self._range.length}]>"

    def __getitem__(self, key: slice) -> RemoteSlice:
        return RemoteSlice(self.region, self._range[key])


Remote = RemoteRegion | RemoteSlice


class RemoteRegions(RailObserver):
    """The peer's memory that this side may use, and its keys for each rail.

    Nothing here sends or awaits.
    """

    def __init__(self, messages: Session) -> None:
        self.lead_queue: SendQueue = messages.lead
        """The lead whose keys the regions use."""
        self._messages = messages
        self._own_granter = self._peer_granter = 0
        self._ended_runs: list[int] = []
        """The ids of ended regions, as a flat list of the start and stop of each run."""
        self.by_id: WeakValueDictionary[int, RemoteRegion] = WeakValueDictionary()
        self.pending_delivery: dict[int, Callable[[], object]] = {}
        """Functions that deliver the regions waiting for a key for the lead, by region id."""

    def begin(self, own_granter: int, peer_granter: int) -> None:
        """Set the upper bits of the region ids that this side and the peer assign."""
        self._own_granter, self._peer_granter = own_granter, peer_granter

    def check(self, token: RegionToken) -> None:
        """Raise ValueError or LeaseEndedError if this side can tell that the token is invalid."""
        region, granter = f"region {token.region_id:#x}", token.region_id >> NUMBER_BITS
        # On iWARP, both sides have the same granter number, so the token could be from either side.
        if granter == self._own_granter != self._peer_granter:
            raise ValueError(f"{region} belongs to this side: only the peer can open its token")
        if granter != self._peer_granter:
            raise ValueError(
                f"{region} belongs to another connection: a token can be opened only on the "
                "connection that shared the memory"
            )
        if self._has_ended(token.region_id):
            raise LeaseEndedError(
                f"the lease on {region} has ended: the owner must share the memory again",
                token.region_id,
            )

    def _has_ended(self, region_id: int) -> bool:
        return bisect_right(self._ended_runs, region_id) % 2 == 1  # inside a run

    def end(self, region_id: int) -> None:
        """Record that one of the peer's regions has ended, so that `check` rejects its token."""
        if region_id >> NUMBER_BITS != self._peer_granter or self._has_ended(region_id):
            return
        bounds = self._ended_runs
        for bound in (region_id, region_id + 1):
            index = bisect_left(bounds, bound)
            if bounds[index : index + 1] == [bound]:
                del bounds[index]  # merge with an adjacent run
            else:
                bounds.insert(index, bound)
        if len(bounds) > MAX_ENDED:
            del bounds[:2]  # forget the oldest run

    def track(self, region: RemoteRegion, *, granted: bool = True) -> RemoteRegion:
        """Track a region, so that its owner can end it and change its lease.

        `granted` is True if the owner sent the region in a RegionGrant. Only in this case does the
        owner also send keys for other rails.
        """
        if granted:
            region._keys = {}
        self.by_id[region.token.region_id] = region
        return region

    def track_granted(
        self, region: RemoteRegion, keys: Keys, deliver: Callable[[RemoteRegion], object]
    ) -> None:
        """Pass the region to `deliver` as soon as its key for the lead is known.

        The key is in the token or in `keys`, or arrives later in a RegionKey message.
        """
        region_id = region.token.region_id
        self.track(region)
        self.pending_delivery[region_id] = partial(deliver, region)
        if not self.lead_queue.number:  # the token has the key for rail 0
            self._deliver(region_id)
        else:
            region._user = None  # unusable until `add_key` gets the key for the lead rail
        for rail, rkey in keys:
            self.add_key(region_id, rail, rkey)

    def _deliver(self, region_id: int) -> None:
        if (deliver := self.pending_delivery.pop(region_id, None)) is not None:
            deliver()

    def add_key(self, region_id: int, rail: int, rkey: int) -> None:
        """Record the key of the peer's region for a rail. Ignore keys of unknown regions or rails.

        A key for the lead rail makes the region usable.
        """
        region = self.by_id.get(region_id)
        is_up = any(rail == queue.number for queue in self._messages.rails_up)
        # `_keys` is None if the program opened the region from a token (`track`).
        if not is_up or region is None or region._keys is None:
            return
        region._keys[rail] = rkey
        if rail == self.lead_queue.number:
            region._switch_lead(rail)
            self._deliver(region_id)

    def on_region_end(self, region_id: int) -> None:
        """Handle the peer's message that one of its regions has ended."""
        self.end(region_id)
        region = self.by_id.pop(region_id, None)
        if region is not None:
            region._on_revoked()
        self._deliver(region_id)  # its receiver gets LeaseEndedError on use

    def rail_removed(self, rail: SendQueue) -> None:
        """Drop the rail's keys for all regions."""
        for region in list(self.by_id.values()):
            if region._keys is not None:
                region._keys.pop(rail.number, None)

    def lead_changed(self, lead: SendQueue) -> None:
        """Switch all regions to their keys for the new lead."""
        self.lead_queue = lead
        for region_id, region in list(self.by_id.items()):
            if region._switch_lead(lead.number):
                self._deliver(region_id)
