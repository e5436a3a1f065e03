"""Memory of this side that the peer may use: shared, lent and handed-over memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

from .. import _transport
from .._core import protocol
from .._core.fields import Keys
from .._core.finalizers import finalizer
from .._core.region import NUMBER_BITS, RegionToken, Rights
from .._datapath.rail import SendQueue
from .._datapath.work_queue import RailObserver
from ..config import Config
from ..errors import BufferStateError, OutcomeUnknownError, QuotaError, RDMAError, cause_text
from ..mr_pool import Block, Buffer, LocalMemory, MemoryPool
from . import lease_thread, share_keys
from .lease_thread import Deadline, lease_seconds, milliseconds

if TYPE_CHECKING:
    from .._datapath.session import Session


class Share:
    """Local memory that the peer may access.

    A share ends when you call `revoke`, when its lease expires, or when the connection ends. The
    memory stays registered and pinned until then.
    """

    _no_memory_hint = "send its token: share.token.pack()"

    def __init__(
        self,
        sharing: _transport.Sharing,
        region_id: int,
        memory: LocalMemory,
        rights: Rights,
        lease: float | None,
    ) -> None:
        self._sharing, self._clock = sharing, sharing.clock
        self._memory = memory
        lead_queue = sharing.shares.lead_queue
        key = share_keys.make_key(lead_queue, memory, rights)
        self._keys: dict[SendQueue, share_keys.ShareKey] = {lead_queue: key}
        self._lost_key: share_keys.ShareKey | None = None
        """The last key, closed with its rail. None while any rail has a key."""
        self.peer_knows_region = False
        """Whether the peer knows the region, so that keys for other rails must be announced."""
        memory._pin()
        self._ended = False
        self._keys_expired = False  # the lease thread has ended the keys
        self._deadline: Deadline | None = None
        # The end of the pause after `_deadline` in which a bind in progress may complete.
        self._grace_deadline: Deadline | None = None
        self.region_id = region_id
        self.rights = rights
        self.token: RegionToken = RegionToken(
            region_id, key.address, key.length, key.rkey, rights, milliseconds(lease)
        )

    def __repr__(self) -> str:
        state = "revoked" if self.revoked else "active"
        return f"<Share {self.region_id:#x} of {self._memory!r}, {self.rights!r}, {state}>"

    async def ready(self) -> None:
        """Wait until the key works. Call this before you send the token over another channel.

        You do not have to call this after `send_region`, which has already waited. You can also
        send the token in a message on this connection without waiting, because the message arrives
        after the key has become valid. If the connection ends first, its error is raised.
        """
        while not self._ended:
            key = self._oldest_key
            try:
                await asyncio.shield(key.ready)
            except OutcomeUnknownError:  # the key of another rail will replace it
                if self._oldest_key is key and not self._ended:
                    await self._sharing.wait_lead_change()
                continue
            pending = [other.ready for other in self._keys.values() if not other.ready.done()]
            if pending:
                await asyncio.wait(pending)
            elif self._lost_key is None:
                return
            else:  # every rail with a key has broken; the next lead rail gets a new key
                await self._sharing.wait_lead_change()
        self._sharing.check_end()

    def _on_ready(self, callback: Callable[[], None]) -> None:
        """Call `callback` once every key works or has been closed."""
        for key in self._keys.values():
            if not key.ready.done():
                key.on_ready(partial(self._on_ready, callback))
                return
        # Either no key is pending, and this calls `callback` immediately. Or every rail with a key
        # has broken, and `callback` passes to the key of the next lead rail (`transfer_callback`).
        self._oldest_key.on_ready(callback)

    def _rail_keys(self) -> Keys:
        """Return (rail, key) pairs for the working keys. Omits rail 0: its key is in the token."""
        return tuple(
            (rail.number, key.rkey)
            for rail, key in self._keys.items()
            if rail.number and key.ready.done() and not key.closed
        )

    @property
    def _oldest_key(self) -> share_keys.ShareKey:
        """The oldest key. All keys end together, so its state is the state of the share."""
        first = next(iter(self._keys.values()), self._lost_key)
        assert first is not None
        return first

    def _add_rail(self, rail: SendQueue) -> None:
        """Create a key for a rail. Raises an exception if the device cannot use the memory."""
        if rail in self._keys:
            return
        key = self._keys[rail] = share_keys.make_key(rail, self._memory, self.rights)
        if self._lease_has_expired():
            key.close()  # the lease thread may have missed the new key
        elif self.peer_knows_region:
            key.on_ready(partial(self._announce_key, rail))

    def _create_rail_keys(self) -> None:
        """Create the missing keys for all rails. If this fails, `_switch_lead` tries again."""
        for rail in self._sharing.shares.rails:
            with suppress(RDMAError, OSError, MemoryError):
                self._add_rail(rail)

    def _switch_lead(self, lead: SendQueue) -> None:
        """Switch to the key for a new lead rail, and create it if necessary.

        Raises an exception if the rail's device cannot use the memory.
        """
        if self._ended:
            return
        self._add_rail(lead)
        lost_key, self._lost_key, key = self._lost_key, None, self._keys[lead]
        if lost_key is None or self.peer_knows_region:
            self.token = replace(self.token, rkey=key.rkey)
            return
        # The program may have passed on the token, whose key no longer exists. Replace the token,
        # because the peer ignores new keys for a region without a RegionGrant.
        self._sharing.notify(protocol.RegionEnd(0, self.region_id))  # ends the previous token
        self._sharing.shares.renumber(self)
        self.token = replace(self.token, region_id=self.region_id, rkey=key.rkey)
        lost_key.transfer_callback(key)

    def _announce_key(self, rail: SendQueue) -> None:
        key = self._keys.get(rail)
        if key is not None and not self.revoked:
            announcement = protocol.RegionKey(0, self.region_id, rail.number, key.rkey)
            key.withdraw_announcement = self._sharing.notify(announcement)

    def _remove_rail(self, rail: SendQueue) -> None:
        """Remove a rail before its queue pair is destroyed.

        If the rail has the only key, the share gets a new key when another rail becomes the lead.
        """
        key = self._keys.pop(rail, None)  # the lease thread no longer ends this key
        if key is None:
            return
        if self._lease_has_expired():
            self._on_expired()
        key.withdraw_announcement()  # messages would pile up if the peer returned no credits
        key.close()
        if self._keys:  # `_on_ready` then waits for the remaining keys
            key.notify_ready()
        else:
            self._lost_key = key

    @property
    def revoked(self) -> bool:
        """Whether the share has ended and the peer's key no longer works."""
        return self._ended or (
            self._lease_has_expired() and all(key.closed for key in self._keys.values())
        )

    def _lease_has_expired(self) -> bool:
        """Return whether the lease has expired. Waits if the lease thread is ending the keys."""
        if self._deadline is not None and not self._deadline.pending:
            self._deadline.cancel()  # waits if the action is running
        return self._keys_expired

    def revoke(self) -> None:
        """Revoke the peer's access. When this returns, the key no longer works.

        The peer is notified. A second call has no effect.

        If the key does not work yet (see `ready`), the send queue invalidates it right after
        binding it. The memory stays registered until then.

        If the peer is accessing the memory, its operation fails with RemoteAccessError. This breaks
        the connection, as verbs require. To avoid this, make sure that the peer has finished before
        you revoke its access.
        """
        self._end(notify=True)

    async def renew(self, lease: float | None) -> None:
        """Start a new lease now, and notify the peer.

        A shorter lease takes effect only after the peer has been notified. The old lease may expire
        before that.

        Args:
            lease: The new lease in seconds from now, or None for no time limit.

        Raises:
            BufferStateError: If the share has ended.
        """
        lease = lease_seconds(lease)
        if not self._restart_lease(lease, extend_only=True):
            raise BufferStateError(f"{self!r} has ended: share the memory again")
        await self._sharing.send(protocol.RegionLease(0, self.region_id, milliseconds(lease)))
        self._restart_lease(lease)

    def _restart_lease(self, lease: float | None, *, extend_only: bool = False) -> bool:
        """Restart the lease now. Returns False if the share has ended.

        With `extend_only`, the lease is never shortened. If no lease thread can be started, the
        share ends and RDMAError is raised.
        """
        old_deadline = self._deadline
        when = None if lease is None else self._clock.now() + lease
        shorter = when is not None and (old_deadline is None or when < old_deadline.when)
        if old_deadline is not None and not (extend_only and shorter):
            old_deadline.cancel()
        if self._ended or self._lease_has_expired():
            return False
        if not (extend_only and shorter):
            self._deadline = None
            if when is not None:
                try:
                    self._deadline = lease_thread.schedule(self._clock, when, self._expire)
                except RDMAError:
                    self._end(notify=True)  # otherwise, the peer's access would never end
                    raise
        return True

    def _expire(self) -> None:
        """End the keys in the lease thread when the lease expires. The loop then ends the share."""
        self._keys_expired = True
        try:
            keys_being_bound = [key for key in list(self._keys.values()) if not key.try_end()]
            if keys_being_bound:
                when = self._clock.now() + share_keys.GRACE
                self._grace_deadline = lease_thread.schedule(
                    self._clock, when, partial(force_end_all, keys_being_bound)
                )
        finally:
            self._sharing.call_soon(self._on_expired)

    def _on_expired(self) -> None:
        self._end(notify=True)

    def _end(self, *, notify: bool) -> None:
        """End the share. If `notify` is True, notify the peer."""
        if self._ended:
            return
        self._ended = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._grace_deadline is not None:
            self._grace_deadline.cancel()
        with ExitStack() as closing:  # closes all keys, even if closing one fails
            for key in self._keys.values():
                closing.callback(key.close)
        self._memory._unpin()
        self._sharing.shares.forget(self)
        if notify:
            self._sharing.notify(protocol.RegionEnd(0, self.region_id))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.revoke()


