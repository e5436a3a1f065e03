"""The layout of a frame: a header of 8 bytes and the contents, with all numbers in little endian.

The compiled `_datapath/frames.pyx` reads and writes frames. The header is::

    offset 0  u8   kind (bits 0..6), bit 7: immediate data present (DATA, RNDV_RTS and WRITTEN only)
    offset 1  u8   control credits returned
    offset 2  u16  data credits returned
    offset 4  u32  immediate data, 0 if absent

The contents of a DATA frame are a message of the user, and those of a CONTROL frame are a message
of :mod:`aiordma._core.protocol`. A CREDIT frame has no contents, because its header contains the
credits. A BUNDLE frame contains several messages of the user in order. Each of them has its own
header, and is padded with zeros to a multiple of 8 bytes for alignment::

    offset 0  u32  length of the message (bits 0..30), bit 31: immediate data present
    offset 4  u32  immediate data, 0 if absent

RNDV_RTS ("request to send") stands for a message that is too long for a frame. The receiver reads
the message with RDMA, piece by piece, and responds with RNDV_ACK. The memory does not change until
then::

    offset 0  u32  request id, which the acknowledgement repeats
    offset 4  u32  number of pieces, and then for each of them:

    offset 0  u64  address
    offset 8  u64  length
    offset 16 u32  rkey
    offset 20 u32  1: a memory window, which the acknowledgement may end (SEND_WITH_INV); else 0.
                   Bits 8..31: the rail of the key, the same for all pieces

RNDV_ACK reports that the message has been read, or will not be read::

    offset 0  u32  request id
    offset 4  u32  0, or an ErrorCode

RNDV_KEYS lets a further rail read pieces of a message that has been offered. The keys of a rail
arrive in the order of the pieces, in one frame or in several. A reader that has acknowledged the
message ignores them::

    offset 0  u32  request id
    offset 4  u32  number of the rail
    offset 8  u32  index of the first piece
    offset 12 u32  number of pieces, and then for each of them:

    offset 0  u32  rkey
    offset 4  u32  1: a memory window; else 0

WRITTEN reports a write to the receiver's memory that was posted before the frame. The immediate
data is in the header. A connection that may continue on another rail uses this frame instead of a
write that carries the immediate data itself, because the journal could not keep that write::

    offset 0  u32  bytes of the last piece of the write

On a connection that encrypts, the first frame of each side is not encrypted if it belongs to the
proof of the key (AuthHello, AuthAnswer). In the TCP bootstrap, the proof takes place on the socket
instead. All other frames are *sealed*: the whole frame is encrypted with AES-256-GCM, and a tag of
TAG_SIZE bytes follows. The nonce is the number of frames that the sender has sealed with this key,
in little endian. It is not sent, because a queue pair delivers in order. Both sides switch to the
next key after the same number of frames or bytes.

The memory that a sealed RNDV_RTS offers is sealed as well, as one piece, with a key that is used
for nothing else (nonce 0). After the piece, the request contains::

    offset 0  32s  the key
    offset 32 16s  the tag
"""

from __future__ import annotations

from enum import IntEnum

HEADER_SIZE = 8
"""The size of a header in bytes."""

TAG_SIZE = 16
"""The number of bytes that sealing adds to a frame."""

REKEY_FRAMES, REKEY_BYTES = 1 << 20, 1 << 36
"""A key is replaced when it reaches either limit. One frame may exceed REKEY_BYTES."""

MAX_BUNDLE = 128
"""The maximum number of messages in a BUNDLE. It limits the memory used by the receiver."""

# A frame header can return at most 0xFFFF data credits and 0xFF control credits. The flow control
# in ``Credits`` requires at least 4 control receives.
MIN_DATA_RECEIVES, MAX_DATA_RECEIVES = 1, 0xFFFF
MIN_CONTROL_RECEIVES, MAX_CONTROL_RECEIVES = 4, 0xFF


class FrameKind(IntEnum):
    """The kind of a frame, which determines its contents."""

    DATA = 1
    CONTROL = 2
    CREDIT = 3
    RNDV_RTS = 4
    BUNDLE = 5
    RNDV_ACK = 6
    RNDV_KEYS = 7
    WRITTEN = 8
