"""The account of a send queue: free entries, signaling, what one completion implies."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiordma._core.send_queue import SendQueue
from aiordma.errors import InternalError, LimitError


class Work:
    """One work request. Equal to every other: the queue must go by identity."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Work)

    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return f"Work {self.number}"


def test_signaled_work_frees_itself() -> None:
    queue: SendQueue[Work] = SendQueue(2)
    first, second = Work(), Work()
    assert queue.post(first)
    assert queue.post(second)
    assert (queue.free, len(queue), tuple(queue)) == (0, 2, (first, second))
    assert list(queue.complete(first)) == []
    assert queue.free == 1
    assert list(queue.complete(second)) == []
    assert queue.free == 2


def test_a_completion_ends_the_unsignaled_work_before_it() -> None:
    queue: SendQueue[Work] = SendQueue(16)
    work = [Work(number) for number in range(5)]
    assert [queue.post(item, signaled=item.number == 3) for item in work] == [
        False,
        False,
        False,
        True,
        False,
    ]
    assert (queue.free, queue.unsignaled_tail) == (11, 1)
    implied = queue.complete(work[3])
    assert [item.number for item in implied] == [0, 1, 2]
    assert (queue.free, queue.unsignaled_tail) == (15, 1)


def test_a_failed_unsignaled_work_request_has_a_completion() -> None:
    queue: SendQueue[Work] = SendQueue(16)
    work = [Work(number) for number in range(3)]
    for item in work:
        queue.post(item, signaled=False)
    assert [item.number for item in queue.complete(work[1])] == [0]
    assert queue.unsignaled_tail == 1
    assert list(queue.complete(work[2])) == []
    assert queue.unsignaled_tail == 0


def test_full() -> None:
    queue: SendQueue[Work] = SendQueue(1)
    assert queue.post(Work(), signaled=False)  # nothing else could ever free it
    with pytest.raises(LimitError, match="send queue is full") as caught:
        queue.post(Work())
    assert (caught.value.amount, caught.value.limit) == (2, 1)
    assert len(queue) == 1


def test_withdrawing() -> None:
    queue: SendQueue[Work] = SendQueue(8, interval=4)
    kept = Work()
    queue.post(kept)
    queue.post(Work(), signaled=False)
    queue.post(Work(), signaled=True)
    queue.post(Work(), signaled=False)
    queue.withdraw(2)
    assert (len(queue), queue.unsignaled_tail) == (2, 1)
    queue.withdraw()
    queue.withdraw(0)
    assert (tuple(queue), queue.unsignaled_tail) == ((kept,), 0)
    assert [queue.post(Work(), signaled=False) for _ in range(4)] == [False, False, False, True]
    for count in (6, -1):
        with pytest.raises(InternalError):
            queue.withdraw(count)
    assert len(queue) == 5


def test_lost_completions_are_noticed() -> None:
    queue: SendQueue[Work] = SendQueue(8)
    work = [Work(number) for number in range(3)]
    for item in work:
        queue.post(item)
    with pytest.raises(InternalError, match="Work 1 overtook that of Work 0"):
        queue.complete(work[1])
    with pytest.raises(InternalError, match="not in the send queue"):
        SendQueue[Work](1).complete(work[0])
    unsignaled: SendQueue[Work] = SendQueue(8)
    unsignaled.post(work[0], signaled=False)
    with pytest.raises(InternalError, match="not in the send queue"):
        unsignaled.complete(work[1])
    assert len(queue) == 3


def test_clear() -> None:
    queue: SendQueue[Work] = SendQueue(8)
    work = [Work(), Work()]
    queue.post(work[0])
    queue.post(work[1], signaled=False)
    left = queue.clear()
    assert [item is other for item, other in zip(left, work, strict=True)] == [True, True]
    assert (queue.free, queue.unsignaled_tail, queue.clear()) == (8, 0, [])
    assert not queue.post(work[0], signaled=False)
    assert queue.post(work[1])
    assert len(queue.complete(work[1])) == 1


def test_both_kinds_of_completion_round_after_round() -> None:
    queue: SendQueue[Work] = SendQueue(8)
    for number in range(20):
        alone, silent, loud = Work(number), Work(number), Work(number)
        queue.post(alone)
        queue.post(silent, signaled=False)
        queue.post(loud)
        assert list(queue.complete(alone)) == []
        assert [item is silent for item in queue.complete(loud)] == [True]
    assert queue.free == 8


def test_sizes_out_of_bounds() -> None:
    with pytest.raises(ValueError, match="at least one entry, not 0"):
        SendQueue(0)
    for interval in (0, 5):
        with pytest.raises(ValueError, match=f"interval {interval} is not within 1..4"):
            SendQueue(4, interval=interval)


class Device:
    """Does work in order; only signaled work makes a completion."""

    def __init__(self) -> None:
        self.posted: deque[tuple[Work, bool]] = deque()
        self.done_silently: list[Work] = []

    def next_completion(self) -> Work | None:
        while self.posted:
            work, signaled = self.posted.popleft()
            if signaled:
                return work
            self.done_silently.append(work)
        return None


@settings(max_examples=400)
@given(
    st.integers(1, 9).flatmap(
        lambda capacity: st.tuples(
            st.just(capacity), st.one_of(st.none(), st.integers(1, capacity))
        )
    ),
    st.lists(st.sampled_from(["signaled", "unsignaled", "complete", "withdraw"]), max_size=60),
)
def test_against_a_device(sizes: tuple[int, int | None], run: list[str]) -> None:
    queue: SendQueue[Work] = SendQueue(sizes[0], interval=sizes[1])
    device = Device()
    ended = posted = 0
    for step in run:
        if step == "complete":
            work = device.next_completion()
            if work is not None:
                implied = queue.complete(work)
                assert [id(item) for item in implied] == [id(x) for x in device.done_silently]
                device.done_silently.clear()
                ended += len(implied) + 1
        elif step == "withdraw":
            if device.posted:  # what the device has not begun may turn out not to be posted
                device.posted.pop()
                queue.withdraw()
                posted -= 1
        elif queue.free:
            work = Work(posted)
            signaled = queue.post(work, signaled=step == "signaled")
            assert signaled or step == "unsignaled"
            device.posted.append((work, signaled))
            posted += 1
        else:
            # The heart of it: a full queue has a completion under way.
            assert any(signaled for _, signaled in device.posted)
        assert len(queue) == posted - ended == sizes[0] - queue.free
        tail = 0
        for _, signaled in reversed(device.posted):
            if signaled:
                break
            tail += 1
        else:
            tail += len(device.done_silently)
        assert queue.unsignaled_tail == tail
