"""The layout of a frame: a header of 8 bytes and what follows it, all numbers little endian.

The compiled `_datapath/frames.pyx` reads and writes frames; this is what both ends agree on::

    offset 0  u8   kind (bits 0..6), bit 7: immediate data present (DATA, RNDV_RTS and WRITTEN only)
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
    offset 20 u32  1: a memory window, which the acknowledgement may end (SEND_WITH_INV); else 0.
                   Bits 8..31: the rail of the key, the same for all pieces

RNDV_ACK: the message has been read, or will not be::

    offset 0  u32  request id
    offset 4  u32  0, or an ErrorCode

RNDV_KEYS: another rail can read pieces of a message that has been offered, too. The keys of a rail
come in the order of the pieces, in one frame or several; a reader that has acknowledged the message
ignores them::

    offset 0  u32  request id
    offset 4  u32  number of the rail
    offset 8  u32  index of the first piece
    offset 12 u32  number of pieces, and then for each of them:

    offset 0  u32  rkey
    offset 4  u32  1: a memory window; else 0

WRITTEN: a write to the receiver's memory was posted before it, with the immediate data of the
header. Where the connection may go on by another rail it stands for a write that brings the data
itself, which would be in no journal::

    offset 0  u32  bytes of the last piece of the write

On a connection that encrypts, the first frame of each side is as above if it is one of the proof of
the key (AuthHello, AuthAnswer), which the TCP bootstrap has on its socket.  All others are
*sealed*: AES-256-GCM over the whole frame, with TAG_SIZE bytes behind it.  The nonce
is the number of frames that the sender has sealed under this key, little endian; it is not sent,
since a queue pair delivers in order.  Both sides take the next key after as many frames or bytes.
The memory that a sealed RNDV_RTS offers is sealed as well, as one piece, and under a key that is
used for nothing else (nonce 0); behind the piece of the request stand::

    offset 0  32s  the key
    offset 32 16s  the tag
"""

from __future__ import annotations

from enum import IntEnum

HEADER_SIZE = 8
"""Bytes of a header."""

TAG_SIZE = 16
"""Bytes by which sealing makes a frame longer."""

REKEY_FRAMES, REKEY_BYTES = 1 << 20, 1 << 36
"""Limits of what one key seals; the first reached counts. One frame may pass the second number."""

MAX_BUNDLE = 128
"""Messages in one BUNDLE at most: each costs its receiver more memory than its own bytes."""

# What a header can give back, and for control receives the least that ``Credits`` asks for.
MIN_DATA_RECEIVES, MAX_DATA_RECEIVES = 1, 0xFFFF
MIN_CONTROL_RECEIVES, MAX_CONTROL_RECEIVES = 4, 0xFF


class FrameKind(IntEnum):
    """The kind of a frame: it tells what follows the header."""

    DATA = 1
    CONTROL = 2
    CREDIT = 3
    RNDV_RTS = 4
    BUNDLE = 5
    RNDV_ACK = 6
    RNDV_KEYS = 7
    WRITTEN = 8
