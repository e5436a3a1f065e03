"""Test global route headers, as a card and as a RoCE v2 device put them in front of a datagram."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest

from aiordma.verbs import GID, GRH, GRH_SIZE

SOURCE, TARGET = IPv6Address("2001:db8::1"), IPv6Address("2001:db8::2")
V6 = (
    (6 << 28 | 0xAB << 20 | 0x12345).to_bytes(4, "big")
    + (100).to_bytes(2, "big")
    + bytes([0x1B, 63])
    + SOURCE.packed
    + TARGET.packed
)
# The fields are the version and IHL, type of service, total length, identification, fragment
# offset, TTL, protocol (UDP), checksum, source and destination.
V4 = bytes.fromhex("45 28 0078 1234 4000 40 11 0000") + bytes([10, 9, 9, 1]) + bytes([10, 9, 9, 2])


def with_sum(header: bytes) -> bytes:
    """Return the IPv4 header with its checksum (RFC 1071)."""
    total = sum(int.from_bytes(header[at : at + 2], "big") for at in range(0, 20, 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return header[:10] + (total ^ 0xFFFF).to_bytes(2, "big") + header[12:]


def test_grh_parses_ipv6_header() -> None:
    header = GRH.parse(V6 + b"payload")
    assert header == GRH(
        version=6,
        traffic_class=0xAB,
        flow_label=0x12345,
        payload_length=100,
        next_header=0x1B,
        hop_limit=63,
        sgid=GID(SOURCE.packed),
        dgid=GID(TARGET.packed),
    )


@pytest.mark.parametrize("before", [bytes(20), b"\x60" + bytes(19), b"\xff" * 20])
def test_grh_parses_ipv4_header_in_the_last_20_bytes(before: bytes) -> None:
    """Annex A17.4.5.2 leaves the bytes before the header undefined."""
    header = GRH.parse(bytearray(before + with_sum(V4)))
    assert header.version == 4
    assert (header.traffic_class, header.hop_limit, header.next_header) == (0x28, 64, 17)
    assert header.payload_length == 0x78 - 20
    assert header.sgid == GID.from_ip(IPv4Address("10.9.9.1"))
    assert header.dgid == GID.from_ip(IPv4Address("10.9.9.2"))
    assert str(header.sgid) == "::ffff:10.9.9.1"


def test_grh_parse_detects_the_ip_version() -> None:
    # A datagram that a device sends to itself has no IPv4 checksum. Byte 0 rules out IPv6 here,
    # because its version is not 6.
    assert GRH.parse(bytes(20) + V4).version == 4
    # An IPv6 address can look like the start of an IPv4 header. The checksum tells them apart.
    raw = bytearray(V6)
    raw[20] = 0x45
    assert GRH.parse(raw).version == 6
    with pytest.raises(ValueError, match="invalid GRH"):
        GRH.parse(b"\x10" * GRH_SIZE)


@pytest.mark.parametrize("size", [0, 1, GRH_SIZE - 1])
def test_grh_parse_rejects_short_input(size: int) -> None:
    with pytest.raises(ValueError, match=f"a GRH must be 40 bytes long, not {size}"):
        GRH.parse(bytes(size))
