"""Tests of long messages over two rails: a sender's keys, and a receiver's READs.

The test acts as the peer. Each rail has its own protection domain.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from aiordma import verbs
from aiordma._core import protocol
from aiordma._core.frames import FrameKind
from aiordma._datapath.inbox import PendingRendezvous
from aiordma._datapath.session import Session
from aiordma._transport.keep_alive import Probe
from aiordma.verbs._memory.memory_region import reg_mr
from tests.model.frames import pack_keys, unpack_keys
from tests.transport.raw_peer import Piece, acknowledgement, control, read_request, rendezvous

from . import bare_channel
from .bare_channel import CAPABILITIES, RIGHTS, BareChannel, Room, Wire, frame

LONG = 1 << 20
PEER = Room(eager_size=4096, control_receives=8)
MOST = 128  # maximum number of pieces per message
OTHER = 3  # number of the second rail, whose predecessors are gone


def pattern(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


class Rails(NamedTuple):
    """A channel with two rails."""

    lead: Wire
    other: Wire
    bare: BareChannel

    @property
    def channel(self) -> Session:
        return self.bare.channel

    def until(self, done: Callable[[], object], *wires: Wire) -> None:
        """Handle completions on `wires`, by default both rails, until `done` returns true."""

        def step() -> object:
            for each in wires or (self.lead, self.other):
                each.until(lambda: True)
                each.drain()
            return done()

        self.lead.until(step)

    def frames(self) -> list[tuple[FrameKind, bytes]]:
        """Return all frames that the peer has received but the test has not fetched."""
        looks = iter([False, True])
        self.until(lambda: next(looks))
        return [(kind, content) for kind, _, content in self.lead.peer_has()]

    @property
    def kinds(self) -> list[FrameKind]:
        return [kind for kind, _ in self.frames()]


@pytest.fixture(params=[True, False], ids=["windows", "regions"])
def rails(
    context: verbs.Context, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Rails]:
    monkeypatch.setattr(bare_channel, "CAPABILITIES", CAPABILITIES._replace(max_send_wr=2 * MOST))
    lead = Wire(context)
    other = Wire(context, lead=lead)
    bare = BareChannel(lead, Room(eager_size=PEER.eager_size), PEER, rails=True)
    lead.pool.has_windows = other.pool.has_windows = lead.pool.has_windows and request.param
    other.queue.number = OTHER
    bare.channel.outbox.stripes.rail_up(other.queue)
    yield Rails(lead, other, bare)
    if not bare.channel.ended:  # the test may have closed it
        bare.close()
    other.close()
    lead.close()


# ---- sending -------------------------------------------------------------------------------------


def offered(rails: Rails, count: int = 1) -> tuple[int, list[Piece], list[tuple[int, int]]]:
    """Return the request ID and pieces of an offered message, and its keys for the second rail."""
    rails.until(lambda: len(rails.lead._arrived) > count)
    (kind, _, content), *told = rails.lead.peer_got(1 + count)
    assert kind is FrameKind.RNDV_RTS
    request_id, pieces = read_request(content)
    keys: list[tuple[int, int]] = []
    for kind, _, content in told:
        assert kind is FrameKind.RNDV_KEYS
        of, rail, first, some = unpack_keys(content)
        assert (of, rail, first) == (request_id, OTHER, len(keys))
        keys += some
    assert len(keys) == len(pieces)
    return request_id, pieces, keys


def peer_reads(wire: Wire, piece: Piece, key: tuple[int, int]) -> bytes | verbs.WCStatus:
    return wire.peer_reads(piece.address, min(4096, piece.length), key[0])


def test_message_is_readable_on_both_rails_until_acknowledged(rails: Rails) -> None:
    data = pattern(LONG)
    future = rails.bare.send(data)
    request_id, (piece,), (key,) = offered(rails)
    assert peer_reads(rails.lead, piece, (piece.rkey, 0)) == data[:4096]
    assert peer_reads(rails.other, piece, key) == data[:4096]
    assert key[1] == piece.flags
    rails.lead.peer_sends(acknowledgement(request_id))
    rails.until(future.done)
    future.result()
    assert rails.channel.drained().done()
    assert peer_reads(rails.other, piece, key) is verbs.WCStatus.REM_ACCESS_ERR
    assert peer_reads(rails.lead, piece, (piece.rkey, 0)) is verbs.WCStatus.REM_ACCESS_ERR


@pytest.mark.parametrize("rails", [True], ids=["windows"], indirect=True)
def test_memory_windows_are_reused_for_later_messages(rails: Rails) -> None:
    """Binding a window again changes only the lowest 8 bits of its key."""
    found = []
    for _ in range(3):
        future = rails.bare.send(pattern(LONG))
        request_id, _, (key,) = offered(rails)
        found.append(key[0] >> 8)
        rails.lead.peer_sends(acknowledgement(request_id))
        rails.until(future.done)
    assert rails.other.pool.has_windows
    assert len(set(found)) == 1


def test_small_message_is_sent_without_keys_for_other_rails(rails: Rails) -> None:
    future = rails.bare.send(bytes((512 << 10) - 1))
    ((kind, _, content),) = rails.lead.peer_got(1)
    assert kind is FrameKind.RNDV_RTS
    rails.lead.peer_sends(acknowledgement(read_request(content)[0]))
    assert future.done()
    assert not rails.kinds


def test_keys_are_split_to_fit_the_receive_size_of_the_peer(rails: Rails) -> None:
    """After the request, the peer's receives become shorter, and its credits arrive late."""
    many = [pattern(1 << 15)] * MOST
    for _ in range(PEER.control_receives - 2):
        rails.channel.controls.send(protocol.Ping(1))
    rails.lead.peer_got(PEER.control_receives - 2)
    rails.bare.send(many)
    ((kind, _, content),) = rails.lead.peer_got(1)
    request_id, pieces = read_request(content)
    assert (kind, len(pieces)) == (FrameKind.RNDV_RTS, MOST)
    rails.until(lambda: rails.other.queue.free == rails.other.queue.capacity)
    rails.lead.peer_sends(control(protocol.ReceiveSize(0, 7, protocol.MIN_RECEIVE)))
    assert not rails.kinds
    rails.lead.peer_sends(frame(FrameKind.CREDIT, control=5))
    keys: list[tuple[int, int]] = []
    for _ in range(2):
        ((kind, _, content),) = rails.lead.peer_got(1)
        assert kind is FrameKind.RNDV_KEYS
        assert len(content) + 8 <= protocol.MIN_RECEIVE
        of, rail, first, some = unpack_keys(content)
        assert (of, rail, first) == (request_id, OTHER, len(keys))
        keys += some
    assert len(keys) == MOST
    for piece, key in zip(pieces[::20], keys[::20], strict=True):
        assert peer_reads(rails.other, piece, key) == pattern(1 << 15)[:4096]


