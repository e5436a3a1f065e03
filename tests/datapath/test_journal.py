"""Tests of the journal with impossible reports from the peer about the frames received."""

from __future__ import annotations

import pytest

from aiordma import ProtocolError
from aiordma._datapath.journal import Journal
from aiordma._datapath.sends import Frame


def sent(count: int, control: int = -1) -> tuple[Journal, list[Frame]]:
    journal, frames = Journal(), [Frame(1, 2, 0, 8, 0) for _ in range(count)]
    journal.is_enabled = True
    for number, frame in enumerate(frames):
        journal.add(frame, number != control)
    return journal, frames


def test_journal_rejects_impossible_frame_numbers() -> None:
    journal, frames = sent(5, 2)
    journal.release_credited(1, 1)  # the peer has handled three
    for wrong in (0, 2, 6):
        with pytest.raises(ProtocolError, match=f"reports {wrong} received frames"):
            journal.missing_frames(wrong)
    for right in (3, 4, 5):
        assert journal.missing_frames(right) == frames[right:]


def test_credit_for_a_missing_frame_raises_protocol_error() -> None:
    """The missing frame's block is kept, because the frame must be sent from it again."""
    journal, frames = sent(3)
    assert journal.missing_frames(2) == frames[2:]
    with pytest.raises(ProtocolError, match="a credit for a frame that it reports"):
        journal.release_credited(0, 3)
    assert [frame.kept for frame in frames] == [False, False, True]
    assert journal.missing_frames(3) == []
    journal.release_credited(0, 1)
    assert not frames[2].kept
    with pytest.raises(ProtocolError, match="a frame that was not sent"):
        journal.release_credited(0, 1)
