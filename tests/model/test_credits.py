"""Flow control: the rules one by one, every reachable state of small sizes, and random runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiordma._core.frames import FrameKind
from aiordma.errors import InternalError

from .credits import Credits

DATA, RNDV_RTS, CONTROL, CREDIT = (
    FrameKind.DATA,
    FrameKind.RNDV_RTS,
    FrameKind.CONTROL,
    FrameKind.CREDIT,
)


def same(data: int, control: int) -> Credits:
    return Credits(
        data_receives=data,
        control_receives=control,
        peer_data_receives=data,
        peer_control_receives=control,
    )


# --- the rules -----------------------------------------------------------------------------------


def test_a_write_with_immediate_gives_nothing_back() -> None:
    credits = same(2, 4)
    credits.received(DATA)
    credits.reposted_data()
    credits.spend_data_without_header()
    assert credits.spend_data() == (0, 1)


@pytest.mark.parametrize(("receives", "threshold"), [(1, 1), (2, 1), (3, 1), (4, 2), (64, 32)])
def test_credit_frame_is_due_for_half_the_data(receives: int, threshold: int) -> None:
    credits = same(receives, 4)
    for taken in range(1, threshold + 1):
        assert not credits.credit_frame_due
        credits.received(DATA)
        credits.reposted_data()
        assert credits.credit_frame_due == (taken == threshold)


def test_credit_frame_is_due_for_two_control_credits() -> None:
    credits = same(4, 4)
    credits.received(CONTROL)
    credits.reposted_control()
    assert not credits.credit_frame_due
    with pytest.raises(InternalError):
        credits.spend_credit()
    credits.received(CONTROL)
    credits.reposted_control()
    assert credits.credit_frame_due
    assert credits.spend_credit() == (2, 0)
    assert not credits.credit_frame_due


def test_the_last_control_credit_is_for_giving_control_credits_back() -> None:
    credits = same(2, 4)
    credits.spend_control()
    credits.spend_control()
    credits.received(DATA)
    credits.reposted_data()
    credits.spend_credit()  # the third of four
    credits.received(DATA)
    credits.reposted_data()
    assert not credits.credit_frame_due
    credits.received(CONTROL)
    credits.reposted_control()
    assert credits.credit_frame_due
    assert credits.spend_credit() == (1, 1)


# --- a peer that does not keep to them -----------------------------------------------------------


# --- this side's own mistakes --------------------------------------------------------------------


# --- every reachable state -----------------------------------------------------------------------

Account = tuple[int, ...]
Frame = tuple[int, int, int]  # kind, control credits, data credits
State = tuple[Account, Account, tuple[Frame, ...], tuple[Frame, ...]]

FIELDS = ("_data", "_control", "_held_data", "_owed_data", "_held_control", "_owed_control")


class Explorer:
    """All states that two ends of the same size can reach, whatever is sent, taken and delivered.

    A frame may be delivered before one that was sent earlier: that allows more than a reliable
    queue pair does, and needs fewer states. Control frames are dealt with as they arrive, as the
    rules say.
    """

    def __init__(self, data: int, control: int) -> None:
        self.credits = same(data, control)

    def load(self, account: Account) -> Credits:
        for name, value in zip(FIELDS, account, strict=True):
            setattr(self.credits, name, value)
        return self.credits

    def dump(self) -> Account:
        return tuple(getattr(self.credits, name) for name in FIELDS)

    def sends(self, account: Account) -> Iterator[tuple[Account, Frame]]:
        if self.load(account).data_credits:
            frame = (int(DATA), *self.credits.spend_data())
            yield self.dump(), frame
        if self.load(account).control_credits:
            frame = (int(CONTROL), *self.credits.spend_control())
            yield self.dump(), frame
        if self.load(account).credit_frame_due:
            back = self.credits.spend_credit()
            assert any(back), "a CREDIT frame that the peer would refuse"
            # From here on it is like any CONTROL frame: one kind less, far fewer states.
            yield self.dump(), (int(CONTROL), *back)

    def arrival(self, account: Account, frame: Frame) -> Account:
        kind = FrameKind(frame[0])
        self.load(account).received(kind, frame[1], frame[2])
        if kind is not DATA:
            self.credits.reposted_control()
        return self.dump()

    def successors(self, state: State) -> Iterator[State]:
        for left, right, to_left, to_right in (state, (state[1], state[0], state[3], state[2])):
            for account, frame in self.sends(left):
                yield account, right, to_left, tuple(sorted((*to_right, frame)))
            for frame in set(to_left):
                rest = list(to_left)
                rest.remove(frame)
                yield self.arrival(left, frame), right, tuple(rest), to_right
            if left[FIELDS.index("_held_data")]:
                self.load(left).reposted_data()
                yield self.dump(), right, to_left, to_right

    def check_rest(self, state: State) -> bool:
        """At rest (nothing under way, no CREDIT frame due) everything can still be sent."""
        left, right, to_left, to_right = state
        if to_left or to_right:
            return False
        if any(self.load(account).credit_frame_due for account in (left, right)):
            return False
        for account, peer in ((left, right), (right, left)):
            assert self.load(account).control_credits, state
            if not peer[FIELDS.index("_held_data")]:
                assert self.load(account).data_credits, state
        return True


@pytest.mark.parametrize(("data", "control"), [(1, 4), (1, 5), (2, 4)])
def test_no_reachable_state_is_stuck(data: int, control: int) -> None:
    explorer = Explorer(data, control)
    account = explorer.dump()
    start: State = (account, account, (), ())
    seen = {start}
    todo = [start]
    at_rest = 0
    while todo:
        state = todo.pop()
        at_rest += explorer.check_rest(state)
        for following in explorer.successors(state):  # raises if a receive is not posted
            mirrored = (following[1], following[0], following[3], following[2])
            one = min(following, mirrored)
            if one not in seen:
                seen.add(one)
                todo.append(one)
    assert at_rest > 1


# --- random runs ---------------------------------------------------------------------------------


class End:
    """One end with real receives, counted apart from the code under test."""

    def __init__(self, mine: tuple[int, int], peers: tuple[int, int]) -> None:
        self.credits = Credits(
            data_receives=mine[0],
            control_receives=mine[1],
            peer_data_receives=peers[0],
            peer_control_receives=peers[1],
        )
        self.size = mine
        self.posted = sum(mine)
        self.incoming: deque[tuple[FrameKind, int, int]] = deque()
        self.messages = 0
        self.unprocessed = 0
        self.credit_frames = 0

    def step(self, name: str, peer: End) -> bool:
        """Do one thing if it is possible; the answer is whether it was."""
        credits = self.credits
        if name == "data" and credits.data_credits:
            peer.incoming.append((DATA, *credits.spend_data()))
        elif name == "write" and credits.data_credits:
            credits.spend_data_without_header()
            peer.incoming.append((DATA, 0, 0))
        elif name == "control" and credits.control_credits:
            peer.incoming.append((CONTROL, *credits.spend_control()))
        elif name == "credit" and credits.credit_frame_due:
            peer.incoming.append((CREDIT, *credits.spend_credit()))
            self.credit_frames += 1
        elif name == "deliver" and self.incoming:
            kind, control, data = self.incoming.popleft()
            self.posted -= 1
            assert self.posted >= 0, "the peer sent more than this end had posted"
            credits.received(kind, control, data)
            if kind is DATA:
                self.messages += 1
            else:
                self.unprocessed += 1
        elif name == "take" and self.messages:
            self.messages -= 1
            self.posted += 1
            credits.reposted_data()
        elif name == "process" and self.unprocessed:
            self.unprocessed -= 1
            self.posted += 1
            credits.reposted_control()
        else:
            return False
        return True


def settle(ends: tuple[End, End], steps: tuple[str, ...]) -> None:
    """Let everything that is named happen until nothing more does; bounded: no ping-pong."""
    before = sum(end.credit_frames for end in ends)
    control_frames = sum(end.size[1] for end in ends)
    for_data = sum(end.size[0] // max(1, end.size[0] // 2) + 1 for end in ends)
    while any(end.step(name, peer) for name in steps for end, peer in (ends, ends[::-1])):
        frames = sum(end.credit_frames for end in ends) - before
        assert frames <= control_frames + 2 * for_data, "CREDIT frames answer CREDIT frames"


sizes = st.tuples(st.integers(1, 9), st.integers(4, 9))
STEPS = ("data", "write", "control", "credit", "deliver", "take", "process")
runs = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(STEPS), st.integers(1, 6)), max_size=80
)


@settings(max_examples=400)
@given(sizes, sizes, runs)
def test_random_runs_never_overrun_and_never_stop(
    left: tuple[int, int], right: tuple[int, int], run: list[tuple[int, str, int]]
) -> None:
    ends = End(left, right), End(right, left)
    for which, name, times in run:
        for _ in range(times):
            ends[which].step(name, ends[1 - which])
    settle(ends, ("deliver", "process", "credit"))
    for end in ends:  # no message has been taken since, and still:
        assert end.credits.control_credits
    settle(ends, ("take", "deliver", "process", "credit"))
    for end in ends:
        assert end.posted == sum(end.size)
        assert end.credits.control_credits
        assert end.credits.data_credits
    # Both fill each other up as far as it goes, and it all comes out at the other side.
    for name in ("control", "data"):
        for end, peer in (ends, ends[::-1]):
            while end.step(name, peer):
                pass
    settle(ends, ("take", "deliver", "process", "credit"))
    assert all(end.posted == sum(end.size) for end in ends)


def test_streaming_one_way_needs_few_credit_frames() -> None:
    sender, receiver = End((64, 8), (64, 8)), End((64, 8), (64, 8))
    sent = 0
    while sent < 6400:
        sent += sender.step("data", receiver)
        for end, peer in ((sender, receiver), (receiver, sender)):
            for name in ("deliver", "take", "process", "credit"):
                end.step(name, peer)
    assert receiver.credit_frames <= 6400 // 32 + 1
    assert sender.credit_frames == 0
