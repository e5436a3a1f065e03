"""Credits and bundles of the compiled path, side by side with their models."""

from __future__ import annotations

from collections import deque
from copy import copy
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiordma._core.frames import HEADER_SIZE, MAX_BUNDLE, FrameKind
from aiordma._datapath.frames import Credits, count_bundled
from aiordma.errors import InternalError, ProtocolError
from tests.model import credits as model
from tests.model.frames import MESSAGES, unpack_bundle
from tests.model.test_frames import entries, packed_bundle

# Control frames in every second step: there are fewer of their credits.
kinds = st.sampled_from([*FrameKind, FrameKind.CONTROL, FrameKind.CREDIT])
returned = st.integers(0, 3)


@dataclass(frozen=True)
class Send:
    """A frame, if the rules allow it."""

    kind: FrameKind


@dataclass(frozen=True)
class Arrive:
    """A frame of the peer; unless `wild`, it gives back no more than it may."""

    kind: FrameKind
    control: int
    data: int
    wild: bool = False


@dataclass(frozen=True)
class Repost:
    data: int
    control: int


Step = Send | Arrive | Repost
# Each of them so many times: the limits are reached by repetition.
runs: st.SearchStrategy[list[tuple[Step, int]]] = st.lists(
    st.tuples(
        st.one_of(
            st.builds(Send, kinds),
            st.builds(Arrive, kinds, returned, returned),
            st.builds(Arrive, kinds, returned, returned, st.just(True)),
            st.builds(Repost, returned, st.just(0)),
            st.builds(Repost, st.just(0), returned),
        ),
        st.integers(1, 9),
    ),
    max_size=40,
)
SMALL = [(0, 0), (1, 0), (0, 1), (2, 1), (5, 0)]  # control and data credits
data_receives, control_receives = st.integers(1, 9), st.integers(4, 9)


def step_of_model(account: model.Credits, step: Step) -> object:
    if isinstance(step, Send):
        if step.kind in MESSAGES:
            return account.spend_data() if account.data_credits else None
        if step.kind is FrameKind.CREDIT:
            return account.spend_credit() if account.credit_frame_due else None
        return account.spend_control() if account.control_credits else None
    if isinstance(step, Arrive):
        account.received(step.kind, step.control, step.data)
    else:
        account.reposted_data(step.data)
        account.reposted_control(step.control)
    return None


def step_of_compiled(account: Credits, step: Step) -> object:
    if isinstance(step, Send):
        message, control, credit = account.may_send()
        allowed = message if step.kind in MESSAGES else control
        if step.kind is FrameKind.CREDIT:
            allowed = credit
        return account.sent(step.kind) if allowed else None
    if isinstance(step, Arrive):
        account.arrived(step.kind, step.control, step.data)
    else:
        account.posted(step.data, step.control)
    return None


def answer(call: object, *arguments: object) -> object:
    """The result, or the class and text of the error."""
    assert callable(call)
    try:
        return call(*arguments)
    except (InternalError, ProtocolError) as error:
        return type(error), str(error)


def tame(step: Step, account: model.Credits) -> Step | None:
    """The step as it may be taken now; None: not at all."""
    if isinstance(step, Repost):
        # The compiled class trusts its only caller in the number of control receives.
        return Repost(step.data, min(step.control, account._held_control))
    if isinstance(step, Arrive) and not step.wild:
        control = min(step.control, account._control_limit - account._control)
        data = min(step.data, account._data_limit - account._data)
        if step.kind in MESSAGES:
            full = account._held_data + account._owed_data >= account._data_receives
        else:
            full = account._held_control + account._owed_control >= account._control_receives
        if full or (step.kind is FrameKind.CREDIT and not control and not data):
            return None
        return Arrive(step.kind, control, data)
    return step


