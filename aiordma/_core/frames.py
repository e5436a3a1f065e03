"""The layout of a frame: a header of 8 bytes and what follows it, all numbers little endian.

The compiled `_datapath/frames.pyx` reads and writes frames; this is what both ends agree on::

    offset 0  u8   kind (bits 0..6), bit 7: immediate data present (DATA and RNDV_RTS only)
    offset 1  u8   control credits returned
    offset 2  u16  data credits returned
    offset 4  u32  immediate data, 0 if absent

What follows the header: DATA, a message of the user; CONTROL, a message of
:mod:`aiordma._core.protocol`; CREDIT, nothing (the credits in the header are all it says); BUNDLE,
several messages of the user in their order, each behind a header of its own and padded with zeros
to a multiple of 8 bytes, so that each begins where anything may begin::

    offset 0  u32  length of the message (bits 0..30), bit 31: immediate data present
    offset 4  u32  immediate data, 0 if absent

RNDV_RTS ("request to send"), in the place of a message that is too long for a frame: the receiver
reads it with RDMA, piece by piece, and answers by RNDV_ACK. The memory stays as it is until then::

    offset 0  u32  request id, which the acknowledgement repeats
    offset 4  u32  number of pieces, and then for each of them:

    offset 0  u64  address
    offset 8  u64  length
    offset 16 u32  rkey
    offset 20 u32  0

RNDV_ACK: the message has been read, or will not be::

    offset 0  u32  request id
    offset 4  u32  0, or an ErrorCode
"""

from __future__ import annotations

from enum import IntEnum

HEADER_SIZE = 8
"""Bytes of a header."""

MAX_BUNDLE = 128
"""Messages in one BUNDLE at most: each costs its receiver more memory than its own bytes."""

# What a header can give back, and for control receives the least that docs/messages.md asks for.
MIN_DATA_RECEIVES, MAX_DATA_RECEIVES = 1, 0xFFFF
MIN_CONTROL_RECEIVES, MAX_CONTROL_RECEIVES = 4, 0xFF


class FrameKind(IntEnum):
    """What follows the header."""

    DATA = 1
    CONTROL = 2
    CREDIT = 3
    RNDV_RTS = 4
    BUNDLE = 5
    RNDV_ACK = 6