def force_end_all(keys: list[share_keys.ShareKey]) -> None:
    for key in keys:
        key.force_end()


class Loan(Share):
    """A share of pool memory that the peer has borrowed."""

    def __init__(
        self,
        sharing: _transport.Sharing,
        region_id: int,
        buffer: Buffer,
        rights: Rights,
        lease: float | None,
    ) -> None:
        self.buffer = buffer
        super().__init__(sharing, region_id, buffer, rights, lease)

    def _on_expired(self) -> None:
        # The peer needs no notification, because its own lease starts when it sends the request and
        # therefore expires earlier. If this side sent one, a peer could make it queue an unlimited
        # number of messages by requesting short leases.
        self._end(notify=False)

    def _end(self, *, notify: bool) -> None:
        super()._end(notify=notify)
        self.buffer.release()

    def hand_over(self) -> HandedOver:
        """End the peer's access, and return the memory with the contents intact."""
        super()._end(notify=False)
        return HandedOver(self.buffer)


class HandedOver:
    """Handed-over memory that the program has not yet received with `recv_buffer`.

    The memory is not a Buffer yet. If the program never receives it, the memory returns to the pool
    without a ResourceWarning, because the program had nothing to release.
    """

    __slots__ = ("_block", "_length")

    def __init__(self, buffer: Buffer) -> None:
        self._length = len(buffer)
        self._block: Block | None = buffer._transfer_block()

    def __len__(self) -> int:
        return self._length

    def take(self) -> Buffer:
        block, self._block = self._block, None
        assert block is not None
        return Buffer(block, self._length)

    @finalizer
    def __del__(self) -> None:
        if self._block is not None:
            self._block.release()


