"""Make RoCE v2 packets of every opcode with Scapy, for `vectors` in this folder.

    python -m softdev.tests.roce.make_vectors >softdev/tests/roce/vectors

This program needs the package scapy. Scapy makes the IP, UDP and BTH headers and computes the ICRC.
The other headers are packed here, from a separate list of their fields.

Each line is a packet: source, destination, source port, identification, the fields of FIELDS, and
the UDP payload in hexadecimal. The fields that the ICRC does not cover (class, flow label, hop
limit) are random.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address
from typing import Any

# The names of the fields in the order in which a line contains them. Their values are hexadecimal.
FIELDS = (
    "opcode", "solicited", "migreq", "fecn", "becn", "ack_request", "pkey", "to", "psn",
    "qkey", "from", "srq", "flush", "address", "rkey", "dma_length", "swap_add", "compare",
    "syndrome", "msn", "original", "immediate", "length",
)  # fmt: skip

# Pairs of a field and its size in bytes. Reserved bytes have an empty name.
DETH = (("qkey", 4), ("", 1), ("from", 3))
XRCETH = (("", 1), ("srq", 3))
FETH = (("", 3), ("flush", 1))
RETH = (("address", 8), ("rkey", 4), ("dma_length", 4))
ATOMICETH = (("address", 8), ("rkey", 4), ("swap_add", 8), ("compare", 8))
AETH = (("syndrome", 1), ("msn", 3))
ATOMICACKETH = (("original", 8),)
IMMDT = (("immediate", 4),)
IETH = (("rkey", 4),)

ANY = None
CNP = 0x81

# Operations with their headers and payload sizes, grouped by the services that support them.
SENDS = {
    0x00: ((), ANY), 0x01: ((), ANY), 0x02: ((), ANY), 0x03: ((IMMDT,), ANY),
    0x04: ((), ANY), 0x05: ((IMMDT,), ANY),
    0x06: ((RETH,), ANY), 0x07: ((), ANY), 0x08: ((), ANY), 0x09: ((IMMDT,), ANY),
    0x0A: ((RETH,), ANY), 0x0B: ((RETH, IMMDT), ANY),
}  # fmt: skip
RELIABLE = {
    0x0C: ((RETH,), 0), 0x13: ((ATOMICETH,), 0), 0x14: ((ATOMICETH,), 0),
    0x16: ((IETH,), ANY), 0x17: ((IETH,), ANY), 0x1C: ((FETH, RETH), 0), 0x1D: ((RETH,), 8),
}  # fmt: skip
RESPONSES = {
    0x0D: ((AETH,), ANY), 0x0E: ((), ANY), 0x0F: ((AETH,), ANY), 0x10: ((AETH,), ANY),
    0x11: ((AETH,), 0), 0x12: ((AETH, ATOMICACKETH), 0),
}  # fmt: skip

Layout = tuple[tuple[tuple[tuple[str, int], ...], ...], int | None]


def layouts() -> Iterator[tuple[int, Layout]]:
    """Yield each opcode with its headers and the size of its payload."""
    for operation, (headers, length) in (SENDS | RELIABLE | RESPONSES).items():
        xrc = () if operation in RESPONSES else (XRCETH,)
        yield operation, (headers, length)
        yield 0xA0 | operation, ((*xrc, *headers), length)
        if operation in SENDS:
            yield 0x20 | operation, (headers, length)
    yield 0x64, ((DETH,), ANY)
    yield 0x65, ((DETH, IMMDT), ANY)
    yield CNP, ((), 16)


def packet(chance: random.Random, opcode: int, layout: Layout, *, ipv6: bool) -> str:
    """Return a line of `vectors` with random fields."""
    scapy: Any = importlib.import_module("scapy.all")
    roce: Any = importlib.import_module("scapy.contrib.roce")
    headers, length = layout
    length = chance.randrange(100) if length is None else length
    fields = dict.fromkeys(FIELDS, 0) | {"opcode": opcode, "length": length}
    for name in ("solicited", "migreq", "fecn", "becn", "ack_request"):
        fields[name] = chance.getrandbits(1)
    fields |= {name: chance.getrandbits(bits) for name, bits in (("pkey", 16), ("to", 24))}
    fields["psn"] = chance.getrandbits(24)
    extended = b""
    for name, size in (field for header in headers for field in header):
        value = chance.getrandbits(6 if name == "flush" else 8 * size) if name else 0
        extended += value.to_bytes(size)
        if name:
            fields[name] = value
    payload = bytes(16) if opcode == CNP else chance.randbytes(length)
    ports = {"sport": chance.randrange(0xC000, 0x10000), "dport": 4791}
    identification = 0 if ipv6 else chance.getrandbits(16)
    private = (IPv6Address, b"\xfd", 15) if ipv6 else (IPv4Address, b"\x0a", 3)
    address, first, rest = private
    ends = [str(address(first + chance.randbytes(rest))) for _ in range(2)]
    if ipv6:
        below = scapy.IPv6(
            src=ends[0], dst=ends[1], tc=chance.getrandbits(8), fl=chance.getrandbits(20),
            hlim=chance.getrandbits(8),
        )  # fmt: skip
    else:
        below = scapy.IP(
            src=ends[0], dst=ends[1], id=identification, flags="DF", tos=chance.getrandbits(8),
            ttl=chance.getrandbits(8),
        )  # fmt: skip
    bth = roce.BTH(
        opcode=opcode, solicited=fields["solicited"], migreq=fields["migreq"], padcount=-length % 4,
        pkey=fields["pkey"], fecn=fields["fecn"], becn=fields["becn"], dqpn=fields["to"],
        ackreq=fields["ack_request"], psn=fields["psn"],
    )  # fmt: skip
    whole = below / scapy.UDP(**ports) / bth / scapy.Raw(extended + payload + bytes(-length % 4))
    built = bytes(whole)[40 + 8 if ipv6 else 20 + 8 :]
    assert len(built) == 12 + len(extended) + length + -length % 4 + 4
    numbers = " ".join(f"{fields[name]:x}" for name in FIELDS)
    return f"{ends[0]} {ends[1]} {ports['sport']:x} {identification:x} {numbers} {built.hex()}"


def main() -> None:
    """Print two packets of each opcode, one over IPv4 and one over IPv6."""
    chance = random.Random(4791)
    for opcode, layout in sorted(layouts(), key=lambda it: it[0]):
        for ipv6 in (False, True):
            print(packet(chance, opcode, layout, ipv6=ipv6))


if __name__ == "__main__":
    main()
