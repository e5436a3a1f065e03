"""The account of a send queue: free entries, and that what is posted together ends together."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiordma._core.send_queue import SendQueue
from aiordma.errors import InternalError, LimitError


class Work:
    """What was posted together. Equal to every other: the queue must go by identity."""

    def __init__(self, number: int = 0, entries: int = 1) -> None:
        self.number = number
        self.entries = entries

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Work)

    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return f"Work {self.number}"


def test_a_completion_frees_all_that_was_posted_together() -> None:
    queue: SendQueue[Work] = SendQueue(8)
    one, many = Work(), Work(1)
    queue.post(one)
    queue.post(many, 5)
    assert (queue.free, len(queue), [item is one for item in queue]) == (2, 6, [True, False])
    queue.complete(one)
    assert queue.free == 3
    queue.complete(many)
    assert (queue.free, tuple(queue)) == (8, ())


def test_full() -> None:
    queue: SendQueue[Work] = SendQueue(4)
    queue.post(Work(), 2)
    for entries in (3, 0):
        with pytest.raises(LimitError, match="send queue is full: 2 of 4") as caught:
            queue.post(Work(), entries)
        assert (caught.value.amount, caught.value.limit) == (2 + entries, 4)
    assert len(queue) == 2
    queue.post(Work(), 2)
    assert queue.free == 0


def test_withdrawing() -> None:
    queue: SendQueue[Work] = SendQueue(8)
    kept = Work()
    queue.post(kept)
    queue.post(Work(1), 6)
    queue.withdraw()
    assert (queue.free, [item is kept for item in queue]) == (7, [True])
    queue.withdraw()
    with pytest.raises(InternalError, match="empty send queue"):
        queue.withdraw()


def test_lost_completions_are_noticed() -> None:
    queue: SendQueue[Work] = SendQueue(8)
    work = [Work(number) for number in range(3)]
    for item in work:
        queue.post(item)
    with pytest.raises(InternalError, match="Work 1 overtook that of Work 0"):
        queue.complete(work[1])
    for other in (queue, SendQueue[Work](1)):
        with pytest.raises(InternalError, match="Work 9, which is not in the send queue"):
            other.complete(Work(9))
    assert len(queue) == 3


def test_clear() -> None:
    queue: SendQueue[Work] = SendQueue(8)
    work = [Work(), Work()]
    queue.post(work[0])
    queue.post(work[1], 4)
    left = queue.clear()
    assert [item is other for item, other in zip(left, work, strict=True)] == [True, True]
    assert (queue.free, queue.clear()) == (8, [])
    queue.post(work[1])
    queue.complete(work[1])
    assert queue.free == 8


def test_sizes_out_of_bounds() -> None:
    with pytest.raises(ValueError, match="at least one entry, not 0"):
        SendQueue(0)


@settings(max_examples=200)
@given(
    st.integers(1, 9),
    st.lists(st.one_of(st.sampled_from(["complete", "withdraw"]), st.integers(1, 9)), max_size=60),
)
def test_against_a_device(capacity: int, run: list[str | int]) -> None:
    queue: SendQueue[Work] = SendQueue(capacity)
    posted: deque[Work] = deque()
    for number, step in enumerate(run):
        if isinstance(step, int):
            work = Work(number, step)
            if step <= queue.free:
                queue.post(work, step)
                posted.append(work)
        elif posted and step == "complete":
            queue.complete(posted.popleft())
        elif posted:
            posted.pop()
            queue.withdraw()
        assert [id(item) for item in queue] == [id(item) for item in posted]
        assert len(queue) == capacity - queue.free == sum(item.entries for item in posted)
