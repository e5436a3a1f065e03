"""Tests of converting socket addresses to C structures and back."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._native import ffi
from aiordma.cm.address import from_storage, to_storage


@given(st.ip_addresses(), st.integers(0, 65535))
def test_storage_round_trips_addresses(ip: object, port: int) -> None:
    assert from_storage(to_storage((str(ip), port))) == (str(ip), port)


def test_storage_layout_matches_sockaddr() -> None:
    data = ffi.buffer(to_storage(("10.9.9.1", 0x1234)))[:]
    assert data[:2] == socket.AF_INET.to_bytes(2, "little")
    assert data[2:8] == b"\x12\x34\x0a\x09\x09\x01"
    data = ffi.buffer(to_storage(("fd09:9::1", 0x1234)))[:]
    assert data[:2] == socket.AF_INET6.to_bytes(2, "little")
    assert data[2:4] == b"\x12\x34"
    assert data[8:24] == socket.inet_pton(socket.AF_INET6, "fd09:9::1")


def test_storage_keeps_scope_of_link_local_address() -> None:
    assert from_storage(to_storage(("fe80::1%lo", 1))) == ("fe80::1%lo", 1)
    assert from_storage(to_storage(("fe80::1%1", 1))) == ("fe80::1%lo", 1)
    assert from_storage(to_storage(("fe80::1%4000000", 1))) == ("fe80::1%4000000", 1)
    for scope in ("nowhere7", "4294967296", "9" * 5000, "\u0663", "\ud800", "a\0b"):
        with pytest.raises(ValueError, match="network interface not found: '"):
            to_storage((f"fe80::1%{scope}", 1))


def test_from_storage_returns_none_for_unspecified_family() -> None:
    assert from_storage(ffi.new("struct sockaddr_storage *")) is None


@pytest.mark.parametrize("host", ["localhost", "", "10.9.9", "::g"])
def test_to_storage_rejects_host_names(host: str) -> None:
    with pytest.raises(ValueError, match="resolve names with"):
        to_storage((host, 1))


@pytest.mark.parametrize("port", [-1, 65536])
def test_to_storage_rejects_ports_out_of_range(port: int) -> None:
    with pytest.raises(ValueError, match=f"port must be an int from 0 to 65535, not {port}"):
        to_storage(("::1", port))
