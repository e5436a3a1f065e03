"""Tests of messages that are too long for a frame.

The peer reads such a message from the sender's memory, and then acknowledges it.
"""

from __future__ import annotations

import array
import errno
import gc
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from aiordma import verbs
from aiordma._core.frames import FrameKind
from aiordma._native import ffi
from aiordma.errors import RDMAError
from tests.transport.raw_peer import Piece, acknowledgement, read_request

from .bare_channel import BareChannel, Room, Wire, wire

__all__ = ["wire"]

UNTYPED: Any = ffi  # the stub covers only the package's own use
SIZE = 5000
BUSY = 7
THERE = Room(eager_size=100)

kept: list[object] = []


@pytest.fixture
def context() -> Iterator[verbs.Context]:
    with verbs.find_device("embedded0").open() as context:
        yield context


class Library:
    """Wraps ibv_dereg_mr(3) of the device's library and records each call."""

    def __init__(self, real: int) -> None:
        self._real = UNTYPED.cast("int (*)(void *)", real)
        self.closed: list[int] = []
        """The size of each deregistered region in bytes."""
        self.code = self.errno = 0
        """The return value of ibv_dereg_mr() and the errno that it sets."""
        self.at_end: Callable[[], object] = lambda: None
        self.errors: list[object] = []
        self._deregister = UNTYPED.callback(
            "int(void *)", self.deregister, onerror=lambda *error: self.errors.append(error)
        )
        self.dereg_mr = int(UNTYPED.cast("uintptr_t", self._deregister))
        kept.append(self)  # libraries are never freed

    def deregister(self, mr: object) -> int:
        self.closed.append(UNTYPED.cast("struct ibv_mr *", mr).length)
        assert self._real(mr) == 0
        self.at_end()
        ffi.errno = self.errno
        return self.code


@pytest.fixture
def library(context: verbs.Context) -> Iterator[Library]:
    library = Library(context.library.dereg_mr)
    yield library
    assert not library.errors


@pytest.fixture
def bare(wire: Wire, library: Library) -> Iterator[BareChannel]:
    bare = BareChannel(wire, peer=THERE, dereg_mr=library.dereg_mr)
    yield bare
    bare.close()


def requests(wire: Wire, count: int) -> list[tuple[int, int | None, list[Piece]]]:
    """Return the peer's next rendezvous requests: request ID, immediate data and pieces."""
    found = []
    for kind, imm, content in wire.peer_got(count):
        assert kind is FrameKind.RNDV_RTS
        request_id, pieces = read_request(content)
        found.append((request_id, imm, pieces))
    return found


def read(wire: Wire, piece: Piece) -> bytes | verbs.WCStatus:
    return wire.peer_reads(piece.address, piece.length, piece.rkey)


def pattern(size: int = SIZE) -> bytes:
    return bytes(n % 251 for n in range(size))


def is_pinned(memory: bytearray) -> bool:
    try:
        memory.append(0)
    except BufferError:
        return True
    memory.pop()
    return False


def mapping(data: bytes) -> memoryview:
    memory = memoryview(mmap.mmap(-1, len(data)))
    memory[:] = data
    return memory


# ---- what the peer may do ------------------------------------------------------------------------

MEMORY: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "part of bytes": lambda data: memoryview(data + bytes(10))[: len(data)],
    "view of a bytearray": lambda data: memoryview(bytearray(data)),
    "read-only view": lambda data: memoryview(bytearray(data)).toreadonly(),
    "array": lambda data: array.array("B", data),
    "numpy": lambda data: np.frombuffer(data, np.uint8).copy(),
    "mapping": mapping,
}


@pytest.mark.parametrize(("pieces", "offered"), [(3, 3), (4, 1)])
def test_pieces_are_merged_when_they_do_not_fit_in_the_request(
    wire: Wire, bare: BareChannel, pieces: int, offered: int
) -> None:
    """A request needs 16 bytes and 24 for each piece. The receive has 100 bytes."""
    bare.send([pattern()] * pieces)
    ((_, _, found),) = requests(wire, 1)
    assert len(found) == offered


@pytest.mark.parametrize("kind", MEMORY)
@pytest.mark.parametrize("imm", [None, 0, 0xFFFFFFFF])
def test_peer_can_read_a_message_until_it_acknowledges_it(
    wire: Wire, kind: str, imm: int | None
) -> None:
    bare = BareChannel(wire, peer=Room(eager_size=100))
    data = pattern(3000)
    future = bare.send(MEMORY[kind](data), imm)
    ((request_id, found, pieces),) = requests(wire, 1)
    assert (request_id, found, [piece.length for piece in pieces]) == (1, imm, [3000])
    gc.collect()
    assert read(wire, pieces[0]) == data
    assert not future.done()
    wire.peer_sends(acknowledgement(1))
    assert future.done()
    future.result()
    assert bare.channel.figures()["rendezvous"] == 0
    assert read(wire, pieces[0]) is verbs.WCStatus.REM_ACCESS_ERR
    bare.close()


