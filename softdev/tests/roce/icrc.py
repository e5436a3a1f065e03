"""Check the ICRC of the packets in a capture of libpcap's old format.

    python -m softdev.tests.roce.icrc FILE

rdma_rxe drops packets with a wrong ICRC without counting them, and tshark does not compute the
ICRC.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

# Offsets of the bytes that the ICRC does not cover: traffic class, flow label, hop limit,
# checksums, FECN and BECN.
CHANGED = {4: (1, 8, 10, 11, 26, 27, 32), 6: (1, 2, 3, 7, 46, 47, 52)}


def is_right(packet: bytes) -> bool:
    """Return whether a packet, which starts with its IP header, has the correct ICRC."""
    version = packet[0] >> 4
    masked = bytearray(packet[:-4])
    for offset in CHANGED[version]:
        masked[offset] = 0xFF
    if version == 6:
        masked[0] = 0x6F
    return zlib.crc32(bytes(8 * [0xFF]) + masked) == int.from_bytes(packet[-4:], "little")


def captured(file: bytes) -> Iterator[bytes]:
    """Yield each packet of a capture, starting with its IP header."""
    ethernet = {1: 14, 101: 0}[int.from_bytes(file[20:24], "little")]
    at = 24
    while at < len(file):
        (length,) = struct.unpack_from("<8xI", file, at)
        at += 16 + length
        yield file[at - length + ethernet : at]


if __name__ == "__main__":
    packets = list(captured(Path(sys.argv[1]).read_bytes()))
    wrong = [packet.hex() for packet in packets if not is_right(packet)]
    print(f"{len(packets)} packets with an ICRC, {len(wrong)} wrong", *wrong[:3], sep="\n")
    sys.exit(bool(wrong) or not packets)