@settings(max_examples=500)
@given(data_receives, control_receives, data_receives, control_receives, runs)
def test_credits_are_kept_as_in_the_model(
    data: int, control: int, peer_data: int, peer_control: int, runs: list[tuple[Step, int]]
) -> None:
    compiled = Credits(data, control, peer_data, peer_control)
    expected = model.Credits(
        data_receives=data,
        control_receives=control,
        peer_data_receives=peer_data,
        peer_control_receives=peer_control,
    )
    for step in (step for step, times in runs for _ in range(times)):
        run = tame(step, expected)
        if run is None:
            continue
        answers = answer(step_of_compiled, compiled, run), answer(step_of_model, expected, run)
        assert answers[0] == answers[1], run
        if isinstance(answers[1], tuple) and answers[1][0] is ProtocolError:
            return  # it ends the connection
        assert repr(compiled) == repr(expected), run
        assert compiled.may_send() == (
            expected.data_credits > 0,
            expected.control_credits > 0,
            expected.credit_frame_due,
        )


def test_every_reachable_state_is_that_of_the_model() -> None:
    """Of the smallest sizes: each step from each state, by way of the shortest path to it."""
    sizes = {"data_receives": 1, "control_receives": 4}
    sizes |= {f"peer_{name}": size for name, size in sizes.items()}
    every: list[Step] = [
        *(Send(kind) for kind in FrameKind),
        *(Arrive(kind, control, data) for kind in FrameKind for control, data in SMALL),
        Repost(1, 0),
        Repost(0, 1),
    ]
    start = model.Credits(**sizes)
    seen = {repr(start)}
    todo: deque[tuple[model.Credits, tuple[Step, ...]]] = deque([(start, ())])
    while todo:
        before, path = todo.popleft()
        for step in every:
            expected, compiled = copy(before), Credits(*sizes.values())
            if isinstance(step, Repost) and step.control > before._held_control:
                continue
            for earlier in path:
                step_of_compiled(compiled, earlier)
            found = answer(step_of_model, expected, step)
            assert answer(step_of_compiled, compiled, step) == found, (path, step)
            if isinstance(found, tuple) and found[0] is ProtocolError:
                continue
            assert repr(compiled) == repr(expected), (path, step)
            if repr(expected) not in seen:
                seen.add(repr(expected))
                todo.append((expected, (*path, step)))
    assert len(seen) > 200


@pytest.mark.parametrize("kind", FrameKind)
def test_the_largest_sizes(kind: FrameKind) -> None:
    """All that may be owed goes into one header."""
    account = Credits(65535, 255, 65535, 255)
    for _ in range(65535):
        account.arrived(FrameKind.DATA, 0, 0)
    for _ in range(255):
        account.arrived(FrameKind.CONTROL, 0, 0)
    account.posted(65535, 255)
    assert account.sent(kind) == (255, 65535)
    assert account.sent(kind) == (0, 0)


def counted(content: bytes | bytearray) -> int:
    """The messages of a bundle as the model reads it."""
    return len(list(unpack_bundle(memoryview(content))))


@settings(max_examples=500)
@given(entries, st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3))
def test_a_bundle_is_checked_as_in_the_model(
    messages: list[tuple[bytes, int | None]], changes: list[tuple[int, int]]
) -> None:
    content = bytearray(HEADER_SIZE) + packed_bundle(*messages)
    assert count_bundled(content) == counted(content) == len(messages)
    for place, value in changes:
        if place < len(content) - HEADER_SIZE:
            content[HEADER_SIZE + place] = value
    assert answer(count_bundled, content) == answer(counted, content)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_bundle_as_in_the_model(data: bytes) -> None:
    content = bytes(HEADER_SIZE) + data
    assert answer(count_bundled, content) == answer(counted, content)


@pytest.mark.parametrize("behind", [b"", bytes(4), bytes(8), bytes(16)])
def test_a_bundle_of_too_many(behind: bytes) -> None:
    content = bytes(HEADER_SIZE) + packed_bundle(*[(b"", None)] * MAX_BUNDLE) + behind
    assert answer(count_bundled, content) == answer(counted, content)
    assert (answer(count_bundled, content) == MAX_BUNDLE) == (not behind)