def test_keys_do_not_overtake_control_messages(rails: Rails) -> None:
    """The control message may announce the rail, which the peer does not know before."""

    def fill(count: int) -> None:
        for _ in range(count):
            rails.lead.queue.post(Probe(lambda: None))

    fill(rails.lead.queue.capacity)
    rails.bare.send(bytes(LONG))
    fill(rails.lead.queue.capacity)
    rails.channel.controls.send(protocol.Ping(1), rails.lead.loop.create_future())
    rails.until(lambda: len(rails.lead._arrived) == 3)
    assert rails.kinds == [FrameKind.RNDV_RTS, FrameKind.CONTROL, FrameKind.RNDV_KEYS]


def test_message_is_sent_when_registration_fails_on_the_second_rail(
    rails: Rails, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    def register(pd: verbs.ProtectionDomain, *args: Any, **named: Any) -> Any:
        if pd is rails.other.pd:
            refused.append(pd)
            raise MemoryError
        return reg_mr(pd, *args, **named)

    rails.other.pool.local_dma_mr = 0
    monkeypatch.setattr("aiordma._datapath.keys.reg_mr", register)
    future = rails.bare.send(pattern(LONG))
    ((kind, _, content),) = rails.lead.peer_got(1)
    assert kind is FrameKind.RNDV_RTS
    assert len(refused) == 1
    assert not rails.kinds  # without keys for the second rail
    rails.lead.peer_sends(acknowledgement(read_request(content)[0]))
    future.result()


# ---- receiving -----------------------------------------------------------------------------------


class Offer:
    """A message of the peer, registered in both protection domains."""

    def __init__(self, rails: Rails, size: int, pieces: int = 1, request_id: int = 1) -> None:
        self.rails, self.request_id = rails, request_id
        self.data = pattern(size)
        memory = bytearray(self.data)
        self.lead, self.other = (
            each.pd.reg_mr(memory, RIGHTS) for each in (rails.lead, rails.other)
        )
        step = size // pieces
        ends = [*range(step, step * pieces, step), size]
        self.ranges = list(zip([0, *ends], ends, strict=False))

    def send(self) -> None:
        self.rails.lead.peer_sends(
            rendezvous(
                self.request_id,
                *(
                    Piece(self.lead.addr + start, end - start, self.lead.rkey)
                    for start, end in self.ranges
                ),
            )
        )

    def send_keys(self, first: int = 0, end: int | None = None, rail: int = OTHER) -> None:
        """Send the second rail's keys for the pieces `first` up to `end`, labeled as `rail`."""
        keys = [(self.other.rkey, 0)] * len(self.ranges[first:end])
        self.rails.lead.peer_sends(
            frame(FrameKind.RNDV_KEYS, pack_keys(self.request_id, rail, first, keys))
        )

    def close(self) -> None:
        self.lead.close()
        self.other.close()


@pytest.fixture
def offer(rails: Rails) -> Iterator[Callable[..., Offer]]:
    made: list[Offer] = []

    def make(*args: int, **named: int) -> Offer:
        made.append(Offer(rails, *args, **named))
        return made[-1]

    yield make
    for each in made:
        each.close()


def begun(wire: Wire) -> int:
    """Return the number of READs in flight on a rail."""
    return wire.queue.capacity - wire.queue.free


def receiving(rails: Rails) -> asyncio.Task[Any]:
    """Start receiving a message. Return the task."""
    call: Any = rails.bare.methods.recv()

    async def receive() -> object:
        return await call

    task = rails.lead.loop.create_task(receive())
    rails.lead.turn()
    return task


def ends(rails: Rails, task: asyncio.Task[Any]) -> Any:
    def turn() -> bool:
        rails.lead.turn()
        return task.done()

    rails.until(turn)
    rails.until(lambda: not begun(rails.lead) and not begun(rails.other))
    assert not rails.bare.owner.errors
    return task.result()


def check_received(rails: Rails, task: asyncio.Task[Any], data: bytes) -> None:
    """Check that the message arrives and is acknowledged."""
    with ends(rails, task) as message:
        assert bytes(message) == data
    assert rails.kinds.count(FrameKind.RNDV_ACK) == 1


def test_second_rail_reads_only_pieces_with_received_keys(
    rails: Rails, offer: Callable[..., Offer]
) -> None:
    """The lead reads the parts without a key."""
    it = offer(4 * LONG, 8)
    it.send()
    it.send_keys(0, 1)
    it.send_keys(1, 2)
    task = receiving(rails)
    assert begun(rails.other) == 1
    it.send_keys(2)
    assert begun(rails.other) == 2
    check_received(rails, task, it.data)


# ---- keys that cannot be ------------------------------------------------------------------------

KEY = (1, 0)
MALFORMED_KEYS = {
    "nothing": b"",
    "no keys": pack_keys(1, OTHER, 0, []),
    "cut short": pack_keys(1, OTHER, 0, [KEY])[:-1],
    "and more": pack_keys(1, OTHER, 0, [KEY]) + b"\0",
    "more than it has": pack_keys(1, OTHER, 0, [KEY, KEY, KEY])[:-8],
    "more than a message can have": pack_keys(1, OTHER, 0, [KEY] * 129),
    "so many that their size overflows": pack_keys(1, OTHER, 0, [])[:12] + b"\1\0\0\x20" + bytes(8),
    "stray bytes": pack_keys(1, OTHER, 0, [(1, 2)]),
    "of the lead": pack_keys(1, 0, 0, [KEY]),
    "more than pieces": pack_keys(1, OTHER, 0, [KEY] * 3),
    "from the second on": pack_keys(1, OTHER, 1, [KEY]),
}


@pytest.mark.parametrize("case", MALFORMED_KEYS)
def test_malformed_keys_frame_is_reported_as_an_error(
    rails: Rails, offer: Callable[..., Offer], case: str
) -> None:
    it = offer(LONG, 2)
    it.send()
    rails.lead.peer_sends(frame(FrameKind.RNDV_KEYS, MALFORMED_KEYS[case]))
    (error,) = rails.bare.owner.errors
    assert "keys" in str(error)


@pytest.mark.parametrize("again", [(0, 1), (0, 2), (1, 2)])
def test_keys_sent_twice_for_the_same_pieces_are_rejected(
    rails: Rails, offer: Callable[..., Offer], again: tuple[int, int]
) -> None:
    it = offer(LONG, 2)
    it.send()
    it.send_keys()
    it.send_keys(*again)
    (error,) = rails.bare.owner.errors
    assert "the keys of 2 pieces are known" in str(error)


def test_removing_a_rail_discards_its_keys(rails: Rails, offer: Callable[..., Offer]) -> None:
    gc.collect()
    it = offer(LONG)
    it.send()
    it.send_keys()
    (pending,) = (each for each in gc.get_objects() if isinstance(each, PendingRendezvous))
    (keys,) = (each for each in gc.get_referents(pending) if isinstance(each, dict))
    assert list(keys) == [OTHER]
    rails.channel.inbox.fetcher.rail_removed(rails.other.queue)
    assert not keys
    check_received(rails, receiving(rails), it.data)


def test_keys_are_ignored_for_completed_messages_and_broken_rails(
    rails: Rails, offer: Callable[..., Offer]
) -> None:
    """Keys may arrive after their message has been read, or after their rail has broken."""
    it = offer(LONG)
    it.send()
    it.send_keys(rail=OTHER - 1)
    check_received(rails, receiving(rails), it.data)
    assert not rails.other.queue.completions
    it.send_keys()
    assert not rails.bare.owner.errors
