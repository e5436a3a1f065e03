"""Tests of flow control: each rule, every reachable state of small sizes, and random runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiordma._core.frames import FrameKind
from aiordma._datapath.frames import Credits
from aiordma.errors import InternalError, ProtocolError
from tests.model.frames import MESSAGES

DATA, CONTROL, CREDIT = FrameKind.DATA, FrameKind.CONTROL, FrameKind.CREDIT


def same(data: int, control: int) -> Credits:
    return Credits(data, control, data, control)


def take(credits: Credits, kind: FrameKind) -> None:
    """Receive a frame of the given kind, handle it, and post its receive again."""
    credits.received(kind, 0, 0)
    credits.posted(*((1, 0) if kind is DATA else (0, 1)))


def credit_frame_due(credits: Credits) -> bool:
    return credits.may_send()[2]


# --- the rules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("receives", "threshold"), [(1, 1), (2, 1), (3, 1), (4, 2), (64, 32)])
def test_credit_frame_is_sent_after_half_the_data_credits(receives: int, threshold: int) -> None:
    credits = same(receives, 4)
    for taken in range(1, threshold + 1):
        assert not credit_frame_due(credits)
        take(credits, DATA)
        assert credit_frame_due(credits) == (taken == threshold)


def test_credit_frame_is_sent_after_two_control_credits() -> None:
    credits = same(4, 4)
    take(credits, CONTROL)
    assert not credit_frame_due(credits)
    take(credits, CONTROL)
    assert credit_frame_due(credits)
    assert credits.sent(CREDIT) == (2, 0)
    assert not credit_frame_due(credits)


def test_last_control_credit_is_reserved_for_returning_credits() -> None:
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
def test_frame_header_can_return_the_maximum_number_of_credits(kind: FrameKind) -> None:
    """One header can return all credits that may be owed."""
    account = Credits(65535, 255, 65535, 255)
    for _ in range(65535):
        account.received(DATA, 0, 0)
    for _ in range(255):
        account.received(CONTROL, 0, 0)
    account.posted(65535, 255)
    assert account.sent(kind) == (255, 65535)
    assert account.sent(kind) == (0, 0)


# --- a peer that does not keep to them -----------------------------------------------------------


@pytest.mark.parametrize("kind", FrameKind)
def test_frame_received_without_credit_raises_protocol_error(kind: FrameKind) -> None:
    credits, message, back = same(8, 4), kind in MESSAGES, int(kind is CREDIT)
    for _ in range(8):
        credits.sent(DATA)  # creates credits to return
    for n in range(8 if message else 4):
        credits.received(kind, 0, back)
        if n % 2:  # reposted, but not yet reported to the peer
            credits.posted(int(message), int(not message))
    with pytest.raises(ProtocolError, match=f"{kind.name} frame without a credit"):
        credits.received(kind, 0, back)


@pytest.mark.parametrize(("control", "data"), [(1, 0), (0, 1), (255, 0), (0, 65535), (3, 3)])
def test_returning_unused_credits_raises_protocol_error(control: int, data: int) -> None:
    with pytest.raises(ProtocolError, match="more than it has"):
        same(2, 4).received(DATA, control, data)
    used = same(2, 4)
    used.sent(DATA)
    used.sent(CONTROL)
    with pytest.raises(ProtocolError, match="more than it has"):
        used.received(DATA, control + 1, data + 1)


def test_empty_credit_frame_raises_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="returns no credits"):
        same(2, 4).received(CREDIT, 0, 0)


def test_reposting_unused_receives_raises_internal_error() -> None:
    with pytest.raises(InternalError, match="1 data receives were reposted, but only 0 were used"):
        same(2, 4).posted(1, 0)


# --- every reachable state -----------------------------------------------------------------------

Account = tuple[int, ...]
Frame = tuple[int, int, int]  # kind, control credits, data credits
State = tuple[Account, Account, tuple[Frame, ...], tuple[Frame, ...]]

HELD_DATA = 2  # index in an account


class Explorer:
    """Explores all states that two ends of equal size can reach.

    Frames may arrive out of order. This covers more than a reliable queue pair allows and needs
    fewer states. Control frames are handled on arrival, as the protocol requires.
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
                # From here on, CREDIT is the same as CONTROL. Merging them saves many states.
                yield self.credits.account(), (int(DATA if kind is DATA else CONTROL), *back)

    def arrival(self, account: Account, frame: Frame) -> Account:
        self.load(account).received(*frame)
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
        """Return whether both ends are idle. Fail if this is a deadlock.

        An idle end can always send control frames. It can send data frames unless its peer still
        holds some that it has received.
        """
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
def test_credit_exchange_has_no_reachable_deadlock(data: int, control: int) -> None:
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
