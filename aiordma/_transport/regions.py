"""A connection's regions: the regions shared by this side and the regions shared by the peer.

Nothing here sends or awaits.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from .._core.fields import Keys
from .._core.region import NUMBER_BITS, RegionToken
from .._datapath.work_queue import RailObserver
from ..config import Config
from ..errors import LeaseEndedError, QuotaError, RDMAError, cause_text
from ..mr_pool import MemoryPool
from .lease_thread import lease_seconds
from .remote_memory import RemoteRegion
from .share_keys import pool_of
from .shares import Loan, Share

if TYPE_CHECKING:
    from .._datapath.rail import SendQueue
    from .._datapath.session import Session

MAX_ENDED = 4096
"""The maximum length of `Regions._ended_runs`, which has two entries per run of consecutive ids.

A peer that follows the protocol never causes more runs than it has active regions.
"""


class Regions(RailObserver):
    """The regions that each side shares with the other, and their keys for each rail."""

    def __init__(self, config: Config, messages: Session) -> None:
        self.lead_queue: SendQueue = messages.lead
        """The lead whose keys the regions use."""
        self._messages = messages
        self._config = config
        self._own_granter = self._peer_granter = 0
        self._ended_runs: list[int] = []
        """The ids of the peer's ended regions, as a flat list of the start and stop of each run."""
        self.shares: dict[int, Share] = {}
        self.lent_bytes: int = 0  # includes memory that was handed over but not yet received
        self.remote_regions: WeakValueDictionary[int, RemoteRegion] = WeakValueDictionary()
        self.pending_delivery: dict[int, Callable[[], object]] = {}
        """Functions that deliver the regions waiting for a key for the lead, by region id."""

    def begin(self, own_granter: int, peer_granter: int) -> None:
        """Set the upper bits of the region ids that this side and the peer assign."""
        self._own_granter, self._peer_granter = own_granter, peer_granter
        self._ids = itertools.count(own_granter << NUMBER_BITS)

    @property
    def rails(self) -> list[SendQueue]:
        """The rails that are up, including the lead."""
        return self._messages.rails_up

    @property
    def pool(self) -> MemoryPool:
        """The memory pool of the lead's device."""
        return pool_of(self.lead_queue)

    def next_id(self) -> int:
        return next(self._ids)

    # ---- this side's memory --------------------------------------------------------------

    def add(self, share: Share) -> None:
        self.shares[share.region_id] = share
        if isinstance(share, Loan):
            self.lent_bytes += len(share.buffer)

    def on_grant_sent(self, share: Share) -> None:
        """Record that the token has been queued, so that later messages may refer to the region."""
        share.peer_knows_region = True
        share._create_rail_keys()  # for rails that came up in the meantime

    def renumber(self, share: Share) -> None:
        """Give the share a new id for a new token. The key in the old token no longer exists."""
        self.forget(share)
        share.region_id = self.next_id()
        self.add(share)

    def forget(self, share: Share) -> None:
        known = self.shares.pop(share.region_id, None)
        if known is not None and isinstance(share, Loan):
            self.lent_bytes -= len(share.buffer)

    def lease_for(self, lease_ms: int) -> float | None:
        """Convert a requested lease to seconds, limited by `Config.max_lease`. 0 means no limit."""
        requested = lease_ms / 1000 if lease_ms else None
        most = lease_seconds(self._config.max_lease)
        return most if requested is None or (most is not None and requested > most) else requested

    def check_quota(self, length: int, handed_over: int) -> None:
        """Raise QuotaError if the peer may not borrow `length` more bytes.

        `handed_over` is the number of regions that were handed over but not yet received.
        """
        lent = self.lent_bytes
        quota = self._config.lend_quota
        if lent + length > quota:
            raise QuotaError(
                f"cannot lend {length} bytes: {lent} of {quota} bytes are already lent "
                f"(limited by the owner's Config.lend_quota)",
                amount=lent + length,
                limit=quota,
            )
        regions = len(self.shares) + handed_over
        if regions >= self._config.max_regions:
            raise QuotaError(
                f"too many regions: {regions} are already shared or waiting to be received "
                f"(limited by the owner's Config.max_regions)",
                amount=regions + 1,
                limit=self._config.max_regions,
            )

    # ---- the peer's memory ---------------------------------------------------------------

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
        self.remote_regions[region.token.region_id] = region
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
        region = self.remote_regions.get(region_id)
        is_up = any(rail == queue.number for queue in self.rails)
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
        region = self.remote_regions.pop(region_id, None)
        if region is not None:
            region._on_revoked()
        self._deliver(region_id)  # its receiver gets LeaseEndedError on use

    # ---- rails ---------------------------------------------------------------------------

    def rail_up(self, rail: SendQueue) -> None:
        """Create the rail's keys for all shares that have been announced to the peer."""
        for share in list(self.shares.values()):
            if share.peer_knows_region:
                share._create_rail_keys()

    def rail_removed(self, rail: SendQueue) -> None:
        """Drop the rail's keys for the regions of both sides."""
        for share in list(self.shares.values()):
            share._remove_rail(rail)
        for region in list(self.remote_regions.values()):
            if region._keys is not None:
                region._keys.pop(rail.number, None)

    def lead_changed(self, lead: SendQueue) -> None:
        """Switch all regions to their keys for the new lead."""
        old_lead, self.lead_queue = self.lead_queue, lead
        for share in list(self.shares.values()):
            share._remove_rail(old_lead)  # needed if the share was created after the rail broke
            try:
                share._switch_lead(lead)
            except (RDMAError, OSError, MemoryError) as error:
                device, why = lead.qp.context.name, cause_text(error)
                # The failover to the next lead rail switches the remaining shares.
                lead.rail_broke(RDMAError(f"{share!r} cannot be opened by {device}: {why}"))
                break
        for region_id, region in list(self.remote_regions.items()):
            if region._switch_lead(lead.number):
                self._deliver(region_id)
