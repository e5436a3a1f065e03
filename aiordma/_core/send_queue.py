"""The account of one send queue: which entries are free, and which work must be signaled.

Some facts about send queues: an entry is free again only when its own completion, or that of a
later signaled work request of the same queue, has been polled (ibv_post_send(3); IBTA volume 1,
clause 10.8.6: completions of one send queue come in the order of posting). An unsignaled work
request that succeeds has no completion, one that fails or is flushed has.

What this means here: the queue remembers everything posted, in order. A completion ends its own
work request and, as done and well, all unsignaled ones before it. And since a queue that is full
of unsignaled work would never get an entry back, at least every ``interval``-th is signaled,
whether anyone asked for its completion or not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from aiordma.errors import InternalError, LimitError

Item = TypeVar("Item")


class SendQueue(Generic[Item]):
    """Entries of one send queue. An item stands for one posted work request (compared by ``is``).

    ``capacity`` is the queue's ``max_send_wr``. ``interval`` is by default half of it: every
    completion then frees a good part of the queue, and one is always under way when it is full.
    """

    __slots__ = ("_interval", "_pending", "_signaled", "_unsignaled_run", "capacity")

    def __init__(self, capacity: int, *, interval: int | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"a send queue has at least one entry, not {capacity}")
        if interval is None:
            interval = max(1, capacity // 2)
        if not 1 <= interval <= capacity:
            raise ValueError(f"interval {interval} is not within 1..{capacity}")
        self.capacity = capacity
        self._interval = interval
        self._pending: deque[Item] = deque()
        self._signaled: deque[bool] = deque()
        self._unsignaled_run = 0

    def __len__(self) -> int:
        """How many entries are taken."""
        return len(self._pending)

    def __iter__(self) -> Iterator[Item]:
        """What is outstanding, oldest first."""
        return iter(self._pending)

    @property
    def free(self) -> int:
        """How many work requests can be posted now."""
        return self.capacity - len(self._pending)

    @property
    def unsignaled_tail(self) -> int:
        """Work requests at the end for which no completion is under way.

        They end with the next signaled one; to drain the queue when this is not 0, post one.
        """
        return self._unsignaled_run

    def post(self, item: Item, *, signaled: bool = True) -> bool:
        """Take an entry; the answer is whether the work request must be posted signaled.

        True when ``signaled`` asks for it, or when it is time. Raises LimitError, and takes
        nothing, when the queue is full.
        """
        if len(self._pending) >= self.capacity:
            raise LimitError(
                f"the send queue is full ({self.capacity} work requests)",
                amount=self.capacity + 1,
                limit=self.capacity,
            )
        if signaled or self._unsignaled_run + 1 >= self._interval:
            signaled = True
            self._unsignaled_run = 0
        else:
            self._unsignaled_run += 1
        self._pending.append(item)
        self._signaled.append(signaled)
        return signaled

    def withdraw(self, count: int = 1) -> None:
        """The last ``count`` work requests were not posted after all: free their entries."""
        if not 0 <= count <= len(self._pending):
            raise InternalError(f"withdrawal of {count} out of {len(self._pending)}")
        for _ in range(count):
            self._pending.pop()
            self._signaled.pop()
        run = 0
        for signaled in reversed(self._signaled):
            if signaled:
                break
            run += 1
        self._unsignaled_run = run

    def complete(self, item: Item) -> Sequence[Item]:
        """A completion (good or failed) of ``item`` is in: its entry and all before are free.

        The answer is the unsignaled items before it, oldest first: they are done, successfully,
        and will have no completion of their own. Raises InternalError, and changes nothing, if
        the item is not in the queue or a signaled one before it has had no completion: then
        completions were lost.
        """
        pending, flags = self._pending, self._signaled
        if pending and pending[0] is item:
            pending.popleft()
            flags.popleft()
            implied: Sequence[Item] = ()
        else:
            position = self._position(item)
            implied = [pending.popleft() for _ in range(position)]
            pending.popleft()
            for _ in range(position + 1):
                flags.popleft()
        self._unsignaled_run = min(self._unsignaled_run, len(pending))
        return implied

    def _position(self, item: Item) -> int:
        for position, (candidate, signaled) in enumerate(
            zip(self._pending, self._signaled, strict=True)
        ):
            if candidate is item:
                return position
            if signaled:
                raise InternalError(f"the completion of {item!r} overtook that of {candidate!r}")
        raise InternalError(f"a completion of {item!r}, which is not in the send queue")

    def clear(self) -> list[Item]:
        """The queue pair is gone: all that was outstanding, oldest first; the queue is empty."""
        left = list(self._pending)
        self._pending.clear()
        self._signaled.clear()
        self._unsignaled_run = 0
        return left
