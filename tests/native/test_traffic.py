"""The fast path of messages, against the pure modules for frames and credits."""

from __future__ import annotations

import ctypes
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._core import protocol
from aiordma._core.credits import Credits
from aiordma._core.frames import HEADER_SIZE, FrameKind, unpack_bundle, unpack_header
from aiordma._native import (
    Block,
    Counts,
    Frame,
    Inbox,
    Incoming,
    Message,
    Offers,
    Queue,
    Shelf,
    Table,
    Traffic,
)
from aiordma._transport.account import Account
from aiordma.errors import ProtocolError
from tests.core.test_frames import entries, packed_bundle
from tests.decoders import frame_header

SIZES = {"data_receives": 4, "control_receives": 4}
PEER = {"peer_data_receives": 3, "peer_control_receives": 5}


class Pool(Shelf):
    def __init__(self) -> None:
        self.returned = 0
        self.closed = True

    def _returned(self, block: Block) -> None:
        self.returned += 1


class Side(Traffic):
    """A connection without a peer: the test gives it frames."""

    def __init__(self) -> None:
        self.pool = self.shelf = Pool()
        self.queue = Queue()
        self.queue.table = Table()
        self.counts = Counts()
        self.message_type = Message
        self.waiting = deque()
        self.controls = ()
        self.inbox = Inbox()
        self.inbox.incoming = deque()
        self.inbox.receivers = deque()
        self.inbox.counts = self.counts
        self.inbox.refill = 1 << 30
        self.offers = Offers(1, 0, 0, 0)
        self.account = Account(**SIZES, **PEER)
        self.small_size = 1 << 16
        self.refused = False
        self.begin()
        self.takes = True

    def received(self, block: Block, length: int) -> None:
        self.refused = True
        block.release()

    def frame(self, content: bytes) -> None:
        memory = ctypes.create_string_buffer(content, max(len(content), 1))
        block = Block()
        block.pool = self.pool
        block.address = ctypes.addressof(memory)
        block.size = len(content)
        self.pool.lease_block(block)
        self.take_frame(block, len(content))
        self.messages = [(bytes(message), message.imm) for message in self.inbox.incoming]
        self.last = [message.last for message in self.inbox.incoming]
        self.inbox.incoming.clear()


def specified(content: bytes) -> tuple[list[tuple[bytes, int | None]], Credits]:
    """What a new connection makes of a frame; ProtocolError if that is nothing."""
    credits = Credits(**SIZES, **PEER)
    kind, control, data, imm = unpack_header(content)
    credits.received(kind, control, data)
    if kind is FrameKind.DATA:
        return [(content[HEADER_SIZE:], imm)], credits
    if kind is not FrameKind.BUNDLE:
        raise ProtocolError("not a frame with messages")
    found = list(unpack_bundle(memoryview(content)))
    return [(content[start : start + length], imm) for start, length, imm in found], credits


def bundle(*messages: tuple[bytes, int | None]) -> bytes:
    return frame_header(FrameKind.BUNDLE, 0, 0, None) + packed_bundle(*messages)


headers = st.builds(
    frame_header,
    st.sampled_from([FrameKind.DATA, FrameKind.BUNDLE, FrameKind.CONTROL, FrameKind.CREDIT]),
    st.integers(0, 2),
    st.integers(0, 2),
    st.none(),
)
frames = st.one_of(
    st.binary(max_size=64),
    st.builds(bytes.__add__, headers, st.binary(max_size=64)),
    entries.map(lambda several: bundle(*several[:6])),
)


@given(frames, st.integers(0, 400), st.integers(0, 255))
def test_frames_are_what_they_are_specified_to_be(frame: bytes, place: int, value: int) -> None:
    changed = bytearray(frame)
    if place < len(changed):
        changed[place] = value
    for content in (frame, bytes(changed)):
        side = Side()
        side.frame(content)
        try:
            messages, credits = specified(content)
        except ProtocolError:
            assert side.refused
            messages, credits = [], Credits(**SIZES, **PEER)
        assert side.messages == messages
        assert side.last == [False] * (len(messages) - 1) + [True] * bool(messages)
        assert repr(side.account).partition(" ")[2] == repr(credits).partition(" ")[2]
        assert side.pool.returned == 1  # when its last message has been released


