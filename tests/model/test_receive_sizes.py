"""Receives that change their size: when, and that no frame is longer than what it meets."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiordma.errors import ProtocolError

from .receive_sizes import GROW_AFTER, MAX_CHANGES, SHRINK_AFTER, OwnReceives, PeerReceives

SMALL, LARGE = 100, 1000


def test_they_grow_for_those_that_would_fit() -> None:
    own = OwnReceives(SMALL, LARGE)
    for length in (SMALL + 1, LARGE, 10, LARGE + 1, 500):
        own.arrived(length)
    assert own.wanted == SMALL
    own.arrived(500)
    assert own.wanted == LARGE
    own.change()
    assert own.size == own.wanted == LARGE


def test_they_do_not_grow_for_others() -> None:
    own = OwnReceives(SMALL, LARGE)
    for _ in range(100):
        own.arrived(LARGE + 1)
        own.arrived(SMALL)
    assert own.wanted == SMALL


def test_they_shrink_when_none_has_needed_it_for_long() -> None:
    own = OwnReceives(SMALL, LARGE)
    for _ in range(GROW_AFTER):
        own.arrived(LARGE)
    own.change()
    for _ in range(SHRINK_AFTER - 1):
        own.arrived(SMALL)
    own.arrived(SMALL + 1)
    assert own.wanted == LARGE
    for _ in range(SHRINK_AFTER):
        assert own.wanted == LARGE
        own.arrived(SMALL)
    assert own.wanted == SMALL


def test_what_could_not_be_done_is_not_tried_at_once_again() -> None:
    own = OwnReceives(SMALL, LARGE)
    for _ in range(GROW_AFTER):
        own.arrived(LARGE)
    own.stay()
    assert own.wanted == SMALL
    for _ in range(GROW_AFTER):
        own.arrived(LARGE)
    assert own.wanted == LARGE


def test_no_larger_size_than_the_first() -> None:
    own = OwnReceives(SMALL, 50)
    for length in (SMALL + 1, 75, 50, 200) * 10:
        own.arrived(length)
    assert own.wanted == SMALL


def test_a_change_counts_from_its_receive_on() -> None:
    peer = PeerReceives(SMALL, LARGE)
    peer.sent()
    peer.told(3, 500)
    peer.told(4, 5000)
    sizes = []
    for _ in range(4):
        sizes.append(peer.size)
        peer.sent()
    assert sizes == [SMALL, SMALL, 500, LARGE]


def test_a_change_of_the_next_one_counts_at_once() -> None:
    peer = PeerReceives(SMALL, LARGE)
    peer.sent()
    peer.told(1, 500)
    assert peer.size == 500


@pytest.mark.parametrize("first", [0, 1, 4])
def test_what_is_over_cannot_change(first: int) -> None:
    peer = PeerReceives(SMALL, LARGE)
    peer.sent()
    peer.sent()
    if first == 4:
        peer.told(5, LARGE)
    with pytest.raises(ProtocolError, match=f"of its receive {first}, which has been used"):
        peer.told(first, LARGE)


def test_no_endless_list_of_changes() -> None:
    peer = PeerReceives(SMALL, LARGE)
    for n in range(MAX_CHANGES):
        peer.told(10 + n, LARGE)
    with pytest.raises(ProtocolError, match="all the time"):
        peer.told(100, LARGE)


@settings(max_examples=300)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(["send", "take", "hear"]), st.integers(1, 1200))),
)
def test_no_frame_is_longer_than_its_receive(count: int, steps: list[tuple[str, int]]) -> None:
    """Whatever the order in which news of sizes, credits and frames arrive at either side."""
    own, peer = OwnReceives(SMALL, LARGE), PeerReceives(SMALL, 1 << 30)
    posted: deque[int] = deque()  # receives that nothing has arrived in
    news: deque[tuple[str, int, int]] = deque()  # on their way to the sender, in order
    credits, used = 0, 0

    def post() -> None:
        own.posted += 1
        posted.append(own.size)
        news.append(("credit", 0, 0))

    for _ in range(count):
        post()
    for step, length in steps:
        if step == "send" and credits:
            credits -= 1
            fits = length <= peer.size
            peer.sent()
            assert posted.popleft() >= (length if fits else 1)
            own.arrived(length)
            used += 1
        elif step == "take" and used:
            if own.wanted != own.size:
                news.append(("size", own.posted, own.wanted))
                own.change()
            used -= 1
            post()
        elif step == "hear" and news:
            kind, first, size = news.popleft()
            if kind == "credit":
                credits += 1
            else:
                peer.told(first, size)
