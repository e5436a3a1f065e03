"""Operation slots: which posted work a completion belongs to, and what must live until then.

Some facts about work completions: a failed one defines only ``wr_id``, ``status``, ``qp_num``
and ``vendor_err`` (ibv_poll_cq(3)), so the kind of operation must be known from the ``wr_id``
alone. Verbs cannot take back a single posted work request: whoever stops waiting for it frees
nothing, the device may still read or write the memory until the completion (or the flush, or the
end of the queue pair) is in.

So every posted operation has a slot, and the slot has a life::

    FREE --post--> POSTED or AWAITED --complete--> DONE --release--> FREE
                      |                               ^
                      +--abandon--> ABANDONED --------+ complete

A slot keeps what it is given (``waiter``, ``memory``, ``owner``) as opaque objects: nothing here
knows what a future or a buffer is. Slots are made in advance and used again; posting allocates
nothing but the integer of the ``wr_id``::

    bits 63..32  generation, counted up each time the slot is used again
    bit  31      not the last request of several that share the slot
    bits 30..24  kind of operation
    bits 23..0   index of the slot

Several requests that are posted together may share a slot: all have its ``wr_id``, and all but the
last, which alone is signaled, have bit 31 in it. They complete only when they fail, which ends
nothing: the last one is still to come, flushed.

A completion that comes twice, or for a slot that has since been used again, has an old generation
and is told apart. (After 2**32 uses of one slot the generation repeats.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum

from aiordma.errors import InternalError, LimitError

_INDEX_BITS = 24
_KIND_BITS = 7
_EARLIER = 1 << (_INDEX_BITS + _KIND_BITS)
_GENERATION = _EARLIER << 1
_INDEX_MASK = (1 << _INDEX_BITS) - 1
_WR_ID_MASK = (1 << 64) - 1
_NO_WR_ID = -1

MAX_SLOTS = 1 << _INDEX_BITS
"""The most slots that a table can have."""


class OperationKind(IntEnum):
    """What was posted. The number stands in the ``wr_id``."""

    RECV = 0
    SEND = 1
    WRITE = 2
    READ = 3
    COMPARE_AND_SWAP = 4
    FETCH_AND_ADD = 5
    BIND_WINDOW = 6
    INVALIDATE = 7
    DRAIN = 8
    BATCH = 9

    @property
    def text(self) -> str:
        """The name as people say it: ``"fetch and add"``."""
        return self.name.lower().replace("_", " ")


class OperationState(Enum):
    """Where in its life a slot is."""

    FREE = "free"
    POSTED = "posted"
    AWAITED = "awaited"
    ABANDONED = "abandoned"
    DONE = "done"


# Enum members looked up once: attribute access on the class costs more than the rest of a post.
_FREE = OperationState.FREE
_POSTED = OperationState.POSTED
_AWAITED = OperationState.AWAITED
_ABANDONED = OperationState.ABANDONED
_DONE = OperationState.DONE
_KINDS = {int(kind): kind for kind in OperationKind}


def kind_of(wr_id: int) -> OperationKind | None:
    """The kind of operation that a ``wr_id`` was given to; None if it is none of ours."""
    return _KINDS.get((wr_id >> _INDEX_BITS) & ((1 << _KIND_BITS) - 1))


class OperationSlot:
    """One posted operation. Made and changed by :class:`OperationTable` only; read by anyone.

    The references ``waiter``, ``memory`` and ``owner`` are held until it is released (``waiter``
    until it is abandoned). After that the slot belongs to the next operation: keep the ``wr_id``
    to speak of an operation later, not the slot.
    """

    __slots__ = ("_base", "index", "kind", "memory", "owner", "state", "waiter", "wr_id")

    def __init__(self, index: int) -> None:
        self.index = index
        self._base = _GENERATION | index
        self.wr_id = _NO_WR_ID
        self.kind = OperationKind.RECV
        self.state = _FREE
        self.waiter: object = None
        self.memory: object = None
        self.owner: object = None

    def __repr__(self) -> str:
        what = "" if self.state is _FREE else f" {self.kind.text}, wr_id {self.wr_id:#x},"
        return f"<OperationSlot {self.index}{what} {self.state.value}>"


@dataclass(frozen=True, slots=True)
class OperationStatistics:
    """A count of slots by state, and of completions that belonged to no slot."""

    slots: int
    free: int
    posted: int
    awaited: int
    abandoned: int
    done: int
    stray_completions: int


class OperationTable:
    """The slots of one event loop (or of whatever shares a completion queue).

    ``slots`` are made at once; when they are used up their number doubles, up to ``limit``.
    """

    __slots__ = ("_free", "_limit", "_slots", "_stray")

    def __init__(self, slots: int = 256, *, limit: int = MAX_SLOTS) -> None:
        if not 1 <= slots <= limit <= MAX_SLOTS:
            raise ValueError(f"1 <= slots ({slots}) <= limit ({limit}) <= {MAX_SLOTS} must hold")
        self._slots = [OperationSlot(index) for index in range(slots)]
        self._free = self._slots[::-1]
        self._limit = limit
        self._stray = 0

    def __len__(self) -> int:
        """How many slots are not free."""
        return len(self._slots) - len(self._free)

    def post(
        self,
        kind: OperationKind,
        waiter: object = None,
        memory: object = None,
        owner: object = None,
    ) -> OperationSlot:
        """Take a slot for an operation that is about to be posted with ``slot.wr_id``.

        With a ``waiter`` it is AWAITED, without POSTED (see :meth:`wait`). Raises LimitError
        when all slots are taken.
        """
        free = self._free
        if not free:
            self._grow()
        slot = free.pop()
        slot.wr_id = slot._base | (kind << _INDEX_BITS)
        slot.kind = kind
        slot.state = _POSTED if waiter is None else _AWAITED
        slot.waiter = waiter
        slot.memory = memory
        slot.owner = owner
        return slot

    def _grow(self) -> None:
        have = len(self._slots)
        more = min(have, self._limit - have)
        if not more:
            raise LimitError(
                f"all {have} operation slots are taken", amount=have + 1, limit=self._limit
            )
        new = [OperationSlot(index) for index in range(have, have + more)]
        self._slots += new
        self._free += reversed(new)

    def find(self, wr_id: int) -> OperationSlot | None:
        """The slot of an operation that is posted, awaited or abandoned; else None."""
        index = wr_id & _INDEX_MASK
        if index < len(self._slots):
            slot = self._slots[index]
            if slot.wr_id == wr_id and slot.state is not _DONE:
                return slot
        return None

    def wait(self, wr_id: int, waiter: object) -> bool:
        """Attach a waiter to an operation that has none: POSTED -> AWAITED.

        False if it is no longer outstanding (completed, or never posted). InternalError if
        somebody waits for it already, or gave it up.
        """
        slot = self.find(wr_id)
        if slot is None:
            return False
        if slot.state is not _POSTED:
            raise InternalError(f"{slot} cannot be waited for")
        slot.waiter = waiter
        slot.state = _AWAITED
        return True

    def abandon(self, wr_id: int) -> bool:
        """Nobody waits any more: drop the waiter, keep the slot and the memory.

        False, and nothing changes, if the operation is no longer outstanding; so a cancellation
        may come at any time. Abandoning twice is harmless.
        """
        slot = self.find(wr_id)
        if slot is None:
            return False
        slot.state = _ABANDONED
        slot.waiter = None
        return True

    def complete(self, wr_id: int) -> OperationSlot | None:
        """A completion is in: its slot, now DONE, with all it kept; :meth:`release` it next.

        None if the ``wr_id`` belongs to nothing outstanding: :meth:`explain` says why. That is
        counted and is no error by itself: a late completion of a queue pair that was given up
        looks so.
        """
        index = wr_id & _INDEX_MASK
        if index < len(self._slots):
            slot = self._slots[index]
            if slot.wr_id == wr_id and slot.state is not _DONE:
                slot.state = _DONE
                return slot
        self._stray += 1
        return None

    def release(self, slot: OperationSlot) -> None:
        """Give a DONE slot back; it forgets all that it kept."""
        if slot.state is not _DONE:
            raise InternalError(f"release of {slot}")
        self._recycle(slot)

    def withdraw(self, slot: OperationSlot) -> None:
        """Give a slot back whose post failed: the device has never seen it."""
        if slot.state is _FREE or slot.state is _DONE:
            raise InternalError(f"withdrawal of {slot}")
        self._recycle(slot)

    def _recycle(self, slot: OperationSlot) -> None:
        slot.state = _FREE
        slot.wr_id = _NO_WR_ID
        slot._base = (slot._base + _GENERATION) & _WR_ID_MASK
        slot.waiter = slot.memory = slot.owner = None
        self._free.append(slot)

    def earlier(self, wr_id: int) -> OperationSlot | None:
        """The slot of a request that is not the last of several, and has completed: has failed."""
        return self.find(wr_id ^ _EARLIER) if wr_id & _EARLIER else None

    def explain(self, wr_id: int) -> str:
        """Why :meth:`complete` did not accept a ``wr_id``; for logs."""
        index = wr_id & _INDEX_MASK
        kind = kind_of(wr_id)
        if kind is None or index >= len(self._slots) or not 0 <= wr_id <= _WR_ID_MASK:
            return f"wr_id {wr_id:#x} was never given out"
        slot = self._slots[index]
        if slot.wr_id == wr_id:
            return f"wr_id {wr_id:#x} ({kind.text}) is {slot.state.value}"
        now = "free" if slot.state is _FREE else f"of a {slot.kind.text}"
        if wr_id >= (slot._base & ~_INDEX_MASK):
            return f"wr_id {wr_id:#x} was never given out; slot {index} is {now}"
        return f"wr_id {wr_id:#x} ({kind.text}) is stale; slot {index} is {now} now"

    def outstanding(self) -> Iterator[OperationSlot]:
        """The slots that are not free, in no order that means anything."""
        return (slot for slot in self._slots if slot.state is not _FREE)

    def statistics(self) -> OperationStatistics:
        """Count the slots; walks the table."""
        counts = dict.fromkeys(OperationState, 0)
        for slot in self._slots:
            counts[slot.state] += 1
        return OperationStatistics(
            slots=len(self._slots),
            free=counts[_FREE],
            posted=counts[_POSTED],
            awaited=counts[_AWAITED],
            abandoned=counts[_ABANDONED],
            done=counts[_DONE],
            stray_completions=self._stray,
        )
