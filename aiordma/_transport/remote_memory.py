"""The peer's memory as this side can use it: regions and slices of them."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import Self, cast

from .. import _transport
from .._core import protocol
from .._core.async_only import AsyncContext
from .._core.finalizers import finalizer
from .._core.region import RegionToken, RemoteRange, Rights
from .._datapath.memory import Local
from .._datapath.memory import Remote as RemoteBase
from .._loop.wait_queue import WaitQueue
from ..errors import BufferStateError, LeaseEndedError
from .lease_thread import lease_seconds, milliseconds


class RemoteMemory(RemoteBase):
    """The target of an operation. Its range determines the address, length and rkey."""

    __slots__ = ("_range",)

    _no_memory_hint = "the memory belongs to the peer; use Connection.read or write"

    def _aim(self, range: RemoteRange) -> None:
        self._range: RemoteRange = range
        self.address: int = range.address
        self.length: int = range.length
        self.rkey: int = range.rkey
        self._allowed: int = int(range.token.access)

    def _require(self, user: object, right: int, local: Local) -> None:
        """Raise unless an operation that needs `right` may use this memory with `local` here."""
        self._check_use(user, right, len(local))
        if self._root._user is None:
            raise BufferStateError(
                f"the operation was not executed: the connection has moved to a rail that does "
                f"not have the key for {self._root!r} yet; try again"
            )
        if right == Rights.READ and not local.writable:
            raise ValueError(f"cannot read into {local!r}: it is read-only")

    def _check_use(self, user: object, right: int, length: int) -> None:
        """Raise unless the arguments of an operation that needs `right` are valid.

        An operation that has to wait for memory of this side checks this before it waits.
        """
        self._check(user)
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

    def _check(self, user: object) -> None:
        """Raise unless the region belongs to this connection and can still be used."""
        region = self._region
        if user is not region._sharing.owner:
            raise ValueError(f"{region!r} belongs to another connection")
        if region._over:
            raise region._unusable()


class RemoteRegion(RemoteMemory, AsyncContext):
    """Memory of the peer that this side may use. Slice it to select the bytes of an operation.

    The end of an `async with` block releases the region. Borrowed memory is also returned to its
    owner when the region is garbage collected. `token` is the token that the owner sent. `address`,
    `length` and `rkey` are for work requests that you post yourself.
    """

    def __init__(
        self,
        sharing: _transport.Sharing,
        token: RegionToken,
        *,
        lent: bool,
        since: float | None = None,
    ) -> None:
        self._sharing, self._clock = sharing, sharing.clock
        self._lent = lent
        self._why = ""
        self._changes = WaitQueue()
        self._user: object = sharing.owner
        """The connection, or None while the lead has no key for the region."""
        self._usable = True
        self.token = token
        self._aim(RemoteRange.of(token))
        self._lease_from(self._clock.now() if since is None else since, token.lease_ms)

    def __repr__(self) -> str:
        state = "" if self._usable else f" {self._why or 'given up'}"
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
    def lease_left(self) -> float | None:
        """The remaining time of the lease in seconds, by this side's clock.

        None means that the lease has no time limit.
        """
        if self.ended:
            return 0.0
        left = max(0.0, self._deadline - self._clock.now())
        return None if math.isinf(left) else left

    @property
    def _over(self) -> bool:
        return not self._usable or self._deadline <= self._clock.now()

    @property
    def ended(self) -> bool:
        """Whether the region can no longer be used.

        This is the case if its lease has expired, its owner has revoked it, this side has released
        it, or the connection has ended.
        """
        return self._over or self._sharing.ended

    async def wait_ended(self) -> None:
        """Wait until the region has `ended`."""
        while not self.ended:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.lease_left):
                    await self._changes.wait()

    async def renew(self, lease: float | None) -> None:
        """Ask the owner to extend the lease of borrowed memory.

        Args:
            lease: The new lease in seconds from now, or None for no time limit. The owner may grant
                less (`Config.max_lease`), as `lease_left` shows.

        Raises:
            LeaseEndedError: If the lease has ended.
            RequestRefusedError: If the owner refuses.
        """
        lease_ms, region_id = milliseconds(lease_seconds(lease)), self.token.region_id
        self._check(self._sharing.owner)
        await self._sharing.ask(lambda number: protocol.RegionRenew(number, region_id, lease_ms))

    def _lease_from(self, since: float, lease_ms: int) -> None:
        """Start a lease of `lease_ms` (0 means no limit) at the time `since`."""
        self._deadline = since + lease_ms / 1000 if lease_ms else math.inf
        self._wake()

    def _take_back(self) -> None:
        if self._usable:
            self._why = "reclaimed by its owner"
            self._deadline: float = -math.inf
            self._give_up()

    def _move(self, lead: int) -> bool:
        """Switch to the key for the new lead. Returns whether the region has one.

        Without one, the owner will send a key or end the region. A region that came from a token is
        lost.
        """
        rkey = (self._keys or {}).get(lead)
        if rkey is not None:
            self.rkey = rkey
            self._user = self._sharing.owner
        elif self._keys is not None:
            self._user = None
        elif not self.ended:
            self._why, self._deadline = "lost with the rail that had its key", -math.inf
            self._usable = False  # the owner may still share it, with a token for another key
            self._wake()
        return rkey is not None

    def _unusable(self) -> BufferStateError:
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
        if self._why:
            return LeaseEndedError(f"{self!r} cannot be used again", self.token.region_id)
        return BufferStateError(f"{self!r} cannot be used again")

    def _give_up(self) -> None:
        """Make the region unusable here, because it belongs to its owner again."""
        self._usable: bool = False
        self._sharing.regions.end(self.token.region_id)
        self._wake()

    def _drop(self) -> None:
        """Return a region that was granted too late."""
        self._give_up()
        self._sharing.give_back(self.token.region_id)

    def _wake(self) -> None:
        self._changes.wake_all()

    async def release(self) -> None:
        """Tell the owner that the region is no longer needed. A second call has no effect."""
        if self._usable:
            self._give_up()
            await self._sharing.tell(protocol.RegionRelease(0, self.token.region_id))

    async def _hand_over(self) -> None:
        """Return the region with its contents, as a Buffer for the owner."""
        if not self._lent:
            raise ValueError(
                f"cannot hand over {self!r}: the region was not borrowed with request_region"
            )
        self._give_up()
        await self._sharing.tell(protocol.RegionReturn(0, self.token.region_id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self.ended:
            await self.release()

    @finalizer
    def __del__(self) -> None:
        """Return borrowed memory. Runs in any thread, at any time."""
        if getattr(self, "_lent", False) and self._usable:  # even if its lease has expired
            self._sharing.call_soon(self._sharing.give_back, self.token.region_id)


class RemoteSlice(RemoteMemory):
    """A part of a RemoteRegion. `region` is the whole region.

    `address`, `length` and `rkey` are for work requests that you post yourself.
    """

    __slots__ = ("region",)

    def __init__(self, region: RemoteRegion, range: RemoteRange) -> None:
        self.region: RemoteRegion = region
        self._root: RemoteRegion = region
        self._aim(range)

    def __repr__(self) -> str:
        return f"<{self.region!r}[{self._range.offset}:{self._range.offset + self._range.length}]>"

    def __getitem__(self, key: slice) -> RemoteSlice:
        return RemoteSlice(self.region, self._range[key])


Remote = RemoteRegion | RemoteSlice
