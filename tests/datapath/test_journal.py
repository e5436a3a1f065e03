"""What the peer says of the frames that have arrived, where that cannot be."""

from __future__ import annotations

import pytest

from aiordma import ProtocolError
from aiordma._datapath.journal import Journal
from aiordma._datapath.sends import Frame


def new_frame() -> Frame:
    return Frame(1, 2, 0, 8, 0)


def test_numbers_that_cannot_be() -> None:
    journal = Journal()
    journal.keeps = True
    frames = [new_frame() for _ in range(5)]
    for number, frame in enumerate(frames):
        journal.send(frame, number != 2)
    journal.credit(1, 1)  # the peer has handled three
    for wrong in (0, 2, 6):
        with pytest.raises(ProtocolError, match=f"says that {wrong} frames have arrived"):
            journal.missing(wrong)
    for right in (3, 4, 5):
        assert journal.missing(right) == frames[right:]


def test_a_credit_for_a_frame_that_is_missing() -> None:
    """Its block is still to be sent from, so it is not given back."""
    journal = Journal()
    journal.keeps = True
    frames = [new_frame() for _ in range(3)]
    for frame in frames:
        journal.send(frame, True)
    assert journal.missing(2) == frames[2:]
    with pytest.raises(ProtocolError, match="a credit back for a frame that it says"):
        journal.credit(0, 3)
    assert [frame.kept for frame in frames] == [False, False, True]
    assert journal.missing(3) == []
    journal.credit(0, 1)
    assert not frames[2].kept
    with pytest.raises(ProtocolError, match="a frame that was not sent"):
        journal.credit(0, 1)
