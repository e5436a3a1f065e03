"""GIDs, GID table entries, and address vectors."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Self, TypeAlias

from aiordma._core.arguments import U32_MAX, instance, integer, refusal
from aiordma._native import copy_of, ffi
from aiordma._native import handles as h

from .enums import GIDType

IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


# The prefix of IPv4-mapped IPv6 addresses (RFC 4291, section 2.5.5.2).
IPV4_PREFIX = bytes(10) + b"\xff\xff"
_ZERO = bytes(16)


@lru_cache
def _packed(address: str | IPAddress) -> bytes:
    parsed = ipaddress.ip_address(address)
    return parsed.packed if parsed.version == 6 else IPV4_PREFIX + parsed.packed


@dataclass(frozen=True, slots=True, order=True)
class GID:
    """A global identifier (GID): 16 bytes in network byte order, laid out like an IPv6 address."""

    raw: bytes

    def __post_init__(self) -> None:
        raw = self.raw
        if not isinstance(raw, bytes):
            if not isinstance(raw, bytearray | memoryview):
                hint = "convert the text of an address with GID.from_ip()"
                raise TypeError(refusal("raw", "16 bytes", raw, hint))
            raw = bytes(raw)
            object.__setattr__(self, "raw", raw)
        if len(raw) != 16:
            raise ValueError(f"a GID must be 16 bytes long, not {len(raw)}")

    @classmethod
    def from_ip(cls, address: str | IPAddress) -> Self:
        """Return the GID for an IP address. The IPv4 address a.b.c.d becomes ::ffff:a.b.c.d.

        Raises:
            TypeError: If the address is not a str, an IPv4Address or an IPv6Address. Numbers are
                not accepted.
        """
        if not isinstance(address, str) and not hasattr(address, "packed"):
            raise TypeError(refusal("address", "a str, an IPv4Address or an IPv6Address", address))
        return cls(_packed(address))

    @property
    def ip(self) -> IPAddress:
        """The GID as an IP address. An IPv4-mapped GID becomes an IPv4Address."""
        address = ipaddress.IPv6Address(self.raw)
        return address.ipv4_mapped or address

    @property
    def is_ipv4(self) -> bool:
        """Whether `ip` is an IPv4 address."""
        return self.raw.startswith(IPV4_PREFIX)

    @property
    def is_zero(self) -> bool:
        """Whether the GID is all zeros, as in an empty table entry."""
        return self.raw == _ZERO

    def __str__(self) -> str:
        ip = self.ip
        return f"::ffff:{ip}" if ip.version == 4 else str(ip)

    def __repr__(self) -> str:
        return f"GID({str(self)!r})"


class GIDEntry(NamedTuple):
    """A GID table entry of a port. ``ndev`` is the name of the network interface, if any."""

    gid: GID
    gid_index: int
    port_num: int
    gid_type: GIDType
    ndev: str

    @classmethod
    def read(cls, entry: h.ibv_gid_entry) -> Self:
        """Create an entry from a ``struct ibv_gid_entry``."""
        try:
            ndev = socket.if_indextoname(entry.ndev_ifindex) if entry.ndev_ifindex else ""
        except OSError:  # the interface was removed or is in another network namespace
            ndev = ""
        return cls(
            GID(ffi.buffer(entry.gid.raw)[:16]),
            entry.gid_index,
            entry.port_num,
            GIDType(entry.gid_type),
            ndev,
        )

    def __str__(self) -> str:
        """Return the index, GID, GID type and interface as text for error messages."""
        kind = self.gid_type.name.replace("ROCE_V", "RoCE v")
        ndev = f", {self.ndev}" if self.ndev else ""
        return f"GID index {self.gid_index} ({self.gid}, {kind}{ndev})"

    def can_reach(self, to: GID) -> bool:
        """Return whether packets from this GID can reach the GID ``to``.

        Packets cannot be sent from or to an empty GID. They cannot pass between an IPv4 GID and an
        IPv6 GID, except on InfiniBand, where GIDs are not IP addresses.
        """
        if self.gid.is_zero or to.is_zero:
            return False
        return self.gid_type is GIDType.IB or self.gid.is_ipv4 == to.is_ipv4

    def problem(self, to: GID | None = None) -> str:
        """Return why this entry is a poor source address, or an empty string if it is a good one.

        Even an entry with a problem may work within a link or a host.

        Args:
            to: The peer's GID; None means any peer.
        """
        if self.gid.is_zero:
            return "is empty"
        if self.gid_type is GIDType.IB:
            return ""
        if to is not None and not self.can_reach(to):
            return f"is an IPv{self.gid.ip.version} address, which cannot reach {to}"
        if self.gid_type is GIDType.ROCE_V1:
            return "uses RoCE v1, which is not routable and not compatible with RoCE v2"
        for is_local, reach in (("is_link_local", "link"), ("is_loopback", "host")):
            if getattr(self.gid.ip, is_local) and not (to and getattr(to.ip, is_local)):
                return f"can reach only peers on the same {reach}"
        return ""

    def preference(self) -> tuple[int, int, int]:
        """Return the sort key for choosing an entry automatically.

        Routable RoCE v2 addresses come first. Link-local, loopback and RoCE v1 addresses come last,
        because routers do not forward their packets. Entries with equal keys keep the order of the
        table.
        """
        ip, reach_rank = self.gid.ip, 0
        if self.gid_type is not GIDType.IB:  # IB's default subnet prefix is link-local (fe80::/64)
            reach_rank = 2 if ip.is_link_local else int(ip.is_loopback)
        type_rank = {GIDType.ROCE_V2: 0, GIDType.IB: 0, GIDType.ROCE_V1: 1}.get(self.gid_type, 2)
        return (self.gid.is_zero, type_rank, reach_rank)


def best(entries: Sequence[GIDEntry]) -> GIDEntry:
    """Return the entry preferred as the source address."""
    return entries[0] if len(entries) == 1 else min(entries, key=GIDEntry.preference)


# The maximum values of the numeric fields in struct ibv_ah_attr.
_MAX_AH_ATTR = {
    "dlid": 0xFFFF,
    "sl": 15,
    "src_path_bits": 0xFF,
    "static_rate": 0xFF,
    "port_num": 0xFF,
}
# The maximum values of the numeric fields in struct ibv_global_route.
_MAX_GLOBAL_ROUTE = {
    "sgid_index": 0xFF,
    "hop_limit": 0xFF,
    "traffic_class": 0xFF,
    "flow_label": U32_MAX,
}


class AddressVector(NamedTuple):
    """The route to a peer (``struct ibv_ah_attr``). See IBTA volume 1, clause 11.2.2.1.

    A route with a ``dgid`` is global. RoCE routes are always global. With a ``hop_limit`` of 0 or
    1, packets cannot pass through a router. ``dlid`` is the peer's LID, which RoCE does not use.
    """

    dgid: GID | None = None
    sgid_index: int = 0
    hop_limit: int = 64
    traffic_class: int = 0
    flow_label: int = 0
    dlid: int = 0
    sl: int = 0
    src_path_bits: int = 0
    static_rate: int = 0
    port_num: int = 1

    def fields(self) -> dict[str, object]:
        """Return the fields of ``struct ibv_ah_attr`` in a form accepted by cffi."""

        def numbers(limits: dict[str, int]) -> dict[str, object]:
            return {
                name: integer(name, getattr(self, name), 0, maximum)
                for name, maximum in limits.items()
            }

        fields = numbers(_MAX_AH_ATTR)
        if self.dgid is not None:
            dgid = instance("dgid", self.dgid, GID, "a GID, such as GID(raw) or GID.from_ip(text)")
            fields["is_global"] = 1
            fields["grh"] = {"dgid": {"raw": dgid.raw}, **numbers(_MAX_GLOBAL_ROUTE)}
        return fields

    @classmethod
    def read(cls, attr: h.ibv_ah_attr) -> Self:
        """Create an address vector from a ``struct ibv_ah_attr``."""
        dgid = GID(ffi.buffer(attr.grh.dgid.raw)[:16]) if attr.is_global else None
        route = {name: getattr(attr.grh, name) for name in _MAX_GLOBAL_ROUTE}
        return copy_of(attr, cls, dgid=dgid, **route)


def vector_fields(name: str, value: object) -> dict[str, object]:
    """Check that ``value`` is an AddressVector, and return the fields of its C structure.

    If ``value`` has another type, raise a TypeError that mentions the argument ``name``.
    """
    wanted = "an AddressVector, such as AddressVector(dgid=..., sgid_index=...)"
    return instance(name, value, AddressVector, wanted).fields()
