"""Receives that change their size: when, and that no frame is longer than what it meets."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from .receive_sizes import OwnReceives, PeerReceives

SMALL, LARGE = 100, 1000


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
