"""Conversion between (host, port) tuples and `struct sockaddr`.

The host must be a numeric IP address.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from functools import lru_cache
from typing import TypeAlias

from aiordma._core.arguments import U32_MAX, integer, refusal
from aiordma._native import ffi
from aiordma._native import handles as h

Address: TypeAlias = tuple[str, int]
"""A tuple (host, port) with a numeric IP address, optionally with a scope: ``fe80::1%eth0``."""

# The layouts of struct sockaddr_in and sockaddr_in6 (ip(7), ipv6(7)). The port and the flow
# information are in network byte order, and all other integers are in host byte order.
_FAMILY = struct.Struct("=H")
_IPV4 = struct.Struct(">xxH4s8x")
_IPV6 = struct.Struct(">xxHI16s")
_SCOPE = struct.Struct("=I")
_SOCKADDR_IN6_SIZE = _IPV6.size + _SCOPE.size


# Cache conversions, because programs use the same few hosts repeatedly.
_parsed = lru_cache(ipaddress.ip_address)


@lru_cache
def _text(packed: bytes) -> str:
    return str(ipaddress.ip_address(packed))


def to_storage(address: Address) -> h.sockaddr_storage:
    """Convert an address to ``sockaddr_storage``. Raises ValueError for a non-numeric host."""
    match address:
        case (str(host), port):
            port = integer("port", port, 0, 0xFFFF)
        case _:
            wanted = "a tuple (host, port), such as ('192.0.2.1', 7471)"
            raise TypeError(refusal("address", wanted, address))
    try:
        ip = _parsed(host)
    except ValueError:
        raise ValueError(
            f"{host!r} is not a numeric IP address; resolve names with loop.getaddrinfo() first"
        ) from None
    storage = ffi.new("struct sockaddr_storage *")
    if isinstance(ip, ipaddress.IPv4Address):
        packed = _IPV4.pack(port, ip.packed)
        family = socket.AF_INET
    else:
        packed = _IPV6.pack(port, 0, ip.packed) + _SCOPE.pack(scope_id(ip.scope_id))
        family = socket.AF_INET6
    ffi.buffer(storage)[: len(packed)] = _FAMILY.pack(family) + packed[2:]
    return storage


def as_sockaddr(address: Address) -> tuple[h.sockaddr, object]:
    """Return a pointer to pass to C, and an object to keep alive while the pointer is in use."""
    storage = to_storage(address)
    return ffi.cast("struct sockaddr *", storage), storage


def scope_id(scope: str | None) -> int:
    """Return the index of a network interface, or 0 if ``scope`` is None.

    ``scope`` is the interface's name or index. Raises ValueError if no interface has that name.
    """
    if scope is None:
        return 0
    index = int(scope) if scope.isascii() and scope.isdecimal() and len(scope) <= 10 else -1
    try:
        return index if 0 <= index <= U32_MAX else socket.if_nametoindex(scope)
    except (OSError, ValueError):
        raise ValueError(f"network interface not found: {scope!r}") from None


def from_storage(storage: h.sockaddr_storage) -> Address | None:
    """Return the address in a ``struct sockaddr_storage``, or None if it does not contain one."""
    return _unpack(ffi.buffer(storage)[:_SOCKADDR_IN6_SIZE])


def from_sockaddr(sockaddr: h.sockaddr, length: int) -> Address | None:
    """Return the address in a ``struct sockaddr`` of the given length, or None if it is empty."""
    return _unpack(ffi.buffer(sockaddr, length)[:]) if length else None


def _unpack(data: bytes) -> Address | None:
    """Decode a socket address. Returns None if it is neither an IPv4 nor an IPv6 address."""
    (family,) = _FAMILY.unpack_from(data)
    if family == socket.AF_INET:
        port, packed = _IPV4.unpack_from(data)
        return _text(packed), port
    if family == socket.AF_INET6:
        port, _, packed = _IPV6.unpack_from(data)
        (scope,) = _SCOPE.unpack_from(data, _IPV6.size)
        host = _text(packed)
        return f"{host}%{_interface(scope)}" if scope else host, port
    return None


def _interface(scope: int) -> str:
    try:
        return socket.if_indextoname(scope)
    except OSError:
        return str(scope)
