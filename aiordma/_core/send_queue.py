"""The account of one send queue: which entries are free, and whose the others are.

Some facts about send queues: an entry is free again only when its own completion, or that of a
later signaled work request of the same queue, has been polled (ibv_post_send(3); IBTA volume 1,
clause 10.8.6: completions of one send queue come in the order of posting). An unsignaled work
request that succeeds has no completion, one that fails or is flushed has.

So what is posted together is one item here, of as many entries as there are work requests in it:
the last of them is signaled, and its completion frees all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from aiordma.errors import InternalError, LimitError

Item = TypeVar("Item")


class SendQueue(Generic[Item]):
    """Entries of one send queue. An item stands for what was posted together (compared by ``is``).

    ``capacity`` is the queue's ``max_send_wr``.
    """

    __slots__ = ("_entries", "_pending", "capacity", "free")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a send queue has at least one entry, not {capacity}")
        self.capacity = capacity
        self.free = capacity
        """How many work requests can be posted now."""
        self._pending: deque[Item] = deque()
        self._entries: deque[int] = deque()

    def __len__(self) -> int:
        """How many entries are taken."""
        return self.capacity - self.free

    def __iter__(self) -> Iterator[Item]:
        """What is outstanding, oldest first."""
        return iter(self._pending)

    def post(self, item: Item, entries: int = 1) -> None:
        """Take ``entries`` for an item that is about to be posted. LimitError when too few are
        free."""
        if not 1 <= entries <= self.free:
            raise LimitError(
                f"the send queue is full: {len(self)} of {self.capacity} entries are taken, "
                f"{entries} more are wanted",
                amount=len(self) + entries,
                limit=self.capacity,
            )
        self.free -= entries
        self._pending.append(item)
        self._entries.append(entries)

    def withdraw(self) -> None:
        """The last item was not posted after all: free its entries."""
        if not self._pending:
            raise InternalError("withdrawal from an empty send queue")
        self._pending.pop()
        self.free += self._entries.pop()

    def complete(self, item: Item) -> None:
        """The completion (good or failed) of ``item`` is in: its entries are free.

        InternalError, and nothing changes, if it is not the oldest: then completions were lost.
        """
        pending = self._pending
        if not pending or pending[0] is not item:
            if any(item is other for other in pending):
                raise InternalError(f"the completion of {item!r} overtook that of {pending[0]!r}")
            raise InternalError(f"a completion of {item!r}, which is not in the send queue")
        pending.popleft()
        self.free += self._entries.popleft()

    def clear(self) -> list[Item]:
        """The queue pair is gone: all that was outstanding, oldest first; the queue is empty."""
        left = list(self._pending)
        self._pending.clear()
        self._entries.clear()
        self.free = self.capacity
        return left
