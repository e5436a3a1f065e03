"""The format for sending the frames of a Dask message as messages on a connection.

The first message contains all short frames, one after another, followed by a trailer with the
length of each frame.

Each long frame is received into separate memory, so that an array can be freed while other arrays
from the same Dask message are still in use. A long frame is therefore sent as a separate message.
The frame is sent directly from the sender's memory and received into memory of exactly its length,
without a copy on either side.

If there is little other data, the first long frame is instead sent at the beginning of the first
message, before the short frames. This saves a message. The trailer is at the end of the message, so
the long frame begins at the start of its memory and is aligned.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from distributed.utils import nbytes

from aiordma.verbs import bytes_of

Bytes = bytes | bytearray | memoryview

# The minimum size in bytes of a long frame. Shorter frames are copied on each side. At 10 GB/s, a
# copy takes at most 13 us. Waking up a process for a separate message would take longer.
MIN_LONG_FRAME = 128 << 10
# The maximum amount of other data that a long frame can keep alive, as a fraction of the frame's
# length. distributed's TCP comm uses the same fraction.
MAX_SHARED_FRACTION = 0.05

# A message with more than this number of frames must contain at least one byte per frame. Dask's
# messages do, because pickle writes an opcode for each out-of-band buffer, and Dask writes a header
# for each serialized object.
MAX_UNCHECKED_FRAMES = 1 << 16
# An upper bound on the memory overhead per frame, in bytes.
FRAME_COST = 448

# Each length in the trailer has two flag bits.
LONG_FRAME = 1 << 63
LEADING_FRAME = 1 << 62  # a long frame at the beginning of the first message
LENGTH_MASK = LEADING_FRAME - 1

_END = struct.Struct("<Q8s")
MAGIC = b"dask-rd1"


class FramingError(ValueError):
    """Raised when the peer sends a message that is invalid or too large."""


def pack(frames: Sequence[Bytes]) -> tuple[list[list[Bytes]], int]:
    """Pack the frames of a Dask message into one or more connection messages.

    Returns:
        The connection messages, each as a list of buffers, and the frames' total size in bytes.
    """
    lengths = [nbytes(frame) for frame in frames]
    own = [i for i, length in enumerate(lengths) if length >= MIN_LONG_FRAME]
    short = [bytes_of(frames[i]) for i, length in enumerate(lengths) if length < MIN_LONG_FRAME]
    total = sum(lengths)
    short_total = total - sum(lengths[i] for i in own)
    first: list[Bytes] = []
    messages = [first]
    for i in own:
        length = lengths[i]
        lengths[i] = length | LONG_FRAME
        frame = bytes_of(frames[i])
        if not first and short_total <= length * MAX_SHARED_FRACTION:
            lengths[i] |= LEADING_FRAME
            first.append(frame)
        else:
            messages.append([frame])
    trailer = struct.pack(f"<{len(lengths)}Q", *lengths) + _END.pack(len(lengths), MAGIC)
    first.append(b"".join([*short, trailer]))
    return messages, total


@dataclass
class Unpacked:
    """The frames of a Dask message. Frames that have not been received yet are None."""

    frames: list[memoryview | None]
    missing: list[tuple[int, int]]
    """The index and length of each frame that is sent as a separate message, in order."""


_EMPTY = memoryview(bytearray())


def _copy(part: memoryview) -> memoryview:
    if not part.nbytes:  # a peer can send a large number of empty frames
        return _EMPTY
    return memoryview(bytearray(part))  # takes half as long as creating an array


def unpack(message: memoryview, longest: int) -> Unpacked:
    """Unpack the first connection message produced by `pack`.

    Args:
        message: The contents of the connection message.
        longest: The maximum amount of memory for all frames of the Dask message, in bytes.

    Raises:
        FramingError: If the connection message is invalid, or if the frames need too much memory.
    """
    size = message.nbytes
    if size < _END.size:
        raise FramingError(f"the peer sent a message with no trailer ({size} bytes)")
    count, magic = _END.unpack_from(message, size - _END.size)
    if magic != MAGIC:
        raise FramingError("the peer does not use a compatible version of dask-aiordma")
    if not 0 < count <= (size - _END.size) // 8:
        raise FramingError(f"invalid frame count in trailer: {count} frames in {size} bytes")
    data = size - _END.size - 8 * count
    if count > MAX_UNCHECKED_FRAMES and count > data:
        raise FramingError(
            f"the peer sent {count} frames in {data} bytes: a message with more than "
            f"{MAX_UNCHECKED_FRAMES} frames must contain at least one byte per frame"
        )
    if count * FRAME_COST > longest:
        raise FramingError(
            f"the peer sent {count} frames (maximum {longest // FRAME_COST} with a memory limit of "
            f"{longest} bytes)"
        )
    lengths = struct.unpack_from(f"<{count}Q", message, data)

    frames: list[memoryview | None] = [None] * count
    missing = []
    start = 0
    total = 0
    for i, marked in enumerate(lengths):
        total += marked & LENGTH_MASK
        if marked & LEADING_FRAME:
            if start:
                raise FramingError("the peer sent a message with two leading frames")
            start = marked & LENGTH_MASK
            if not marked & LONG_FRAME or not 0 < start <= data:
                raise FramingError(
                    f"the peer sent a leading frame of {start} bytes in a message of {data} bytes"
                )
            frames[i] = message[:start]
        elif marked & LONG_FRAME:
            missing.append((i, marked & LENGTH_MASK))
    if total > longest:
        raise FramingError(f"the peer sent frames totaling {total} bytes (maximum {longest})")
    for i, length in enumerate(lengths):
        if length & LONG_FRAME:
            continue
        if length > data - start:
            raise FramingError(f"the peer's message is too short for its frames: {data} bytes")
        part = message[start : start + length]
        # Copy every frame except the header, so that no frame keeps the message alive. The header
        # is decoded immediately and then freed.
        frames[i] = part if i == 0 else _copy(part)
        start += length
    if start != data:
        raise FramingError(f"the peer's message is {data - start} bytes longer than its frames")
    return Unpacked(frames, missing)
