"""The sizes of receives, of this side and of the peer's, side by side with their models."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from aiordma import Message, verbs
from aiordma._core import protocol
from aiordma._core.frames import HEADER_SIZE, FrameKind
from aiordma.errors import ProtocolError
from tests.model.frames import MESSAGES
from tests.model.receive_sizes import GROW_AFTER, SHRINK_AFTER, OwnReceives, PeerReceives
from tests.transport.raw_peer import Piece, acknowledgement, read_request, rendezvous_request

from .bare_channel import OWN, BareChannel, Room, Wire, frame, wire

__all__ = ["wire"]

SMALL, LARGE = protocol.MIN_RECEIVE, 2 * protocol.MIN_RECEIVE
HERE = Room(data_receives=4, control_receives=4, eager_size=SMALL, max_eager_size=LARGE)
THERE = Room(control_receives=16)
SHARED = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class Peer:
    """Sends one frame after another, and no longer one than the receive that it will meet."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.bare = BareChannel(wire, HERE, THERE)
        self.receives = PeerReceives(SMALL, 1 << 30)
        self.expected = OwnReceives(SMALL, LARGE)
        self.expected.posted = HERE.data_receives + HERE.control_receives
        self.owed = 0
        self.told: list[protocol.ReceiveSize] = []

    def look(self) -> None:
        for kind, _, content in self.wire.peer_has():
            self.owed += kind not in MESSAGES
            if kind is FrameKind.CONTROL:
                message = protocol.decode(content)
                assert isinstance(message, protocol.ReceiveSize)
                self.told.append(message)
                self.receives.told(message.first, message.size)

    def exchange(self, length: int) -> None:
        """A message that makes a frame of so many bytes: sent, taken, and its receive reposted."""
        content = bytes(n % 251 for n in range(length - HEADER_SIZE))
        owed, self.owed = self.owed, 0
        if length <= self.receives.size:
            self.wire.peer_sends(frame(FrameKind.DATA, content, control=owed))
        else:
            self.wire.mr.buf[OWN + SMALL :][: len(content)] = content
            piece = Piece(self.wire.mr.addr + OWN + SMALL, len(content), self.wire.mr.rkey)
            request = rendezvous_request(1, piece)
            self.wire.peer_sends(frame(FrameKind.RNDV_RTS, request, control=owed))
        self.receives.sent()
        assert bytes(self.take()) == content
        self.look()

    def take(self) -> Message:
        operation = self.bare.methods.recv()
        try:
            waiter: Any = operation.send(None)
            self.wire.until(waiter.done)
            operation.send(None)
        except StopIteration as taken:
            message: Message = taken.value
            return message
        raise AssertionError


@SHARED
@given(
    runs=st.lists(
        st.tuples(
            st.sampled_from([HEADER_SIZE + 1, SMALL, SMALL + 1, LARGE, LARGE + 1])
            | st.integers(HEADER_SIZE + 1, LARGE + 100),
            st.sampled_from([1, GROW_AFTER - 1, GROW_AFTER, SHRINK_AFTER - 1, SHRINK_AFTER]),
        ),
        max_size=6,
    )
)
@example(runs=[(LARGE, GROW_AFTER), (SMALL, SHRINK_AFTER - 1), (LARGE, 1), (SMALL, SHRINK_AFTER)])
@example(runs=[(LARGE, GROW_AFTER - 1), (SMALL, SHRINK_AFTER), (LARGE + 1, 9), (LARGE, 1)])
def test_this_sides_receives_change_as_in_the_model(
    context: verbs.Context, runs: list[tuple[int, int]]
) -> None:
    with closing(Wire(context)) as wire:
        this_side(Peer(wire), runs)


def this_side(peer: Peer, runs: list[tuple[int, int]]) -> None:
    expected = peer.expected
    for length in (length for length, times in runs for _ in range(times)):
        peer.exchange(length)
        expected.arrived(length)
        news = []
        if expected.wanted != expected.size:
            news.append(protocol.ReceiveSize(0, expected.posted, expected.wanted))
            expected.change()
        assert peer.told == news
        peer.told.clear()
        expected.posted += 1
        assert peer.bare.channel.figures()["receive_size"] == expected.size
    assert not peer.bare.errors
    peer.bare.close()


FIRST, MOST = 1500, 2500
steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(1, 3000), st.just(0)),
        st.tuples(
            st.just("tell"),
            st.integers(-1, 4) | st.just(40),
            st.integers(protocol.MIN_RECEIVE, 4000),
        ),
    ),
    max_size=60,
)


@SHARED
@given(steps=steps)
@example(steps=[("tell", 40, 2000)] * 10)
@example(steps=[("tell", 0, MOST + 1000), ("send", MOST, 0), ("send", MOST - HEADER_SIZE, 0)])
def test_the_peers_receives_change_as_in_the_model(
    context: verbs.Context, steps: list[tuple[str, int, int]]
) -> None:
    """What fits the next of them is sent in a frame; news that cannot be ends the connection."""
    with closing(Wire(context)) as wire:
        peers_side(wire, steps)


def peers_side(wire: Wire, steps: list[tuple[str, int, int]]) -> None:
    bare = BareChannel(wire, Room(eager_size=SMALL, max_eager_size=MOST), Room(eager_size=FIRST))
    expected = PeerReceives(FIRST, MOST)
    frames = data = control = 0  # frames sent, and credits owed to this side

    def answer(kind: FrameKind, content: bytes) -> None:
        nonlocal data, control
        wire.peer_sends(frame(kind, content, control=control, data=data))
        data = control = 0

    def look() -> list[tuple[FrameKind, bytes]]:
        nonlocal frames, data, control
        found = [(kind, content) for kind, _, content in wire.peer_has()]
        for kind, _ in found:
            expected.sent()
            frames += 1
            data += kind in MESSAGES
            control += kind not in MESSAGES
        return found

    for step, number, size in steps:
        if step == "send":
            fits = HEADER_SIZE + number <= expected.size
            future = bare.send(bytes(number))
            ((kind, content), *_) = look()
            assert kind is (FrameKind.DATA if fits else FrameKind.RNDV_RTS)
            if not fits:
                request_id, _ = read_request(content)
                answer(FrameKind.RNDV_ACK, acknowledgement(request_id)[HEADER_SIZE:])
            assert future.done()
        else:
            first = max(0, frames + number)
            error = None
            try:
                expected.told(first, size)
            except ProtocolError as raised:
                error = str(raised)
            news = protocol.ReceiveSize(0, first, size)
            answer(FrameKind.CONTROL, protocol.encode(news))
            assert list(map(str, bare.errors)) == ([] if error is None else [error])
            if error is not None:
                break
        look()
    bare.close()