def test_peer_cannot_write_to_memory_being_sent(wire: Wire, bare: BareChannel) -> None:
    data = bytearray(SIZE)
    bare.send(data)
    ((request_id, imm, (piece,)),) = requests(wire, 1)
    where = verbs.address_of(data)
    assert (request_id, imm, piece.address, piece.length) == (1, None, where, SIZE)
    write = verbs.WROpcode.RDMA_WRITE
    assert wire.peer_posts(write, 8, where, piece.rkey) is verbs.WCStatus.REM_ACCESS_ERR


# ---- in turn -------------------------------------------------------------------------------------


def test_messages_wait_when_256_are_unacknowledged(wire: Wire, library: Library) -> None:
    bare = BareChannel(
        wire, peer=Room(eager_size=100, data_receives=1000), dereg_mr=library.dereg_mr
    )
    for sent in range(0, 256, 16):
        for _ in range(16):
            bare.send(bytes(SIZE))
        assert [number for number, _, _ in requests(wire, 16)] == list(range(sent + 1, sent + 17))
    bare.send(bytes(SIZE))
    bare.send(b"short")
    assert bare.channel.figures()["messages_waiting"] == 2
    wire.peer_sends(acknowledgement(2))
    assert bare.channel.figures()["messages_waiting"] == 1
    wire.peer_sends(acknowledgement(3))
    assert [kind for kind, _, _ in wire.peer_got(2)] == [FrameKind.RNDV_RTS, FrameKind.DATA]
    bare.close()


# ---- acknowledgements ----------------------------------------------------------------------------


def test_sent_memory_stays_pinned_until_deregistered(
    wire: Wire, bare: BareChannel, library: Library
) -> None:
    data = bytearray(SIZE)
    future = bare.send(data)
    pinned = []
    library.at_end = lambda: pinned.append(is_pinned(data))
    assert is_pinned(data)
    wire.peer_sends(acknowledgement(1))
    assert pinned == [True]  # still pinned during deregistration
    assert library.closed == [SIZE]
    assert not is_pinned(data)
    future.result()


def test_negative_acknowledgement_fails_the_message(
    wire: Wire, bare: BareChannel, library: Library
) -> None:
    data = bytearray(SIZE)
    future = bare.send(data)
    wire.peer_sends(acknowledgement(1, BUSY))
    with pytest.raises(RDMAError, match=f"could not receive the message .code {BUSY}"):
        future.result()
    assert not is_pinned(data)
    assert library.closed == [SIZE]


@pytest.mark.parametrize("negative", [False, True])  # providers return -1 or the errno
@pytest.mark.parametrize("number", [errno.EBUSY, errno.EIO])
def test_failed_deregistration_is_reported_and_message_succeeds(
    wire: Wire, bare: BareChannel, library: Library, number: int, negative: bool
) -> None:
    """The message has been delivered. EIO is not reported, because the device is gone."""
    data = bytearray(SIZE)
    future = bare.send(data)
    library.code, library.errno = -1 if negative else number, number
    wire.peer_sends(acknowledgement(1))
    if number == errno.EIO:
        assert not wire.driver.reported
    else:
        (error,) = wire.driver.reported
        assert isinstance(error, OSError)
        assert error.errno == errno.EBUSY
    future.result()
    assert not is_pinned(data)
    library.code = 0


# ---- ends ----------------------------------------------------------------------------------------


def test_close_releases_every_pending_message(wire: Wire, library: Library) -> None:
    bare = BareChannel(wire, peer=THERE, dereg_mr=library.dereg_mr)
    several = [bytearray(SIZE + n) for n in range(3)]
    futures = [bare.send(data) for data in several]
    bare.channel.end(ConnectionError("over"))
    for future in futures:
        with pytest.raises(ConnectionError, match="over"):
            future.result()
    assert all(map(is_pinned, several))  # pinned until the queue pair is destroyed
    library.code = errno.EBUSY
    with pytest.raises(OSError, match="ibv_dereg_mr") as caught:
        bare.channel.close()
    assert caught.value.errno == errno.EBUSY
    assert sorted(library.closed) == [len(data) for data in several]
    assert not any(map(is_pinned, several))


def test_completed_messages_leave_no_references(wire: Wire, bare: BareChannel) -> None:
    data = bytearray(pattern())
    view = memoryview(data)

    def counts() -> list[int]:
        return [sys.getrefcount(it) for it in (data, view, bare.channel)]

    before = counts()
    for number, source in enumerate((data, view, data, view), 1):
        future = bare.send(source, 5)
        wire.peer_got(1)
        wire.peer_sends(acknowledgement(number, BUSY if number > 2 else 0))
        assert future.done()
        assert (future.exception() is None) == (number <= 2)
    del source, future
    assert counts() == before
    view.release()
    assert not is_pinned(data)


def test_forked_child_does_not_deregister_pending_messages(
    wire: Wire, bare: BareChannel, library: Library
) -> None:
    data = bytearray(SIZE)
    bare.send(data)
    child = os.fork()
    if not child:
        status = 1
        try:
            # Deregistering memory here would use the parent's device and crash.
            bare.close()
            status = 0 if not library.closed and not is_pinned(data) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert is_pinned(data)
