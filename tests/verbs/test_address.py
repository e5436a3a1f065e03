"""Test GIDs and the choice among them."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._native import ffi
from aiordma.verbs import GID, AddressVector, GIDEntry, GIDType


@given(st.ip_addresses())
def test_gid_from_ip_round_trips_ip_addresses(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    gid = GID.from_ip(ip)
    assert gid.ip == (mapped or ip)
    assert gid.is_ipv4 == (gid.ip.version == 4)


def test_gid_formats_as_ipv6_and_rejects_invalid_input() -> None:
    gid = GID.from_ip("10.9.9.1")
    assert str(gid) == "::ffff:10.9.9.1"
    assert repr(gid) == "GID('::ffff:10.9.9.1')"
    assert str(GID.from_ip("fe80::1")) == "fe80::1"
    assert not gid.is_zero
    assert GID(bytes(16)).is_zero
    with pytest.raises(ValueError, match="16 bytes long, not 4"):
        GID(b"1234")
    assert len({gid, GID.from_ip("::ffff:10.9.9.1")}) == 1
    for number in (5, b"\0\0\0\0"):
        with pytest.raises(
            TypeError, match="address must be a str, an IPv4Address or an IPv6Address, not "
        ):
            GID.from_ip(number)  # type: ignore[arg-type]


def entry(ip: str, kind: GIDType = GIDType.ROCE_V2, index: int = 0) -> GIDEntry:
    return GIDEntry(GID.from_ip(ip), index, 1, kind, "eth0")


@pytest.mark.parametrize(
    "table",
    [
        [entry("10.9.9.1"), entry("fe80::1")],
        [entry("fd09:9::1"), entry("fe80::1")],
        [entry("2001:db8::1"), entry("::1")],
        [entry("127.0.0.1"), entry("fe80::1")],
        [entry("10.9.9.1"), entry("10.9.9.1", GIDType.ROCE_V1)],
        [entry("fe80::1"), entry("::", GIDType.ROCE_V2)],
        [entry("fe80::1", GIDType.IB), entry("::", GIDType.IB)],
    ],
)
def test_gid_preference_ranks_routable_roce_v2_entries_first(table: list[GIDEntry]) -> None:
    assert min(table[::-1], key=GIDEntry.preference) == table[0]


def test_address_vector_round_trips_through_ibv_ah_attr() -> None:
    vector = AddressVector(
        dgid=GID.from_ip("10.9.9.1"),
        sgid_index=3,
        hop_limit=5,
        traffic_class=7,
        flow_label=0xFFFFF,
        dlid=0xBEEF,
        sl=2,
        src_path_bits=1,
        static_rate=4,
        port_num=2,
    )
    attr = ffi.new("struct ibv_qp_attr *", {"ah_attr": vector.fields()})
    assert AddressVector.read(attr.ah_attr) == vector
    attr = ffi.new("struct ibv_qp_attr *", {"ah_attr": AddressVector().fields()})
    assert attr.ah_attr.is_global == 0
    assert AddressVector.read(attr.ah_attr).dgid is None
