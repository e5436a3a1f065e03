"""Flow control: the rules one by one, every reachable state of small sizes, and random runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiordma._core.frames import FrameKind
from aiordma._datapath.frames import Credits
from aiordma.errors import InternalError, ProtocolError
from tests.model.frames import MESSAGES

DATA, CONTROL, CREDIT = FrameKind.DATA, FrameKind.CONTROL, FrameKind.CREDIT


def same(data: int, control: int) -> Credits:
    return Credits(data, control, data, control)


def take(credits: Credits, kind: FrameKind) -> None:
    """A frame of that kind arrives, is dealt with, and its receive is posted again."""
    credits.arrived(kind, 0, 0)
    credits.posted(*((1, 0) if kind is DATA else (0, 1)))


def credit_frame_due(credits: Credits) -> bool:
    return credits.may_send()[2]


# --- the rules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("receives", "threshold"), [(1, 1), (2, 1), (3, 1), (4, 2), (64, 32)])
def test_credit_frame_is_due_for_half_the_data(receives: int, threshold: int) -> None:
    credits = same(receives, 4)
    for taken in range(1, threshold + 1):
        assert not credit_frame_due(credits)
        take(credits, DATA)
        assert credit_frame_due(credits) == (taken == threshold)


def test_credit_frame_is_due_for_two_control_credits() -> None:
    credits = same(4, 4)
    take(credits, CONTROL)
    assert not credit_frame_due(credits)
    take(credits, CONTROL)
    assert credit_frame_due(credits)
    assert credits.sent(CREDIT) == (2, 0)
    assert not credit_frame_due(credits)


def test_the_last_control_credit_is_for_giving_control_credits_back() -> None:
    credits = same(2, 4)
    for _ in range(2):
        assert credits.may_send()[1]
        credits.sent(CONTROL)
    assert not credits.may_send()[1]
    take(credits, DATA)
    credits.sent(CREDIT)  # the third of four
    take(credits, DATA)
    assert not credit_frame_due(credits)
    take(credits, CONTROL)
    assert credit_frame_due(credits)
    assert credits.sent(CREDIT) == (1, 1)


@pytest.mark.parametrize("kind", FrameKind)
def test_the_largest_sizes(kind: FrameKind) -> None:
    """All that may be owed goes into one header."""
    account = Credits(65535, 255, 65535, 255)
    for _ in range(65535):
        account.arrived(DATA, 0, 0)
    for _ in range(255):
        account.arrived(CONTROL, 0, 0)
    account.posted(65535, 255)
    assert account.sent(kind) == (255, 65535)
    assert account.sent(kind) == (0, 0)


# --- a peer that does not keep to them -----------------------------------------------------------


@pytest.mark.parametrize("kind", FrameKind)
def test_a_peer_that_sends_without_a_credit(kind: FrameKind) -> None:
    credits, message, back = same(8, 4), kind in MESSAGES, int(kind is CREDIT)
    for _ in range(8):
        credits.sent(DATA)  # so that there are credits to give back
    for n in range(8 if message else 4):
        credits.arrived(kind, 0, back)
        if n % 2:  # posted again, which the peer has not been told
            credits.posted(int(message), int(not message))
    with pytest.raises(ProtocolError, match=f"{kind.name} frame without a credit"):
        credits.arrived(kind, 0, back)


@pytest.mark.parametrize(("control", "data"), [(1, 0), (0, 1), (255, 0), (0, 65535), (3, 3)])
def test_a_peer_that_gives_back_what_was_not_used(control: int, data: int) -> None:
    with pytest.raises(ProtocolError, match="that it has not"):
        same(2, 4).arrived(DATA, control, data)
    used = same(2, 4)
    used.sent(DATA)
    used.sent(CONTROL)
    with pytest.raises(ProtocolError, match="that it has not"):
        used.arrived(DATA, control + 1, data + 1)


def test_a_peer_that_sends_an_empty_credit_frame() -> None:
    with pytest.raises(ProtocolError, match="gives nothing back"):
        same(2, 4).arrived(CREDIT, 0, 0)


def test_no_more_receives_are_posted_again_than_were_used() -> None:
    with pytest.raises(InternalError, match="1 data receives posted again, 0 were used"):
        same(2, 4).posted(1, 0)


# --- every reachable state -----------------------------------------------------------------------

Account = tuple[int, ...]
Frame = tuple[int, int, int]  # kind, control credits, data credits
State = tuple[Account, Account, tuple[Frame, ...], tuple[Frame, ...]]

HELD_DATA = 2  # its place in an account


class Explorer:
    """All states that two ends of the same size can reach, whatever is sent, taken and delivered.

    A frame may be delivered before one that was sent earlier: that allows more than a reliable
    queue pair does, and needs fewer states. Control frames are dealt with as they arrive, as the
    rules say.
    """

    def __init__(self, data: int, control: int) -> None:
        self.credits = same(data, control)

    def load(self, account: Account) -> Credits:
        self.credits.load(account)
        return self.credits

    def sends(self, account: Account) -> Iterator[tuple[Account, Frame]]:
        for kind, may in zip((DATA, CONTROL, CREDIT), self.load(account).may_send(), strict=True):
            if may:
                back = self.load(account).sent(kind)
                assert kind is not CREDIT or any(back), "a CREDIT frame that the peer would refuse"
                # From here on it is like any CONTROL frame: one kind less, far fewer states.
                yield self.credits.account(), (int(DATA if kind is DATA else CONTROL), *back)

    def arrival(self, account: Account, frame: Frame) -> Account:
        self.load(account).arrived(*frame)
        if frame[0] != DATA:
            self.credits.posted(0, 1)
        return self.credits.account()

    def successors(self, state: State) -> Iterator[State]:
        for left, right, to_left, to_right in (state, (state[1], state[0], state[3], state[2])):
            for account, frame in self.sends(left):
                yield account, right, to_left, tuple(sorted((*to_right, frame)))
            for frame in set(to_left):
                rest = list(to_left)
                rest.remove(frame)
                yield self.arrival(left, frame), right, tuple(rest), to_right
            if left[HELD_DATA]:
                self.load(left).posted(1, 0)
                yield self.credits.account(), right, to_left, to_right

    def check_rest(self, state: State) -> bool:
        """At rest (nothing under way, no CREDIT frame due) everything can still be sent."""
        left, right, to_left, to_right = state
        if to_left or to_right:
            return False
        if any(credit_frame_due(self.load(account)) for account in (left, right)):
            return False
        for account, peer in ((left, right), (right, left)):
            message, control, _ = self.load(account).may_send()
            assert control, state
            assert message or peer[HELD_DATA], state
        return True


@pytest.mark.parametrize(("data", "control"), [(1, 4), (1, 5), (2, 4)])
def test_no_reachable_state_is_stuck(data: int, control: int) -> None:
    explorer = Explorer(data, control)
    account = explorer.credits.account()
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
        self.credits = Credits(*mine, *peers)
        self.size = mine
        self.posted = sum(mine)
        self.incoming: deque[tuple[FrameKind, int, int]] = deque()
        self.messages = 0
        self.unprocessed = 0
        self.credit_frames = 0

    def step(self, name: str, peer: End) -> bool:
        """Do one thing if it is possible; the answer is whether it was."""
        credits = self.credits
        message, control, credit = credits.may_send()
        if name == "data" and message:
            peer.incoming.append((DATA, *credits.sent(DATA)))
        elif name == "write" and message:  # with immediate data: it has no header
            data, *others = credits.account()
            credits.load((data - 1, *others))
            peer.incoming.append((DATA, 0, 0))
        elif name == "control" and control:
            peer.incoming.append((CONTROL, *credits.sent(CONTROL)))
        elif name == "credit" and credit:
            peer.incoming.append((CREDIT, *credits.sent(CREDIT)))
            self.credit_frames += 1
        elif name == "deliver" and self.incoming:
            frame = self.incoming.popleft()
            self.posted -= 1
            assert self.posted >= 0, "the peer sent more than this end had posted"
            credits.arrived(*frame)
            if frame[0] is DATA:
                self.messages += 1
            else:
                self.unprocessed += 1
        elif name == "take" and self.messages:
            self.messages -= 1
            self.posted += 1
            credits.posted(1, 0)
        elif name == "process" and self.unprocessed:
            self.unprocessed -= 1
            self.posted += 1
            credits.posted(0, 1)
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
        assert end.credits.may_send()[1]
    settle(ends, ("take", "deliver", "process", "credit"))
    for end in ends:
        assert end.posted == sum(end.size)
        assert end.credits.may_send()[:2] == (True, True)
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
