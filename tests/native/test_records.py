"""The packed layouts against the compiler's."""

from __future__ import annotations

import struct
from typing import Any, cast

import pytest

from aiordma._native import COMPLETION, RECV, SEND, SGE, CompletionArray, ffi

# In the order of the format, as the packers give them.
SEND_FIELDS = [
    "wr_id",
    "remote_addr",
    "compare_add",
    "swap",
    "rkey",
    "opcode",
    "send_flags",
    "imm_data",
    "first_sge",
    "num_sge",
]


@pytest.mark.parametrize(
    ("layout", "name", "fields"),
    [
        (
            COMPLETION,
            "struct aiordma_completion",
            [
                "wr_id",
                "status",
                "opcode",
                "vendor_err",
                "byte_len",
                "imm_data",
                "qp_num",
                "src_qp",
                "wc_flags",
            ],
        ),
        (SEND, "struct aiordma_send", SEND_FIELDS),
        (RECV, "struct aiordma_recv", ["wr_id", "first_sge", "num_sge"]),
        (SGE, "struct ibv_sge", ["addr", "length", "lkey"]),
    ],
)
def test_layout(layout: struct.Struct, name: str, fields: list[str]) -> None:
    ctype = ffi.typeof(name)
    assert [field for field, _ in ctype.fields] == fields
    assert layout.size == ffi.sizeof(name)
    sizes = {"Q": 8, "I": 4}
    codes = struct.unpack(layout.format, bytes(layout.size))
    assert len(codes) == len(fields)
    # Each field alone, at the compiler's offset, reads back as itself.
    for index, (field, info) in enumerate(ctype.fields):
        data = bytearray(layout.size)
        described = cast(Any, info)
        size = ffi.sizeof(described.type)
        assert size in sizes.values()
        data[described.offset : described.offset + size] = (index + 1).to_bytes(size, "little")
        values = layout.unpack(data)
        assert values[index] == index + 1, field
        assert sum(values) == index + 1, field


def test_records_do_not_change_when_the_room_is_used_again() -> None:
    room = CompletionArray(2)
    view = ffi.buffer(room.pointer)
    view[0 : COMPLETION.size] = COMPLETION.pack(1, 2, 3, 4, 5, 6, 7, 8, 9)
    records = room.records(1)
    view[0 : COMPLETION.size] = bytes(COMPLETION.size)
    assert list(records) == [(1, 2, 3, 4, 5, 6, 7, 8, 9)]
    assert list(room.records(0)) == []