def test_a_bundle_of_too_many() -> None:
    side = Side()
    side.frame(bundle(*[(b"", None)] * 128))
    assert len(side.messages) == 128
    side = Side()
    side.frame(bundle(*[(b"", None)] * 128) + bytes(8))
    assert side.refused


steps = st.lists(
    st.one_of(
        st.just(("spend",)),
        st.tuples(st.just("receive"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("receive credit"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("repost"), st.integers(1, 3)),
        st.just(("control",)),
        st.just(("credit",)),
    )
)


@given(steps)
def test_the_account_is_kept_in_the_same_way(steps: list[tuple[str, int, int]]) -> None:
    ours, theirs = Account(**SIZES, **PEER), Credits(**SIZES, **PEER)
    for step, *numbers in steps:
        if step == "spend":
            expected = theirs.spend_data() if theirs.data_credits else None
            assert ours.plainly_spend() == expected
        elif step == "receive":
            try:
                theirs.received(FrameKind.DATA, *numbers)
            except ProtocolError:
                assert not ours.plainly_receive(*numbers)
                return
            assert ours.plainly_receive(*numbers)
        elif step == "receive credit":
            try:
                theirs.received(FrameKind.CREDIT, *numbers)
            except ProtocolError:
                assert not ours.plainly_receive_credit(*numbers)
                return
            theirs.reposted_control()
            assert ours.plainly_receive_credit(*numbers)
        elif step == "repost":
            (count,) = numbers
            possible = count <= theirs._held_data
            assert ours.plainly_repost(count) == possible
            if possible:
                theirs.reposted_data(count)
        elif step == "control":
            for credits in (ours, theirs):
                credits.received(FrameKind.CONTROL)
                credits.reposted_control()
                if credits._owed_control > 2:
                    return
        else:
            due = theirs.credit_frame_due
            assert ours.plainly_spend_credit() == (theirs.spend_credit() if due else None)
        assert ours.plainly_due == theirs.credit_frame_due
        assert repr(ours).partition(" ")[2] == repr(theirs).partition(" ")[2]


class Counted(Side):
    """C passes the frames that it does not count by itself to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.small_size = 16
        self.told: list[int] = []

    def _count_used(self, posted: int, length: int) -> None:
        self.told.append(length)

    def come(self, *lengths: int) -> None:
        for length in lengths:
            self.account = Account(**SIZES, **PEER)
            self.frame(frame_header(FrameKind.DATA, 0, 0, None) + bytes(length - HEADER_SIZE))


def test_frames_are_counted_by_what_receives_would_do_for_them() -> None:
    side = Counted()
    side.come(8, 16, 17, 9)
    assert (side.used, side.fitted, side.told) == (3, 3, [17])
    side.grown = True
    side.come(16, 17)
    assert (side.used, side.fitted) == (5, 0)
    side.come(17, 9, 16)
    assert (side.used, side.fitted, side.told) == (8, 2, [17])
    side.watching = True
    side.come(8)
    assert (side.used, side.told) == (8, [17, 8])


U32 = st.integers(0, (1 << 32) - 1)
U64 = st.integers(0, (1 << 64) - 1)
OFFER = frame_header(FrameKind.OFFER, 0, 0, None)
RECEIVE, LONGEST = 200, 1 << 40


class NotReading(Inbox):
    """Notes what is offered."""

    def __init__(self) -> None:
        self.incoming = deque()
        self.receivers = deque()
        self.noted: list[protocol.Rendezvous] = []

    def _fetch_ahead(self) -> None:
        assert (self.noted, self.unstarted) == ([], 1)
        offer: Incoming = self.incoming.pop()
        facts = (offer.request_id, offer.address, offer.rkey, len(offer), offer.imm)
        self.noted.append(protocol.Rendezvous(*facts))


class Offered(Side):
    """Offers are given to it."""

    def __init__(self) -> None:
        super().__init__()
        self.large_size = RECEIVE
        self.longest = LONGEST
        self.inbox = self.reader = NotReading()


def offer_in(content: bytes) -> protocol.Message | None:
    try:
        return protocol.decode(content)
    except ProtocolError:
        return None


@given(
    st.builds(protocol.Rendezvous, U32, U64, U32, U64, st.none() | U32).filter(
        lambda offer: offer.address + offer.length <= 1 << 64
    ),
    st.integers(0, 50),
    st.integers(0, 255),
)
def test_offers_are_what_they_are_specified_to_be(
    offer: protocol.Rendezvous, place: int, value: int
) -> None:
    """Those of the common case; Python handles all others."""
    content = protocol.encode(offer)
    changed = bytearray(content)
    if place < len(changed):
        changed[place] = value
    for some in (content, bytes(changed), content[:place], content + bytes([value])):
        side = Offered()
        side.frame(OFFER + some)
        specified = side.reader.noted[0] if side.reader.noted else None
        assert side.refused == (specified is None)
        if specified is not None:
            assert specified == offer_in(some)
            assert RECEIVE - HEADER_SIZE < specified.length <= LONGEST
            assert (side.used, side.oversized, side.fitted) == (1, 1, 0)
            assert side.account.credit_frame_due is False
            assert side.account._held_data == 1
        assert side.pool.returned == 1
    side = Offered()
    side.frame(OFFER + content)
    assert side.refused != (RECEIVE - HEADER_SIZE < offer.length <= LONGEST)


def test_offers_that_receives_would_do_for_are_for_python() -> None:
    for change in ("watching", "takes"):
        side = Offered()
        setattr(side, change, change == "watching")
        side.frame(OFFER + protocol.encode(protocol.Rendezvous(1, 4096, 1, 1000, None)))
        assert side.refused
    side = Offered()
    for count in range(1, SIZES["data_receives"] + 2):
        side.inbox = NotReading()
        side.frame(OFFER + protocol.encode(protocol.Rendezvous(1, 4096, 1, 1000, None)))
        assert side.refused == (count > SIZES["data_receives"])


class NotPosting(Queue):
    """Notes the frames."""

    def __init__(self) -> None:
        self.failed = True
        self.frames: list[bytes] = []

    def post_frame(self, frame: Frame) -> None:
        self.frames.append(ctypes.string_at(frame.address, frame.length))


def leased(pool: Pool, size: int) -> tuple[Block, object]:
    memory = ctypes.create_string_buffer(size)
    block = Block()
    block.pool = pool
    block.address = ctypes.addressof(memory)
    block.size = size
    pool.lease_block(block)
    return block, memory


@given(U32, U64, U32, U64, st.none() | U32)
def test_an_offer_is_written_as_it_is_specified(
    request_id: int, address: int, rkey: int, length: int, imm: int | None
) -> None:
    offer = protocol.Rendezvous(request_id, min(address, (1 << 64) - length), rkey, length, imm)
    side = Side()
    side.queue = queue = NotPosting()
    block, _memory = leased(side.pool, 128)
    before = side.account.data_credits
    side.post_offer(block, *offer)
    assert queue.frames == [OFFER + protocol.encode(offer)]
    assert side.account.data_credits == before - 1
    assert side.sent == 1


def test_an_offer_needs_room_and_a_credit() -> None:
    side = Side()
    side.queue = queue = NotPosting()
    for size, credits in ((64, 1), (128, 0)):
        side.account._data = credits
        block, _memory = leased(side.pool, size)
        with pytest.raises(ValueError, match="a block and a credit"):
            side.post_offer(block, 1, 2, 3, 4, None)
        assert side.account.data_credits == credits
    assert not queue.frames
    assert not side.pool.returned


def test_an_answer_that_cannot_be_plain_is_for_python() -> None:
    assert Side().answer(1) is False
    with pytest.raises(TypeError):
        Side().answer("1")  # type: ignore[arg-type]


def test_it_does_not_begin_without_its_parts() -> None:
    with pytest.raises(TypeError, match="missing"):
        Traffic().begin()