class Shares(RailObserver):
    """The memory of this side that the peer may use, and its keys for each rail.

    Nothing here sends or awaits.
    """

    def __init__(self, config: Config, messages: Session) -> None:
        self.lead_queue: SendQueue = messages.lead
        """The lead whose keys the shares use."""
        self._messages = messages
        self._config = config
        self.by_id: dict[int, Share] = {}
        self.lent_bytes: int = 0  # includes memory that was handed over but not yet received

    def begin(self, granter: int) -> None:
        """Set the upper bits of the region ids that this side assigns."""
        self._ids = itertools.count(granter << NUMBER_BITS)

    @property
    def rails(self) -> list[SendQueue]:
        """The rails that are up, including the lead."""
        return self._messages.rails_up

    @property
    def pool(self) -> MemoryPool:
        """The memory pool of the lead's device."""
        return share_keys.pool_of(self.lead_queue)

    def next_id(self) -> int:
        return next(self._ids)

    def add(self, share: Share) -> None:
        self.by_id[share.region_id] = share
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
        known = self.by_id.pop(share.region_id, None)
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
        regions = len(self.by_id) + handed_over
        if regions >= self._config.max_regions:
            raise QuotaError(
                f"too many regions: {regions} are already shared or waiting to be received "
                f"(limited by the owner's Config.max_regions)",
                amount=regions + 1,
                limit=self._config.max_regions,
            )

    def rail_up(self, rail: SendQueue) -> None:
        """Create the rail's keys for all shares that have been announced to the peer."""
        for share in list(self.by_id.values()):
            if share.peer_knows_region:
                share._create_rail_keys()

    def rail_removed(self, rail: SendQueue) -> None:
        """End the rail's keys for all shares."""
        for share in list(self.by_id.values()):
            share._remove_rail(rail)

    def lead_changed(self, lead: SendQueue) -> None:
        """Switch all shares to their keys for the new lead."""
        old_lead, self.lead_queue = self.lead_queue, lead
        for share in list(self.by_id.values()):
            share._remove_rail(old_lead)  # needed if the share was created after the rail broke
            try:
                share._switch_lead(lead)
            except (RDMAError, OSError, MemoryError) as error:
                device, why = lead.qp.context.name, cause_text(error)
                # The failover to the next lead rail switches the remaining shares.
                lead.rail_broke(RDMAError(f"{share!r} cannot be opened by {device}: {why}"))
                break
