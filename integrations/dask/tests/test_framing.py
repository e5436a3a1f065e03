"""Tests of how frames become messages, and of messages that no valid sender creates."""

from __future__ import annotations

import random
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from dask_aiordma.framing import (
    FRAME_COST,
    MAX_UNCHECKED_FRAMES,
    MIN_LONG_FRAME,
    FramingError,
    pack,
    unpack,
)

LIMIT = 1 << 40


def round_trip(frames: list[bytes]) -> tuple[list[bytes], int]:
    """Pack and unpack frames, and return the unpacked frames and the number of messages."""
    messages, total = pack(frames)
    assert total == sum(map(len, frames))
    received = [memoryview(bytearray(b"".join(parts))) for parts in messages]
    unpacked = unpack(received[0], LIMIT)
    assert len(unpacked.missing) == len(messages) - 1
    for (index, length), memory in zip(unpacked.missing, received[1:], strict=True):
        assert memory.nbytes == length
        unpacked.frames[index] = memory
    assert all(frame is not None for frame in unpacked.frames)
    return [bytes(frame) for frame in unpacked.frames if frame is not None], len(messages)


@pytest.mark.parametrize(
    ("lengths", "messages"),
    [
        ([0], 1),
        ([1], 1),
        ([0, 0, 0], 1),
        ([100, 0, 7], 1),
        ([MIN_LONG_FRAME - 1], 1),
        ([MIN_LONG_FRAME], 1),  # sent at the beginning of the first message
        ([100, MIN_LONG_FRAME], 1),
        (
            [MIN_LONG_FRAME // 2, MIN_LONG_FRAME],
            2,
        ),  # the short frame is too long to share the memory
        ([100, MIN_LONG_FRAME, 3, MIN_LONG_FRAME + 1, 0], 2),
        ([100, MIN_LONG_FRAME, MIN_LONG_FRAME, MIN_LONG_FRAME], 3),
        ([10] * 5000, 1),
        ([MIN_LONG_FRAME - 1] * 20, 1),
    ],
)
def test_frames_round_trip(lengths: list[int], messages: int) -> None:
    source = random.Random(7)
    frames = [source.randbytes(length) for length in lengths]
    assert round_trip(frames) == (frames, messages)


def test_any_buffer_is_accepted_as_a_frame() -> None:
    backing = bytearray(4 * MIN_LONG_FRAME)
    numbers: Any = memoryview(backing).cast("Q")
    views = [b"head", numbers, memoryview(bytes(MIN_LONG_FRAME)), bytearray(5)]
    messages, total = pack(views)
    assert total == 4 + 4 * MIN_LONG_FRAME + MIN_LONG_FRAME + 5
    assert np.shares_memory(np.frombuffer(messages[0][0], "u1"), np.frombuffer(backing, "u1"))


@pytest.mark.parametrize("length", [8, MIN_LONG_FRAME])
def test_object_arrays_are_rejected_as_frames(length: int) -> None:
    objects: Any = np.zeros(length, object)
    with pytest.raises(TypeError, match="addresses in this process"):
        pack([b"head", objects.data])


def test_unpack_reports_missing_long_frames() -> None:
    messages, _ = pack([b"head", bytes(MIN_LONG_FRAME), bytes(MIN_LONG_FRAME), b"tail"])
    first = memoryview(bytearray(b"".join(messages[0])))
    unpacked = unpack(first, LIMIT)
    head, leader, later, tail = unpacked.frames
    assert head is not None
    assert leader is not None
    assert tail is not None
    assert leader.obj is first.obj
    assert leader.nbytes == MIN_LONG_FRAME
    assert later is None
    assert unpacked.missing == [(2, MIN_LONG_FRAME)]
    assert tail.obj is not first.obj


def test_unpacked_empty_frames_share_one_object() -> None:
    """A peer can send a million empty frames. Separate objects would take about 512 bytes each."""
    frames = unpack(message([4] + [0] * 1000, b"head"), LIMIT).frames
    assert frames[1] is not None
    assert not frames[1].nbytes
    assert all(frame is frames[1] for frame in frames[2:])


def message(lengths: list[int], data: bytes, magic: bytes = b"dask-rd1") -> memoryview:
    trailer = struct.pack(f"<{len(lengths)}QQ", *lengths, len(lengths)) + magic
    return memoryview(bytearray(data + trailer))


LONG_FRAME, LEADING_FRAME = 1 << 63, 1 << 62


def crowd(count: int, length: int) -> memoryview:
    """Return a message of `count` frames with `length` bytes each."""
    trailer = struct.pack("<Q", length) * count + struct.pack("<Q", count) + b"dask-rd1"
    return memoryview(bytearray(length * count) + trailer)


@pytest.mark.parametrize("count", [MAX_UNCHECKED_FRAMES + 1, 1_000_000])
def test_too_many_empty_frames_are_rejected_before_unpacking(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = crowd(count, 0)
    monkeypatch.setattr(struct, "unpack_from", None)  # makes unpacking the lengths fail
    with pytest.raises(FramingError, match=f"{count} frames in 0 bytes"):
        unpack(sent, LIMIT)


def test_frames_exceeding_the_memory_limit_are_rejected() -> None:
    with pytest.raises(FramingError, match=r"70000 frames \(maximum 44642 with a memory limit"):
        unpack(crowd(70_000, 2), 20_000_000)


def test_frame_cost_covers_the_memory_of_a_frame() -> None:
    sent = crowd(100_000, 1)
    tracemalloc.start()
    try:
        frames = unpack(sent, LIMIT).frames
        assert tracemalloc.get_traced_memory()[0] < 100_000 * FRAME_COST
    finally:
        tracemalloc.stop()
    assert len(frames) == 100_000


def test_many_empty_frames_are_accepted_in_a_large_message() -> None:
    """Pickle writes one opcode per array when Dask sends a long list of empty arrays."""
    frames = [b"head", *[b""] * MAX_UNCHECKED_FRAMES, bytes(MAX_UNCHECKED_FRAMES)]
    assert round_trip(frames) == (frames, 1)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (memoryview(b""), "no trailer"),
        (memoryview(b"hello, dask"), "no trailer"),
        (message([1], b"x", b"dask-rd0"), "version"),
        (message([], b""), "0 frames"),
        (memoryview(struct.pack("<Q8s", 1 << 60, b"dask-rd1")), "frames in 16 bytes"),
        (message([2], b"x"), "too short for its frames"),
        (message([1], b"xy"), "1 bytes longer"),
        (message([1 << 61], b""), "maximum"),
        (message([LONG_FRAME | (1 << 41)], b""), "maximum"),
        (
            message([LONG_FRAME | LEADING_FRAME | 3], b"xy"),
            "leading frame of 3 bytes in a message of 2",
        ),
        (message([LONG_FRAME | LEADING_FRAME], b"xy"), "leading frame of 0"),
        (message([LEADING_FRAME | 1], b"xy"), "leading frame"),
        (
            message([LONG_FRAME | LEADING_FRAME | 1, LONG_FRAME | LEADING_FRAME | 1], b"xy"),
            "two leading frames",
        ),
    ],
)
def test_malformed_messages_are_rejected(sent: memoryview, why: str) -> None:
    with pytest.raises(FramingError, match=why):
        unpack(sent, LIMIT)


def test_corrupted_messages_raise_only_framing_error() -> None:
    source = random.Random(11)
    frames = [source.randbytes(n) for n in (40, 0, 300, MIN_LONG_FRAME, 9)]
    good = bytearray(b"".join(pack(frames)[0][0]))
    for _ in range(2000):
        changed = bytearray(good)
        for _ in range(source.randint(1, 3)):
            changed[-source.randint(1, 80)] = source.randrange(256)
        try:
            unpacked = unpack(memoryview(changed), LIMIT)
        except FramingError:
            continue
        assert sum(f.nbytes for f in unpacked.frames if f is not None) <= len(changed)
