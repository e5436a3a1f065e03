"""A table of all Python decoders of bytes or text from outside of the process.

`tests/test_decoders.py` tests each decoder with arbitrary and with mutated input. It fails if a
function of `aiordma._core` or `aiordma._trace` that takes such input is in neither `DECODERS` nor
`NO_DECODERS`.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import click
import numpy as np
from hypothesis import strategies as st

from aiordma import Connection, arrays, rpc
from aiordma._core import (
    admission,
    fields,
    frames,
    handshake_layout,
    layout,
    protocol,
    refusal,
    strict_json,
)
from aiordma._core.region import TOKEN_SIZE, RegionToken
from aiordma._datapath.sealing import Sealing
from aiordma._native import ffi
from aiordma._trace import records as trace_records
from aiordma._trace.requests import requests
from aiordma._trace.runs import offsets, parse_runs
from aiordma._transport import encryption
from aiordma._transport.auth import NO_SECURITY
from aiordma._transport.connect_tcp import MAGIC, MESSAGE_SIZE, accepted_link, exchange_messages
from aiordma._transport.handshake import Action, Handshake
from aiordma._transport.tcp_link import REFUSED
from aiordma.cli.options import parse_sizes
from aiordma.cm.address import to_storage
from aiordma.errors import IntegrityError, ProtocolError, RejectedError, TraceFormatError
from aiordma.perf import wire
from aiordma.verbs import find_device
from aiordma.verbs._device.grh import GRH

from .core.test_handshake_layout import endpoints, hellos
from .core.test_protocol import messages
from .core.test_region import tokens
from .model.frames import pack_header, unpack_header
from .model.test_frames import entries, packed_bundle, unpacked_bundle
from .perf.test_wire import MESSAGES
from .trace.model import header, line
from .trace.test_records import records


@dataclass(frozen=True)
class Decoder:
    """A decoder to test, with valid inputs and the exceptions that other inputs may raise.

    `again` encodes a result, if possible. Decoding its output must return the same result. `covers`
    names functions of these packages as module.qualified_name.
    """

    decode: Callable[[bytes], Any]
    valid: st.SearchStrategy[bytes]
    errors: tuple[type[Exception], ...]
    again: Callable[[Any], bytes] | None = None
    covers: tuple[str, ...] = ()
    whole: bool = True
    """Whether truncation makes every valid input invalid."""


u8, u16, u32 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32))


def frame_header(kind: frames.FrameKind, control: int, data: int, imm: int | None) -> bytes:
    buffer = bytearray(frames.HEADER_SIZE)
    pack_header(buffer, 0, kind, control, data, imm=imm)
    return bytes(buffer)


def checked(data: bytes) -> None:
    layout.check_layout(data, what="thing", magic=b"AIOT", version=1, flags=3, size=20, padded=True)


def text(data: bytes) -> trace_records.Record:
    return trace_records.parse(data.decode(errors="replace"))


def runs(data: bytes) -> object:
    """Parse trace runs, align their clocks and find their requests, as `aiordma trace` does."""
    found = parse_runs(data, "file")
    offsets(found)
    return [requests(run) for run in found]


def offer(data: bytes) -> object:
    """Decode a request as the server of the TCP exchange does."""

    async def read() -> object:
        ours, theirs = socket.socketpair()
        with theirs:
            link = await accepted_link(ours, NO_SECURITY)
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            handshake = Handshake("tcp", NO_SECURITY, client=False)
            try:
                await exchange_messages(link, handshake, until=Action.CREATE)
                return handshake.remote, handshake.peer
            finally:
                link.release()

    return asyncio.run(read())


def answer(data: bytes) -> object:
    """Decode a response as the client does. Return the offer or the RejectedError."""
    try:
        return offer(data)
    except RejectedError as error:
        return error


def plan(data: bytes) -> None:
    """Apply a fault plan as AIORDMA_EMBEDDED_FAULTS does, then reset it."""
    device = find_device("embedded0")
    try:
        device.set_faults(data.decode(errors="replace"))
    finally:
        device.set_faults(None)


def sealing() -> Sealing:
    """Return a Sealing with the same key both ways. Its unencrypted first frames have passed."""
    made = encryption.new_sealing(memory_in_clear=False)
    made.start(encryption.TrafficKeys(bytes(32)), encryption.TrafficKeys(bytes(32)))
    made.sealed(b"")
    made.opened(b"")
    return made


def opened(data: bytes) -> bytes:
    return sealing().opened(data)


def remote_array(data: bytes) -> object:
    """Open an array in a 1,000-byte region. The bytes are never read."""
    conn = Mock(spec=Connection)
    conn.open_region.return_value = bytes(1000)
    return arrays.open_array(conn, bytes(TOKEN_SIZE) + data).shape


def field(name: str) -> Callable[[bytes], object]:
    """Return a decoder that unpacks msgpack and applies a field's codec."""
    codec = fields.__dict__[name].__metadata__[0]

    def decode(data: bytes) -> object:
        return codec.decode(protocol._unpack(data))

    return decode


