"""The size of receives, against the lengths of the frames since it changed."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiordma._core.frames import FrameKind
from aiordma._datapath.receives import ReceiveSizes
from tests.transport.raw_peer import Piece, rendezvous

from .bare_channel import BareChannel, Room, Wire, frame, wire

__all__ = ["wire"]

SMALL, LARGEST, COUNT = 256, 4096, 12
GROW_AFTER, SHRINK_AFTER = 4, 256

lengths = st.sampled_from([SMALL, SMALL + 1, LARGEST, LARGEST + 1])
counts = st.sampled_from([1, 3, 4, SHRINK_AFTER - 1, SHRINK_AFTER])
answers = st.sampled_from(["told", "wait", "refused"])


def fitting(size: int, frames: list[int]) -> int:
    """Frames that have no room in the largest ones do not count."""
    if size == SMALL:
        return LARGEST if sum(length > SMALL for length in frames) >= GROW_AFTER else SMALL
    latest = frames[-SHRINK_AFTER:]
    return SMALL if len(latest) == SHRINK_AFTER and max(latest) <= SMALL else LARGEST


GROWN = (LARGEST, GROW_AFTER, "told")


@example([GROWN, (SMALL, SHRINK_AFTER - 1, "told"), (LARGEST, 1, "told"), (SMALL, 2, "told")])
@example([GROWN, (SMALL, SHRINK_AFTER, "told"), GROWN, (LARGEST, COUNT, "told")])
@given(st.lists(st.tuples(lengths, counts, answers), max_size=8))
def test_they_have_the_size_that_the_frames_fit(runs: list[tuple[int, int, str]]) -> None:
    """And what is still posted of the smaller ones is known, since blocks are kept for those."""
    sizes, size = ReceiveSizes(SMALL, LARGEST), SMALL
    posted, frames = deque([SMALL] * COUNT), list[int]()
    for length, times, answer in runs:
        for _ in range(times):
            if length <= LARGEST:
                frames.append(length)
            wanted = sizes.wanted_after(posted.popleft(), length)
            assert wanted == fitting(size, frames)
            if wanted != size and answer != "wait":
                size = wanted if answer == "told" else size
                sizes.use(size, sum(it < size for it in posted))
                frames.clear()
            posted.append(size)
            assert sizes.too_small == sum(it < size for it in posted)


@pytest.mark.parametrize(("credits", "size"), [(8, LARGEST), (1, SMALL)])
def test_they_change_once_the_peer_can_be_told(wire: Wire, credits: int, size: int) -> None:
    """And the blocks that are kept for it go with the connection, as the wire's end looks."""
    room = Room(data_receives=6, max_eager_size=LARGEST)  # which are posted again one by one
    bare = BareChannel(wire, room, Room(control_receives=credits))
    wire.peer_sends(frame(FrameKind.DATA))
    for number in range(GROW_AFTER):
        wire.peer_sends(rendezvous(number, Piece(0, LARGEST - 8, 0)))
    bare.received()
    assert bare.channel.figures()["receive_size"] == size
    bare.close()
