"""Long messages that are offered by C alone, over a real queue pair."""

from __future__ import annotations

import array
import ctypes
import errno
import gc
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias

import numpy as np
import pytest

from aiordma import verbs
from aiordma._core import protocol
from aiordma._core.frames import FrameKind, unpack_header
from aiordma._native import (
    Block,
    Message,
    Offers,
    Outgoing,
    Promise,
    embedded,
    ffi,
)
from aiordma._native.handles import Waiter
from aiordma._transport.account import Account
from tests.conftest import ConnectedPair, End
from tests.decoders import frame_header

from .test_traffic import Side

UNTYPED: Any = ffi  # the stub knows only what the package does with it
SLOT = 256  # bytes of a frame, here and there
DEPTH = 16
SIZE = 5000
KEY = 0x1234
REFUSED = int(protocol.ErrorCode.BUSY)

kept: list[object] = []

Data: TypeAlias = bytes | bytearray | memoryview | Message


def address(pointer: object) -> int:
    return int(UNTYPED.cast("uintptr_t", pointer))


class Library:
    """Two calls of a library, of which each is noted."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, int, int, int]] = []
        """Domain, address, length, rights."""
        self.closed: list[int] = []
        """How many bytes each had."""
        self.full = False
        self.code = self.errno = 0
        """That deregistering returns, and leaves."""
        self.at_end: Callable[[], object] = lambda: None
        self._regions: dict[int, Any] = {}
        self._register = UNTYPED.callback(
            "void *(void *, void *, size_t, int)", self.register, onerror=self.failed
        )
        self._deregister = UNTYPED.callback("int(void *)", self.deregister, onerror=self.failed)
        self.errors: list[object] = []
        self.addresses = address(self._register), address(self._deregister)
        kept.append(self)  # as a library is

    def failed(self, _: object, error: object, __: object) -> None:
        self.errors.append(error)

    def region(self, length: int) -> int:
        mr = UNTYPED.new("struct ibv_mr *", {"length": length, "rkey": KEY})
        self._regions[address(mr)] = mr
        return address(mr)

    def register(self, domain: object, memory: object, length: int, rights: int) -> object:
        if self.full:
            return ffi.NULL
        self.opened.append((address(domain), address(memory), length, rights))
        return UNTYPED.cast("void *", self.region(length))

    def deregister(self, mr: object) -> int:
        self.closed.append(self._regions[address(mr)].length)
        self.at_end()
        ffi.errno = self.errno
        return self.code


class OffersOf(Offers):
    def _not_closed(self, code: int) -> NoReturn:
        raise OSError(code, "deregistering")


class Sender(Side):
    """One side, which posts to a queue pair.  `peer` is the other end of that."""

    def __init__(self, ends: tuple[End, End], offers: Offers) -> None:
        end, self.peer = ends
        super().__init__()
        self.offers = offers
        self.queue.address, self.queue.extended_address = end.qp.addresses
        self.queue.capacity = self.queue.free = end.qp.capabilities.max_send_wr
        self.account = Account(
            data_receives=DEPTH,
            control_receives=DEPTH,
            peer_data_receives=DEPTH,
            peer_control_receives=DEPTH,
        )
        self.peer_size = 100
        self.receive_size = 8
        self.patience = 1 << 30
        self.answers: list[tuple[int, int]] = []
        """Those that are for Python."""
        self._memory = end.mr
        self.blocks: list[Block] = []
        """For frames, used once."""
        for n in range(DEPTH):
            self.peer.qp.post_recv_one(n, self.peer.mr.addr + n * SLOT, SLOT, self.peer.mr.lkey)

    def _make_block(self, size: int) -> Block:
        assert size <= SLOT
        block = Block()
        block.pool = self.pool
        block.address = self._memory.addr + len(self.blocks) * SLOT
        block.lkey = self._memory.lkey
        block.size = SLOT
        self.pool.lease_block(block)
        self.blocks.append(block)
        return block

    def _send_first(self) -> bool:
        return False

    def _answered(self, request_id: int, status: int) -> None:
        self.answers.append((request_id, status))

    def _send_credits(self) -> None:
        pass

    def withdraw(self, waiter: Waiter) -> None:
        pass

    def promise(self) -> Promise:
        return Promise(self.queue.table)

    def send(self, data: Data, imm: int | None = None) -> Promise:
        promise = self.promise()
        assert self.send_plainly(data, imm, promise)
        return promise

    def refuses(self, data: Data) -> bool:
        """Whether it is for Python, and nothing has happened."""
        before = self.account.data_credits, len(self.offers), self.queue.free
        return not self.send_plainly(data, None, self.promise()) and before == (
            self.account.data_credits,
            len(self.offers),
            self.queue.free,
        )

    def peer_answers(self, request_id: int, status: int = 0) -> None:
        answer = protocol.RendezvousDone(request_id, status)
        self.frame(frame_header(FrameKind.CONTROL, 0, 0, None) + protocol.encode(answer))

    def arrived(self, count: int) -> list[protocol.Rendezvous | bytes]:
        """What the peer got: offers, and messages."""
        found: list[protocol.Rendezvous | bytes] = []
        for wc in self.peer.completions(count):
            data = self.peer.mr.buf[wc.wr_id * SLOT :][: wc.byte_len].tobytes()
            kind, _, _, _ = unpack_header(data)
            if kind is FrameKind.OFFER:
                offer = protocol.decode(data[8:])
                assert isinstance(offer, protocol.Rendezvous)
                found.append(offer)
            else:
                assert kind is FrameKind.DATA
                found.append(data[8:])
        return found

    def read(self, offer: protocol.Rendezvous) -> verbs.WCStatus:
        """The peer reads it, into the end of its memory."""
        start = self.peer.mr.addr + self.peer.mr.length - offer.length
        self.peer.qp.post_send_one(
            99,
            verbs.WROpcode.RDMA_READ,
            verbs.SendFlags.SIGNALED,
            start,
            offer.length,
            self.peer.mr.lkey,
            offer.address,
            offer.rkey,
        )
        return self.peer.completion().status


@pytest.fixture
def context() -> Iterator[verbs.Context]:
    """The only device that C registers for."""
    with verbs.find_device("embedded0").open() as context:
        yield context


@pytest.fixture
def library() -> Iterator[Library]:
    library = Library()
    yield library
    assert not library.errors


@pytest.fixture
def offers(library: Library) -> Offers:
    return OffersOf(3, 0xABC000, *library.addresses)


@pytest.fixture
def side(connected_pair: ConnectedPair, offers: Offers) -> Iterator[Sender]:
    side = Sender(connected_pair(), offers)
    yield side
    end(side)


def end(side: Sender) -> None:
    side.offers.close()
    for work in side.queue.clear_slots():
        work.release()


def pattern(size: int = SIZE) -> bytes:
    return bytes(n % 251 for n in range(size))


def is_pinned(memory: bytearray) -> bool:
    try:
        memory.append(0)
    except BufferError:
        return True
    memory.pop()
    return False


def message(side: Sender, size: int = SIZE) -> Message:
    memory = ctypes.create_string_buffer(pattern(size), size)
    block = Block()
    block.pool = side.pool
    block.address = ctypes.addressof(memory)
    block.size = size
    side.pool.lease_block(block)
    kept.append(memory)
    return Message(block, 0, size, None)


# ---- what is plain -------------------------------------------------------------------------------


PLAIN: dict[str, Callable[[Sender], Data]] = {
    "bytes": lambda _: pattern(),
    "bytearray": lambda _: bytearray(pattern()),
    "part of bytes": lambda _: memoryview(pattern(SIZE + 10))[:SIZE],
    "view of a bytearray": lambda _: memoryview(bytearray(pattern())),
    "read-only view": lambda _: memoryview(bytearray(pattern())).toreadonly(),
    "view of an array": lambda _: memoryview(array.array("B", pattern())),
    "message": message,
    "view of a message": lambda side: message(side).export(),
}


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("imm", [None, 0, 0xFFFFFFFF])
def test_the_peer_reads_it_until_it_has_answered(
    connected_pair: ConnectedPair, pd: verbs.ProtectionDomain, kind: str, imm: int | None
) -> None:
    offers = Offers(3, address(pd.pointer), *embedded().addresses)
    side = Sender(connected_pair(), offers)
    promise = side.send(PLAIN[kind](side), imm)
    (offer,) = side.arrived(1)
    assert isinstance(offer, protocol.Rendezvous)
    assert (offer.request_id, offer.length, offer.imm) == (1, SIZE, imm)
    gc.collect()
    assert side.read(offer) is verbs.WCStatus.SUCCESS
    assert side.peer.mr.buf[-SIZE:] == pattern()
    assert not promise.done()
    assert side.account.data_credits == DEPTH - 1
    side.peer_answers(1)
    assert promise.done()
    promise.result()
    assert not len(offers)
    assert (side.counts.messages_sent, side.counts.bytes_sent) == (1, SIZE)
    assert not side.answers
    assert side.read(offer) is verbs.WCStatus.REM_ACCESS_ERR
    end(side)


def test_it_is_registered_for_reading_alone(side: Sender, library: Library) -> None:
    data = bytearray(SIZE)
    side.send(data)
    where = verbs.address_of(data)
    assert library.opened == [(0xABC000, where, SIZE, int(verbs.AccessFlags.REMOTE_READ))]
    (offer,) = side.arrived(1)
    assert offer == protocol.Rendezvous(1, where, KEY, SIZE, None)


def file_in_memory() -> memoryview:
    return memoryview(mmap.mmap(-1, SIZE))


NOT_PLAIN: dict[str, Callable[[], Any]] = {
    "a mapping, which may have holes": file_in_memory,
    "memory of another library": lambda: np.zeros(SIZE, np.uint8).data,
    "a kind of bytes": lambda: type("Bytes", (bytes,), {})(SIZE),
    "a kind of bytearray": lambda: memoryview(type("Bytes", (bytearray,), {})(SIZE)),
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_other_memory_is_for_python(side: Sender, library: Library, kind: str) -> None:
    assert side.refuses(NOT_PLAIN[kind]())
    assert not library.opened


def test_what_cannot_be_registered_is_for_python(side: Sender, library: Library) -> None:
    data = bytearray(SIZE)
    library.full = True
    assert side.refuses(data)
    assert not is_pinned(data)
    assert side.pool.returned == 1
    references = sys.getrefcount(side.blocks[0])
    assert references == 1 + 1  # the list, and the call
    library.full = False
    side.send(data)


def test_where_pages_are_pinned_it_is_for_python(
    connected_pair: ConnectedPair, library: Library
) -> None:
    offers = Offers(3, 0xABC000, 0, library.addresses[1])
    side = Sender(connected_pair(), offers)
    assert side.refuses(bytes(SIZE))
    end(side)


def test_after_the_end_nothing_is_opened(side: Sender, library: Library) -> None:
    side.offers.close()
    assert side.refuses(bytes(SIZE))
    assert not library.opened


def test_nothing_is_no_offer(side: Sender, library: Library) -> None:
    side.peer_size = 4
    assert side.refuses(b"")
    assert not library.opened


# ---- in turn -------------------------------------------------------------------------------------


def test_the_peer_has_no_more_to_answer_than_it_may_have(side: Sender) -> None:
    for _ in range(3):
        assert not side.offers.full
        side.send(bytes(SIZE))
    assert side.offers.full
    assert side.refuses(bytes(SIZE))
    assert side.refuses(b"short")
    side.peer_answers(2)
    assert not side.offers.full
    side.send(bytes(SIZE))


def test_it_goes_at_once_but_overtakes_none(side: Sender) -> None:
    """It shares no frame, so it need not wait for others; but for those that do."""
    side.queue.table.loop = Collecting()
    first, second = b"first", b"second"
    long = pattern()
    for data in (first, long, second, long):
        side.send(data)
    assert side.under_way == 2
    assert [waiting.length for waiting in side.waiting] == [6, SIZE]
    offer, other = (side.arrived(2)[1], None)
    assert isinstance(offer, protocol.Rendezvous)
    side.collect()
    assert not side.waiting
    sent, other = side.arrived(2)
    assert sent == second
    assert isinstance(other, protocol.Rendezvous)
    assert (offer.request_id, other.request_id) == (1, 2)
    assert side.under_way == 4


class Collecting:
    """A loop that is never in its next turn."""

    def call_soon(self, *_: object) -> None:
        pass


def test_who_has_given_up_is_not_offered(side: Sender, library: Library) -> None:
    data = bytearray(SIZE)
    gone, there = side.promise(), side.promise()
    for promise in (gone, there):
        side.waiting.append(Outgoing(data, None, promise))
    gone.cancel()
    side.pump()
    assert not side.waiting
    assert len(library.opened) == len(side.offers) == 1
    assert side.offers.futures == [there]
    side.peer_answers(1)
    assert not is_pinned(data)


def test_what_is_not_plain_keeps_its_turn(side: Sender, library: Library) -> None:
    library.full = True
    for data in (bytes(SIZE), b"behind it"):
        side.waiting.append(Outgoing(data, None, side.promise()))
    side.pump()
    assert [waiting.length for waiting in side.waiting] == [SIZE, 9]
    assert len(side.waiting[0].view) == SIZE
    library.full = False
    side.pump()
    offer, sent = side.arrived(2)
    assert isinstance(offer, protocol.Rendezvous)
    assert sent == b"behind it"


def test_numbers_of_requests(side: Sender) -> None:
    assert [side.request_id() for _ in range(3)] == [1, 2, 3]
    side.send(bytes(SIZE))
    (offer,) = side.arrived(1)
    assert isinstance(offer, protocol.Rendezvous)
    assert offer.request_id == 4


# ---- answers -------------------------------------------------------------------------------------


def test_the_memory_is_held_until_the_answer(side: Sender, library: Library) -> None:
    data = bytearray(SIZE)
    promise = side.send(data)
    pinned = []
    library.at_end = lambda: pinned.append(is_pinned(data))
    assert is_pinned(data)
    side.peer_answers(1)
    assert pinned == [True]  # while it was deregistered
    assert library.closed == [SIZE]
    assert not is_pinned(data)
    promise.result()


def test_answers_in_any_order(side: Sender, library: Library) -> None:
    sizes = SIZE, SIZE + 1, SIZE + 2
    promises = [side.send(bytes(size)) for size in sizes]
    assert side.offers.futures == promises
    side.peer_answers(2)
    assert side.offers.futures == [promises[0], promises[2]]
    side.peer_answers(3)
    assert side.offers.futures == [promises[0]]
    promises.append(side.send(bytes(SIZE)))  # behind what was not the last
    assert side.offers.futures == [promises[0], promises[3]]
    side.peer_answers(1)
    side.peer_answers(4)
    assert not side.offers.futures
    assert library.closed == [sizes[1], sizes[2], sizes[0], SIZE]
    assert all(promise.done() for promise in promises)
    assert side.counts.bytes_sent == sum(sizes) + SIZE
    assert side.counts.messages_sent == 4


def test_what_is_wrong_with_an_answer_is_for_python(side: Sender, library: Library) -> None:
    data = bytearray(SIZE)
    promise = side.send(data)
    side.peer_answers(1, REFUSED)
    side.peer_answers(7)
    assert side.answers == [(1, REFUSED), (7, 0)]
    assert not promise.done()
    assert is_pinned(data)
    assert not library.closed
    assert not side.offer_over(7, None)
    error = ValueError("it would not")
    assert side.offer_over(1, error)
    assert promise.exception() is error
    assert not is_pinned(data)
    assert library.closed == [SIZE]
    assert not side.offer_over(1, error)
    assert side.counts.messages_sent == side.counts.bytes_sent == 0


def test_no_task_waits_for_the_answer(side: Sender) -> None:
    data = bytearray(SIZE)
    promise = side.send(data)
    promise.cancel()
    assert is_pinned(data)
    side.peer_answers(1)
    assert promise.cancelled()
    assert not is_pinned(data)
    assert side.counts.messages_sent == 1


def test_a_registration_that_does_not_end(side: Sender, library: Library) -> None:
    """The waiter is settled all the same."""
    data = bytearray(SIZE)
    promise = side.send(data)
    library.code = errno.EBUSY
    with pytest.raises(OSError, match="deregistering") as caught:
        side.peer_answers(1)
    assert caught.value.errno == errno.EBUSY
    promise.result()
    assert not is_pinned(data)
    assert not len(side.offers)


# ---- what Python opens ---------------------------------------------------------------------------


def test_it_holds_what_python_has_registered(side: Sender, library: Library) -> None:
    data = bytearray(SIZE)
    promise = side.promise()
    outgoing = Outgoing(memoryview(data), 7, promise)
    side.offers.hold(5, library.region(SIZE), outgoing)
    assert (outgoing.length, outgoing.imm, outgoing.future) == (SIZE, 7, promise)
    with pytest.raises(ValueError, match="has been offered"):
        outgoing.view  # noqa: B018
    with pytest.raises(ValueError, match="once"):
        side.offers.hold(6, library.region(SIZE), outgoing)
    del outgoing
    assert is_pinned(data)
    side.peer_answers(5)
    promise.result()
    assert library.closed == [SIZE]
    assert not is_pinned(data)


# ---- ends ----------------------------------------------------------------------------------------


def test_closing_lets_go_of_all(side: Sender, library: Library) -> None:
    several = [bytearray(SIZE + n) for n in range(3)]
    promises = [side.send(data) for data in several]
    library.code, library.errno = -1, errno.EBUSY  # as some providers have it
    with pytest.raises(OSError, match="deregistering") as caught:
        side.offers.close()
    assert caught.value.errno == errno.EBUSY
    assert library.closed == [len(data) for data in several]
    assert not any(map(is_pinned, several))
    assert not any(promise.done() for promise in promises)  # that is the caller's
    references = sys.getrefcount(promises[0])
    assert references == 1 + 1  # the list, and the call
    side.offers.close()


def test_a_cycle_is_found(connected_pair: ConnectedPair, library: Library) -> None:
    side = Sender(connected_pair(), OffersOf(3, 1, *library.addresses))
    data = bytearray(SIZE)
    promise = side.send(data)
    promise.target = side
    pinned = []
    library.at_end = lambda: pinned.append(is_pinned(data))
    for work in side.queue.clear_slots():
        work.release()
    del work
    gone = weakref.ref(side)
    del side, promise
    gc.collect()
    assert gone() is None
    assert pinned == [True]
    assert library.closed == [SIZE]
    assert not is_pinned(data)


def test_nothing_is_left_over(side: Sender, library: Library) -> None:
    data = bytearray(pattern())
    view = memoryview(data)
    promise = side.promise()
    error = ValueError()

    def counts() -> list[int]:
        return [sys.getrefcount(it) for it in (data, view, promise, error, side, side.offers)]

    before = counts()
    for source in (data, view):
        assert side.send_plainly(source, 5, promise)
        side.peer_answers(side.request_id() - 1)
        assert side.send_plainly(source, None, promise)
        assert side.offer_over(side.request_id() - 1, error)
        assert side.offers.futures == []
        side.offers.hold(77, library.region(1), Outgoing(source, None, promise))
        assert side.offer_over(77, None)
        library.full = True
        assert not side.send_plainly(source, None, promise)
        library.full = False
    del source
    # The frames, which the device still has, refer to the side: under way, and no more than that.
    expected = list(before)
    expected[4] += side.under_way
    assert counts() == expected
    assert not is_pinned_by_more_than(view, data)


def is_pinned_by_more_than(view: memoryview, memory: bytearray) -> bool:
    view.release()
    return is_pinned(memory)


def test_the_child_of_a_fork_leaves_it_alone(side: Sender, library: Library) -> None:
    data = bytearray(SIZE)
    side.send(data)
    child = os.fork()
    if not child:
        status = 1
        try:
            # A call would find the parent's device in this process, and crash.
            refused = side.refuses(bytes(SIZE))
            side.offers.close()
            status = 0 if refused and not library.closed and not is_pinned(data) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert is_pinned(data)
    side.offers.close()
    assert library.closed == [SIZE]
