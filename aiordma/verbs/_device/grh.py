"""The global route header (GRH) that precedes a received datagram and identifies its sender."""

from __future__ import annotations

import struct
from typing import NamedTuple, Self

from .address import GID, IPV4_PREFIX

GRH_SIZE = 40
"""The number of bytes that precede every received datagram (ibv_create_ah_from_wc(3))."""

_V6 = struct.Struct("!IHBB16s16s")
_V4 = struct.Struct("!BBHHHBBH4s4s")
_V4_OFFSET = GRH_SIZE - _V4.size
_V4_START = 0x45  # version 4 and a length of five words, because RoCE uses no IP options


class GRH(NamedTuple):
    """A global route header (IBTA volume 1, clause 8.3), or the IP header of a RoCE v2 packet.

    ``version`` is 6, or 4 for an IPv4 header. An IPv4 header occupies only the last 20 of the 40
    bytes (annex A17.4.5.2). Its addresses are converted to IPv4-mapped GIDs. ``payload_length`` is
    in bytes.
    """

    version: int
    traffic_class: int
    flow_label: int
    payload_length: int
    next_header: int
    hop_limit: int
    sgid: GID
    dgid: GID

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> Self:
        """Parse the header in the first 40 bytes of a receive's memory.

        Raises:
            ValueError: If there are fewer than 40 bytes, or if they do not contain a GRH.
        """
        raw = bytes(memoryview(data)[:GRH_SIZE])
        if len(raw) < GRH_SIZE:
            raise ValueError(f"a GRH must be {GRH_SIZE} bytes long, not {len(raw)}")
        # The 20 bytes before an IPv4 header are undefined and may look like the start of an IPv6
        # header. If both formats match, choose IPv4 if its header checksum is valid. Random bytes
        # have a valid checksum in 1 of 65536 cases.
        is_ipv4 = raw[_V4_OFFSET] == _V4_START
        if raw[0] >> 4 == 6 and not (is_ipv4 and _is_checksum_valid(raw[_V4_OFFSET:])):
            first_word, length, next_header, hop_limit, *addresses = _V6.unpack(raw)
            traffic_class, flow_label = first_word >> 20 & 0xFF, first_word & 0xFFFFF
            return cls(
                6, traffic_class, flow_label, length, next_header, hop_limit, *map(GID, addresses)
            )
        if not is_ipv4:
            raise ValueError(
                f"invalid GRH: expected an IPv6 header at byte 0 or an IPv4 header at byte"
                f" {_V4_OFFSET}, but found IP versions {raw[0] >> 4} and {raw[_V4_OFFSET] >> 4}"
            )
        _, traffic_class, length, _, _, hop_limit, protocol, _, *addresses = _V4.unpack(
            raw[_V4_OFFSET:]
        )
        gids = (GID(IPV4_PREFIX + address) for address in addresses)
        return cls(4, traffic_class, 0, max(0, length - _V4.size), protocol, hop_limit, *gids)


def _is_checksum_valid(header: bytes) -> bool:
    """Return whether the header's one's complement sum is all ones, as RFC 791 requires."""
    words = [
        int.from_bytes(header[offset : offset + 2], "big") for offset in range(0, len(header), 2)
    ]
    return sum(words) % 0xFFFF == 0
