"""The regions of one connection: this side's that the peer may use, and the peer's.

Sends nothing, and awaits nothing.
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
from ..config import Config
from ..errors import LeaseEndedError, QuotaError, RDMAError, cause_text
from ..mr_pool import MemoryPool
from .lease_thread import lease_seconds
from .remote_memory import RemoteRegion
from .shares import Loan, Share

if TYPE_CHECKING:
    from .._datapath.rail import SendQueue

MOST_ENDED = 4096
"""Numbers that are kept of the peer's regions that have ended: twice the runs of such ids.  An
honest peer makes no more runs than it has regions that have not ended."""


class Regions:
    """The regions that both sides know, with the rails by which they can be used."""

    def __init__(self, pool: MemoryPool, config: Config, lead: SendQueue) -> None:
        self.pool: MemoryPool = pool  # of the lead's device
        self.lead: SendQueue = lead
        self.rails: dict[SendQueue, MemoryPool] = {}  # those besides the lead that are up
        self._config = config
        self._granter = self._peer = 0
        self._ended: list[int] = []
        """The peer's regions that have ended: ids from an even place up to the next place."""
        self.shares: dict[int, Share] = {}
        self.lent_bytes: int = 0  # what was handed over and not yet received included
        self.used: WeakValueDictionary[int, RemoteRegion] = WeakValueDictionary()
        self.keyless: dict[int, Callable[[], object]] = {}
        """By region: hands out one whose key for the lead is still to come."""

    def begin(self, granter: int, peer: int) -> None:
        """The peer is known: the upper bits of the ids that this side grants, and that it does."""
        self._granter, self._peer = granter, peer
        self._ids = itertools.count(granter << NUMBER_BITS)

    def next_id(self) -> int:
        return next(self._ids)

    # ---- this side's memory --------------------------------------------------------------

    def add(self, share: Share) -> None:
        self.shares[share.region_id] = share
        if isinstance(share, Loan):
            self.lent_bytes += len(share.buffer)

    def granted(self, share: Share) -> None:
        """The peer knows the region when it gets what is sent after this."""
        share.told = True
        share._open_rails()  # those that came up meanwhile

    def renumber(self, share: Share) -> None:
        """Gives it another id, since its token has another key: that before has ended."""
        self.forget(share)
        share.region_id = self.next_id()
        self.add(share)

    def forget(self, share: Share) -> None:
        known = self.shares.pop(share.region_id, None)
        if known is not None and isinstance(share, Loan):
            self.lent_bytes -= len(share.buffer)

    def lease_for(self, lease_ms: int) -> float | None:
        """Seconds of what the peer has asked for (0: without an end), within `Config.max_lease`."""
        asked = lease_ms / 1000 if lease_ms else None
        most = lease_seconds(self._config.max_lease)
        return most if asked is None or (most is not None and asked > most) else asked

    def check_quota(self, length: int, handed_over: int) -> None:
        """QuotaError if the peer may not have so many bytes more, with so many regions that came
        back and were not received."""
        lent = self.lent_bytes
        quota = self._config.lend_quota
        if lent + length > quota:
            raise QuotaError(
                f"{length} bytes were asked for, {lent} of {quota} are lent already "
                f"(Config.lend_quota of the owner)",
                amount=lent + length,
                limit=quota,
            )
        regions = len(self.shares) + handed_over
        if regions >= self._config.max_regions:
            raise QuotaError(
                f"{regions} regions are shared already, or handed over and not received "
                f"(Config.max_regions of the owner)",
                amount=regions + 1,
                limit=self._config.max_regions,
            )

    # ---- the peer's memory ---------------------------------------------------------------

    def check(self, token: RegionToken) -> None:
        """Raises for a token whose key the peer's device would refuse, as far as is known here."""
        region, granter = f"region {token.region_id:#x}", token.region_id >> NUMBER_BITS
        if granter == self._granter != self._peer:
            raise ValueError(f"{region} is this side's own: its token is for the peer to open")
        if granter != self._peer:
            raise ValueError(
                f"{region} is not of this connection: a token is good at the other end of the "
                f"connection whose `share` has made it"
            )
        if bisect_right(self._ended, token.region_id) % 2:
            raise LeaseEndedError(
                f"{region} has ended: its owner has to share the memory again", token.region_id
            )

    def end(self, region_id: int) -> None:
        """The peer's region has ended, and its token is good no more."""
        ended = self._ended
        if region_id >> NUMBER_BITS != self._peer or bisect_right(ended, region_id) % 2:
            return
        for bound in (region_id, region_id + 1):
            at = bisect_left(ended, bound)
            if ended[at : at + 1] == [bound]:
                del ended[at]  # where it meets the run before or behind
            else:
                ended.insert(at, bound)
        if len(ended) > MOST_ENDED:
            del ended[:2]

    def use(self, region: RemoteRegion, *, granted: bool = True) -> RemoteRegion:
        """Keeps the region, whose owner can end it and change its lease from now on; if the owner
        has `granted` it here, it tells of keys for other rails as well."""
        if granted:
            region._keys = {}
        self.used[region.token.region_id] = region
        return region

    def use_with_keys(
        self, region: RemoteRegion, keys: Keys, take: Callable[[RemoteRegion], object]
    ) -> None:
        """Hands it out when its key for the lead is known: else a RegionKey follows."""
        region_id = region.token.region_id
        self.use(region)
        self.keyless[region_id] = partial(take, region)
        if not self.lead.number:
            self._hand_out(region_id)
        else:
            region._user = None
        for rail, rkey in keys:
            self.take_key(region_id, rail, rkey)

    def _hand_out(self, region_id: int) -> None:
        if (hand_out := self.keyless.pop(region_id, None)) is not None:
            hand_out()

    def take_key(self, region_id: int, rail: int, rkey: int) -> None:
        region, lead = self.used.get(region_id), self.lead.number
        known = (lead, *(other.number for other in self.rails))
        if rail not in known or region is None or region._keys is None:
            return
        region._keys[rail] = rkey
        if rail == lead:
            region._move(lead)
            self._hand_out(region_id)

    def taken_back(self, region_id: int) -> None:
        """The owner has ended the region."""
        self.end(region_id)
        region = self.used.pop(region_id, None)
        if region is not None:
            region._take_back()
        self._hand_out(region_id)

    # ---- rails ---------------------------------------------------------------------------

    def add_rail(self, rail: SendQueue, pool: MemoryPool) -> None:
        """A further rail is up: what the peer knows it can use by that one as well."""
        self.rails[rail] = pool
        for share in list(self.shares.values()):
            if share.told:
                share._open_rails()

    def remove_rail(self, rail: SendQueue) -> None:
        """The rail is gone, and its queue pair goes after this."""
        self.rails.pop(rail, None)
        for share in list(self.shares.values()):
            share._remove_rail(rail)
        for region in list(self.used.values()):
            if region._keys is not None:
                region._keys.pop(rail.number, None)

    def move(self, lead: SendQueue) -> None:
        """That rail, which is up, is the lead now, and what works by it alone goes on."""
        before, self.lead, self.pool = self.lead, lead, self.rails.pop(lead)
        for share in list(self.shares.values()):
            share._remove_rail(before)  # of one that was made since that broke
            try:
                share._move(lead, self.pool)
            except (RDMAError, OSError, MemoryError) as error:
                device, why = lead.qp.context.name, cause_text(error)
                lead.rail_broke(RDMAError(f"{share!r} cannot be opened by {device}: {why}"))
                break
        for region_id, region in list(self.used.items()):
            if region._move(lead.number):
                self._hand_out(region_id)
