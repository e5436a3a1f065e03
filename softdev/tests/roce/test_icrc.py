"""Tests of the ICRC check, with packets whose ICRC Scapy has computed."""

from __future__ import annotations

from pathlib import Path

from softdev.tests.programs.test_tshark import capture

from .icrc import CHANGED, captured, is_right

VECTORS = Path(__file__).with_name("vectors")


def test_icrc_covers_exactly_the_invariant_fields() -> None:
    packets = list(captured(capture([line.split() for line in VECTORS.read_text().splitlines()])))
    assert len(packets) > 100
    assert all(map(is_right, packets))
    for packet in packets[:2]:
        left_out = CHANGED[packet[0] >> 4]
        for at in range(1, len(packet)):
            changed = bytearray(packet)
            changed[at] ^= 1
            assert is_right(bytes(changed)) == (at in left_out), at
