"""Tests that the packed layouts match the compiler's."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, cast

import pytest

from aiordma._native import COMPLETION, RECV, SEND, SGE, CompletionArray, copy_of, ffi
from aiordma.verbs import PortState

# Members in format order, as the packers pass them. A union appears as its first member.
LAYOUTS: list[tuple[struct.Struct, str, str]] = [
    (
        COMPLETION,
        "struct aiordma_completion",
        "wr_id status opcode vendor_err byte_len imm_data qp_num src_qp wc_flags",
    ),
    (
        SEND,
        "struct aiordma_send",
        "wr_id remote_addr compare_add swap bind_length rkey remote_srqn imm_data opcode send_flags"
        " first_sge num_sge tso_header_size tso_mss",
    ),
    (RECV, "struct aiordma_recv", "wr_id first_sge num_sge"),
    (SGE, "struct ibv_sge", "addr length lkey"),
]


def places(name: str) -> list[tuple[str, Any]]:
    """Return the members of a structure, but only the first of each union."""
    first: dict[int, tuple[str, Any]] = {}
    for field, info in ffi.typeof(name).fields:
        described = cast(Any, info)
        there = first.setdefault(described.offset, (field, described))
        assert ffi.sizeof(there[1].type) == ffi.sizeof(described.type), field
    return list(first.values())


def test_work_request_fields_share_the_expected_offsets() -> None:
    """`_shared_union_values` in work_request.py depends on this layout."""
    by_offset: dict[int, list[str]] = {}
    for field, info in ffi.typeof("struct aiordma_send").fields:
        by_offset.setdefault(cast(Any, info).offset, []).append(field)
    shared = [fields for fields in by_offset.values() if len(fields) > 1]
    assert shared == [
        ["remote_addr", "ah", "mw"],
        ["compare_add", "mr", "tso_header"],
        ["swap", "bind_addr"],
        ["bind_length", "flush_length"],
        ["rkey", "remote_qpn"],
        ["remote_srqn", "remote_qkey", "bind_access"],
        ["imm_data", "invalidate_rkey"],
        ["tso_header_size", "flush_types"],
        ["tso_mss", "flush_level"],
    ]


@pytest.mark.parametrize(("layout", "name", "fields"), LAYOUTS)
def test_struct_formats_match_the_compiled_layouts(
    layout: struct.Struct, name: str, fields: str
) -> None:
    members = places(name)
    assert [field for field, _ in members] == fields.split()
    assert layout.size == ffi.sizeof(name)
    sizes = {"Q": 8, "I": 4, "H": 2}
    codes = struct.unpack(layout.format, bytes(layout.size))
    assert len(codes) == len(members)
    # Write one field at a time at the compiler's offset. All other fields must read as zero.
    for index, (field, described) in enumerate(members):
        data = bytearray(layout.size)
        size = ffi.sizeof(described.type)
        assert size in sizes.values()
        data[described.offset : described.offset + size] = (index + 1).to_bytes(size, "little")
        values = layout.unpack(data)
        assert values[index] == index + 1, field
        assert sum(values) == index + 1, field


def test_completion_records_are_unaffected_by_reuse_of_the_array() -> None:
    room = CompletionArray(2)
    view = ffi.buffer(room.pointer)
    view[0 : COMPLETION.size] = COMPLETION.pack(1, 2, 3, 4, 5, 6, 7, 8, 9)
    records = room.records(1)
    view[0 : COMPLETION.size] = bytes(COMPLETION.size)
    assert [record for record, _ in records] == [(1, 2, 3, 4, 5, 6, 7, 8, 9)]
    assert list(room.records(0)) == []


class Port(NamedTuple):
    number: int
    state: PortState
    lid: int
    flags: int


def test_c_struct_fields_are_copied_by_name_and_converted() -> None:
    """The order of fields may differ. Fields given as arguments are not copied."""
    attr = ffi.new("struct ibv_port_attr *", {"flags": 7, "state": 4, "lid": 9})
    copy = copy_of(attr, Port, number=1)
    assert copy == Port(1, PortState.ACTIVE, 9, 7)
    assert copy.state is PortState.ACTIVE
