"""Test that Wireshark's dissector agrees with the fields in `softdev/tests/roce/vectors`.

A C test (`test_roce_packets`) shows that the embedded device writes these packets byte for byte.
"""

from __future__ import annotations

import struct
from ipaddress import ip_address
from pathlib import Path

from softdev.tests.roce.make_vectors import CNP, FIELDS
from tests.processes import run

from .conftest import installed

VECTORS = Path(__file__).parents[1] / "roce" / "vectors"

# tshark's field names, mapped to the names of the same fields in a vector. Headers that tshark does
# not show have no entry.
NAMES = {
    "bth.opcode": "opcode",
    "bth.se": "solicited",
    "bth.m": "migreq",
    "bth.a": "ack_request",
    "bth.p_key": "pkey",
    "bth.destqp": "to",
    "bth.psn": "psn",
    "deth.q_key": "qkey",
    "deth.srcqp": "from",
    "reth.va": "address",
    "reth.r_key": "rkey",
    "reth.dmalen": "dma_length",
    "atomiceth.swapdt": "swap_add",
    "atomiceth.cmpdt": "compare",
    "aeth.syndrome": "syndrome",
    "aeth.msn": "msn",
    "atomicacketh.origremdt": "original",
    "immdt": "immediate",
    "ieth": "rkey",
}

# Opcodes that some versions of tshark do not know: XRC, CNP, FLUSH and ATOMIC WRITE.
PERHAPS_UNKNOWN = {*range(0xA0, 0xC0), CNP, 0x1C, 0x1D}


def capture(packets: list[list[str]]) -> bytes:
    """Return a libpcap file with the packets of the vectors, starting with their IP headers."""
    file = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 101)
    for source, destination, port, identification, *_, payload in packets:
        ends = ip_address(source).packed + ip_address(destination).packed
        udp = struct.pack(">HHHH", int(port, 16), 4791, 8 + len(payload) // 2, 0)
        udp += bytes.fromhex(payload)
        if len(ends) == 8:
            length = 20 + len(udp)
            ip = struct.pack(
                ">BBHHHBBH", 0x45, 0, length, int(identification, 16), 0x4000, 64, 17, 0
            )
        else:
            ip = struct.pack(">IHBB", 6 << 28, len(udp), 17, 64)
        packet = ip + ends + udp
        file += struct.pack("<IIII", 0, 0, len(packet), len(packet)) + packet
    return file


def number(name: str, text: str) -> int:
    """Parse a value that tshark printed: a boolean, a number, or hexadecimal bytes."""
    return int({"True": "1", "False": "0"}.get(text, text), 16 if name in {"immdt", "ieth"} else 0)


def test_tshark_decodes_the_encoded_header_fields(tmp_path: Path) -> None:
    """There must be no complaints. RPC over RDMA is disabled, because the payload is random."""
    installed("tshark")
    packets = [line.split() for line in VECTORS.read_text().splitlines()]
    (tmp_path / "packets").write_bytes(capture(packets))
    columns = ["_ws.expert", "infiniband.invariant.crc", *(f"infiniband.{it}" for it in NAMES)]
    options = [f"-e{column}" for column in columns]
    options += [
        "-Eseparator=;",
        "-Eoccurrence=f",
        "-oudp.ignore_ipv6_zero_checksum:TRUE",
        "--disable-protocol=rpcordma",
    ]
    done = run("tshark", "-r", str(tmp_path / "packets"), "-Tfields", *options, check=True)
    rows = [line.split(";") for line in done.stdout.splitlines()]
    shown = set()
    for packet, (complaint, icrc, *values) in zip(packets, rows, strict=True):
        vector = dict(zip(FIELDS, (int(it, 16) for it in packet[4:-1]), strict=True))
        read = {it: number(it, value) for it, value in zip(NAMES, values, strict=True) if value}
        assert not complaint
        assert read == {it: vector[NAMES[it]] for it in read}
        if read["bth.opcode"] not in PERHAPS_UNKNOWN:
            assert int(icrc, 0) == int(packet[-1][-8:], 16)
            shown |= {NAMES[it] for it in read}
            # Every field that is not 0 in the vector must be in a header that tshark shows.
            left = {it for it in vector if vector[it]} - {NAMES[it] for it in read}
            assert left <= {"fecn", "becn", "length"}
    assert shown == set(NAMES.values())