packed_values = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(), st.text(),
    st.binary(), st.lists(st.integers(0, 9)), tokens().map(RegionToken.pack),
).map(protocol._pack)  # fmt: skip

arrays_of_numbers = st.lists(st.integers(0, 3), max_size=4).map(
    lambda shape: ["U8", shape, [3**at for at in range(len(shape))[::-1]]]
)

lines = records().map(lambda record: line(record).encode())
inner_lines = (
    records()
    .filter(lambda record: not isinstance(record, trace_records.Header | trace_records.End))
    .map(lambda record: line(record).encode())
)

DECODERS: dict[str, Decoder] = {
    "frame header": Decoder(
        unpack_header,
        st.one_of(
            st.builds(frame_header, st.sampled_from(frames.FrameKind), u8, u16, st.none()),
            st.builds(frame_header, st.just(frames.FrameKind.DATA), u8, u16, u32),
        ),
        (ProtocolError,),
        lambda found: frame_header(*found),
    ),
    "bundle of messages": Decoder(
        unpacked_bundle,
        entries.map(lambda found: packed_bundle(*found)),
        (ProtocolError,),
        lambda found: packed_bundle(*found),
        whole=False,
    ),
    "sealed frame": Decoder(
        opened,
        st.binary(max_size=2000).map(lambda data: sealing().sealed(data)),
        (IntegrityError,),
        lambda found: sealing().sealed(found),
    ),
    "control message": Decoder(
        protocol.decode,
        messages.map(protocol.encode),
        (ProtocolError,),
        protocol.encode,
        ("protocol.decode",),
    ),
    "hello": Decoder(
        handshake_layout.Hello.unpack,
        hellos.map(handshake_layout.Hello.pack),
        (ProtocolError,),
        handshake_layout.Hello.pack,
        ("handshake_layout.Hello.unpack",),
    ),
    "private data of the connection manager": Decoder(
        handshake_layout.Hello.unpack,
        st.builds(lambda hello, size: hello.pack().ljust(size, b"\0"), hellos, st.integers(0, 196)),
        (ProtocolError,),
        handshake_layout.Hello.pack,
        whole=False,
    ),
    "endpoint": Decoder(
        handshake_layout.Endpoint.unpack,
        endpoints.map(handshake_layout.Endpoint.pack),
        (ProtocolError,),
        handshake_layout.Endpoint.pack,
        ("handshake_layout.Endpoint.unpack",),
    ),
    "challenge": Decoder(
        admission.Challenge.unpack,
        st.builds(admission.Challenge, st.binary(min_size=32, max_size=32)).map(
            admission.Challenge.pack
        ),
        (ProtocolError,),
        admission.Challenge.pack,
        ("admission.Challenge.unpack",),
    ),
    "refusal": Decoder(
        refusal.unpack_refusal,
        st.text(max_size=30).map(refusal.pack_refusal),
        (),
        covers=("refusal.unpack_refusal",),
        whole=False,
    ),
    "text of JSON": Decoder(
        strict_json.parse_json,
        st.recursive(
            st.one_of(st.none(), st.booleans(), st.integers(), st.floats(-9, 9), st.text()),
            lambda it: st.lists(it, max_size=3) | st.dictionaries(st.text(), it, max_size=3),
        ).map(lambda value: json.dumps(value).encode()),
        (ValueError,),
        lambda value: json.dumps(value, ensure_ascii=False).encode(),
        ("strict_json.parse_json",),
        whole=False,
    ),
    "region token": Decoder(
        RegionToken.unpack,
        tokens().map(RegionToken.pack),
        (ProtocolError,),
        RegionToken.pack,
        ("region.RegionToken.unpack",),
    ),
    "first bytes of a layout": Decoder(
        checked,
        st.builds(lambda rest: b"AIOT\x01\x03" + rest, st.binary(min_size=14, max_size=14)),
        (ProtocolError,),
        None,
        ("layout.check_layout",),
        whole=False,
    ),
    **{
        f"field {name}": Decoder(
            field(name), packed_values, (ValueError, ProtocolError), whole=False
        )
        for name, value in vars(fields).items()
        if hasattr(value, "__metadata__")
    },
    "record of a trace": Decoder(
        text,
        lines,
        (ValueError,),
        lambda record: line(record).encode(),
        ("records.parse",),
        whole=False,
    ),
    "file of a trace": Decoder(
        runs,
        st.lists(inner_lines, max_size=6).map(
            lambda found: line(header()).encode() + b"".join(found)
        ),
        (TraceFormatError,),
        None,
        ("runs.parse_runs",),
        whole=False,
    ),
    "offer of the exchange over TCP": Decoder(
        offer,
        st.builds(
            lambda endpoint, hello: MAGIC + endpoint.pack() + hello.pack(), endpoints, hellos
        ).filter(lambda data: len(data) == MESSAGE_SIZE),
        (ProtocolError,),
    ),
    "answer of the exchange over TCP": Decoder(
        answer,
        st.text(max_size=30).map(lambda text: REFUSED + refusal.pack_refusal(text)),
        (ProtocolError,),
    ),
    "message of a measurement": Decoder(
        wire.unpack, st.one_of(*MESSAGES.values()).map(wire.pack), (ProtocolError,), wire.pack
    ),
    "message of a call": Decoder(
        lambda data: rpc._unpack(memoryview(data), *range(4)),
        st.builds(
            lambda kind, number, name, data: rpc._pack(kind, number, name) + data,
            *(st.integers(0, 3), st.integers(0, (1 << 64) - 1), st.text(max_size=60), st.binary()),
        ),
        (ProtocolError,),
        lambda found: rpc._pack(found.kind, found.number, found.name) + found.data,
        whole=False,
    ),
    "message of arrays": Decoder(
        arrays.unpack,
        st.dictionaries(
            st.text(max_size=9).filter(lambda name: name != "__metadata__"),
            st.builds(np.zeros, st.lists(st.integers(0, 3)), st.sampled_from(["f4", "u1", "c8"])),
            max_size=3,
        ).map(lambda found: b"".join(bytes(memoryview(it)) for it in arrays.pack(found))),
        (ValueError,),
    ),
    "token of an array": Decoder(
        remote_array, arrays_of_numbers.map(lambda it: json.dumps([*it, 0]).encode()), (ValueError,)
    ),
    "size for a command": Decoder(
        lambda data: parse_sizes(data.decode(errors="replace")),
        st.from_regex(r"[0-9]{1,9} ?([KMG](iB|B)?|B?)", fullmatch=True).map(str.encode),
        (click.BadParameter,),
        whole=False,
    ),
    "host and interface": Decoder(
        lambda data: bytes(ffi.buffer(to_storage((data.decode(errors="replace"), 1)))),
        st.sampled_from([b"127.0.0.1", b"::1", b"fe80::1%lo", b"fe80::1%4294967295"]),
        (ValueError,),
        whole=False,
    ),
    "header of a datagram": Decoder(
        GRH.parse,
        st.builds(
            lambda start, rest: start + rest,
            st.sampled_from([b"\x60", bytes(20) + b"\x45"]),
            st.binary(min_size=39, max_size=39),
        ),
        (ValueError,),
        whole=False,
    ),
    "plan of faults": Decoder(
        plan,
        st.lists(
            st.sampled_from(["seed=7", "loss=0.5@3-", "delay=2ms", "rate=9", "qp=17", "cut=@1"]),
            min_size=1,
            unique=True,
        ).map(lambda parts: ",".join(parts).encode()),
        (ValueError,),
        whole=False,
    ),
}

NO_DECODERS = {
    "admission.ticket": "a client's own ticket",
    "admission.TicketValidator.validate": (
        "bytes of fixed sizes; what is wrong with them is its result"
    ),
    "authentication.check_key": "this side's own key",
    "authentication.next_key": "a secret of this side's",
    "authentication.resume_key": "a secret of this side's",
    "authentication.proof": "bytes of fixed sizes that were decoded before",
    "authentication.is_valid_proof": "compares",
    "authentication.ticket_key": "this side's own key",
    "authentication.ticket_mac": "bytes of fixed sizes that were decoded before",
    "authentication.traffic_secrets": "bytes of fixed sizes that were decoded before",
    "refusal.is_missing_key_refusal": "compares",
    "timers.decode_ack_timeout": "an exponent of this side's",
    "timers.decode_rnr_timer": "an exponent of this side's",
}
"""Functions of these packages that take bytes, or are named as if, and decode nothing."""
