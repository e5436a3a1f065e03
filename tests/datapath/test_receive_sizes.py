"""Tests of the size of receives, which follows the lengths of recent frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiordma._core import protocol
from aiordma._core.frames import FrameKind
from aiordma._datapath.receives import ReceiveSizes
from aiordma.errors import RDMAError
from tests.transport.raw_peer import Piece, rendezvous

from .bare_channel import OWN, BareChannel, Room, Wire, frame, wire

__all__ = ["wire"]

SMALL, LARGEST, COUNT = 1024, 4096, 12
GROW_AFTER, SHRINK_AFTER = 4, 256

lengths = st.sampled_from([SMALL, SMALL + 1, LARGEST, LARGEST + 1])
counts = st.sampled_from([1, 3, 4, SHRINK_AFTER - 1, SHRINK_AFTER])
answers = st.sampled_from(["told", "wait", "refused"])


def fitting(size: int, frames: list[int]) -> int:
    """Return the expected receive size after frames of these lengths, which are at most LARGEST."""
    if size == SMALL:
        return LARGEST if sum(length > SMALL for length in frames) >= GROW_AFTER else SMALL
    latest = frames[-SHRINK_AFTER:]
    return SMALL if len(latest) == SHRINK_AFTER and max(latest) <= SMALL else LARGEST


GROWN = (LARGEST, GROW_AFTER, "told")


@example([GROWN, (SMALL, SHRINK_AFTER - 1, "told"), (LARGEST, 1, "told"), (SMALL, 2, "told")])
@example([GROWN, (SMALL, SHRINK_AFTER, "told"), GROWN, (LARGEST, COUNT, "told")])
@given(st.lists(st.tuples(lengths, counts, answers), max_size=8))
def test_receive_size_adapts_to_the_lengths_of_recent_frames(
    runs: list[tuple[int, int, str]],
) -> None:
    """`smaller` counts the receives that were posted before the size grew."""
    sizes, size, before = ReceiveSizes(SMALL, LARGEST), SMALL, 0
    frames = list[int]()
    for length, times, answer in runs:
        for _ in range(times):
            if length <= LARGEST:
                frames.append(length)
            wanted = sizes.size_after(length)
            before = max(0, before - 1)
            assert wanted == fitting(size, frames)
            if wanted != size and answer != "wait":
                if answer == "told":
                    size, before = wanted, COUNT if wanted == LARGEST else 0
                sizes.use(size, before)
                frames.clear()
            assert sizes.smaller == before


@pytest.mark.parametrize(("credits", "size"), [(8, LARGEST), (1, SMALL)])
def test_receive_size_grows_only_when_the_peer_can_be_notified(
    wire: Wire, credits: int, size: int
) -> None:
    """The larger blocks are released with the connection, which closing the wire checks."""
    room = Room(6, eager_size=SMALL, max_eager_size=LARGEST)  # reposted one by one
    bare = BareChannel(wire, room, Room(control_receives=credits))
    wire.peer_sends(frame(FrameKind.DATA))
    for number in range(GROW_AFTER):
        wire.peer_sends(rendezvous(number, Piece(0, LARGEST - 8, 0)))
    bare.received()
    assert bare.channel.figures()["receive_size"] == size
    bare.close()


# ---- their memory --------------------------------------------------------------------------------


def peer_sends_large(wire: Wire, bare: BareChannel, count: int = GROW_AFTER) -> None:
    """Send large messages from the peer by rendezvous, and receive each of them."""
    for number in range(count):
        there = Piece(wire.mr.addr + OWN, LARGEST - 8, wire.mr.rkey)
        wire.peer_sends(rendezvous(number, there))
        wire.until(lambda: wire.queue.free == wire.queue.capacity)
        bare.received()


def peer_sends_small(wire: Wire, bare: BareChannel, count: int = 1) -> None:
    for _ in range(count):
        wire.peer_sends(frame(FrameKind.DATA))
        bare.received()


@pytest.fixture
def growing(wire: Wire, receives: int) -> Iterator[BareChannel]:
    """A channel whose receives grow. Closing its wire checks for leaked blocks."""
    room = Room(receives, eager_size=SMALL, max_eager_size=LARGEST, fetch_ahead=1 << 20)
    bare = BareChannel(wire, room, Room(control_receives=1000))
    yield bare
    bare.close()
    assert not wire.driver.reported + bare.owner.errors


@pytest.fixture
def receives() -> int:
    """The number of data receives, small enough to repost each of them individually."""
    return 6


def test_receive_growth_is_retried_after_an_allocation_failure(
    wire: Wire, growing: BareChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks allocated before the failure return to the pool, which closing the wire checks."""
    make, asked = wire.pool._block, list[int]()

    def block(size: int) -> Any:
        if size == LARGEST:
            asked.append(frames)
            if len(asked) % 3 == 0:
                raise RDMAError("no more")
        return make(size)

    monkeypatch.setattr(wire.pool, "_block", block)
    for frames in range(1, 2 * GROW_AFTER + 2):  # noqa: B007 - `block` notes it
        peer_sends_large(wire, growing, 1)
    assert asked == [GROW_AFTER] * 3 + [2 * GROW_AFTER] * 3


def test_larger_blocks_are_released_after_receives_shrink(wire: Wire, growing: BareChannel) -> None:
    """The second growth begins while large receives from before the shrinking are posted."""
    figures = growing.channel.figures
    peer_sends_large(wire, growing)
    peer_sends_small(wire, growing, SHRINK_AFTER + GROW_AFTER)
    assert (figures()["receive_size"], figures()["larger_blocks"]) == (SMALL, 0)
    peer_sends_large(wire, growing)
    assert figures()["receive_size"] == LARGEST
    assert figures()["larger_blocks"] > 0
    peer_sends_small(wire, growing, 2 * figures()["receives"])
    assert figures()["larger_blocks"] == 0


@pytest.mark.parametrize("receives", [24])  # reposted in groups of six
def test_block_is_reserved_to_repost_each_small_receive(wire: Wire, growing: BareChannel) -> None:
    """A receive used by a control frame must be reposted at once, even without free memory."""
    peer_sends_large(wire, growing, 6)
    assert growing.channel.figures()["larger_blocks"] > 0
    for _ in range(growing.channel.figures()["receives"]):
        wire.peer_sends(frame(FrameKind.CONTROL, protocol.encode(protocol.Pong(0))))


def test_receives_missing_for_lack_of_memory_are_posted_later(
    wire: Wire, growing: BareChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single timer retries all missing receives. Nothing is posted after the end."""
    figures, later = growing.channel.figures, list[Callable[[], None]]()
    monkeypatch.setattr(wire.loop, "call_later", lambda _, callback: later.append(callback))
    held: list[Any] = [*iter(partial(wire.pool.take, SMALL), None)]
    there = figures()["receives"]

    def refuse(_: int) -> None:
        raise RDMAError("no more")

    def take(count: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(wire.pool, "_block_if_first", refuse)
            for _ in range(count):
                wire.peer_sends(frame(FrameKind.DATA))
                held.extend(growing.received())
        assert figures()["receives"] == there - count

    take(2)
    assert len(later) == 1
    later.pop()()
    assert figures()["receives"] == there
    take(1)
    growing.channel.end(ConnectionError("over"))
    later.pop()()
    assert figures()["receives"] == there - 1
    for block in held:
        block.release()
