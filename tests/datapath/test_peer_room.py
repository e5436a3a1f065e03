"""Tests of tracking the size of the peer's receives, compared with a list of its messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._datapath.frames import PeerRoom
from aiordma.errors import ProtocolError

LARGEST, TAG = 4096, 16


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(64, 2 * LARGEST)), max_size=30))
def test_peer_room_applies_each_size_from_the_announced_receive(
    said: list[tuple[int, int]],
) -> None:
    """An announced size applies from the given receive on, up to this side's maximum.

    The tag takes up part of each receive.
    """
    room, sizes = PeerRoom(256, LARGEST, TAG, 0), [(0, 256)]
    for sent, (ahead, size) in enumerate(said):
        first = max(sent, sizes[-1][0]) + ahead
        if sum(known > sent for known, _ in sizes) == 8:
            with pytest.raises(ProtocolError, match="too often"):
                room.announced(first, size)
        else:
            room.announced(first, size)
            sizes.append((first, size))
        (now,) = [size for first, size in sizes if first <= sent + 1][-1:]
        assert room.longest_after(1) == min(now, LARGEST) - TAG


def test_announcing_a_size_for_a_used_receive_raises_protocol_error() -> None:
    room = PeerRoom(256, LARGEST, TAG, 0)
    room.longest_after(3)
    with pytest.raises(ProtocolError, match="receive 2, which is already used"):
        room.announced(2, 512)
    room.announced(3, 512)
    assert room.longest_after(0) == 512 - TAG
    room.announced(7, 1024)
    with pytest.raises(ProtocolError, match="receive 6, which is already used"):
        room.announced(6, 256)
