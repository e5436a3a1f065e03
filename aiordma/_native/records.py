"""C structures as records, and arrays of requests and completions that are converted together.

Reading the members of a C structure costs about 190 ns per completion, but unpacking an array costs
about 50 ns (measured here). The layouts therefore repeat native/verbs/interface.h, and a test
compares every size and offset.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_type_hints

from ._lib import ffi

if TYPE_CHECKING:
    from .handles import (
        IntegerPointer,
        aiordma_completion,
        aiordma_completion_more,
        aiordma_recv,
        aiordma_send,
        ibv_sge,
    )

T = TypeVar("T")

Record: TypeAlias = tuple[int, int, int, int, int, int, int, int, int]
"""wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags."""

More: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int]
"""timestamp, wallclock_ns, tm_tag, slid, pkey_index, sl, dlid_path_bits, cvlan, flow_tag,
tm_priv."""

COMPLETION = struct.Struct("=Q8I")
MORE = struct.Struct("=3Q7I4x")
SEND = struct.Struct("=5Q7I2H")
RECV = struct.Struct("=Q2I")
SGE = struct.Struct("=Q2I")


class CompletionArray:
    """Arrays of ``capacity`` completions and their extended fields. Not thread-safe."""

    __slots__ = ("_bytes", "_more_bytes", "capacity", "extended_fields", "pointer")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.pointer: aiordma_completion = ffi.new("struct aiordma_completion[]", capacity)
        self.extended_fields: aiordma_completion_more = ffi.new(
            "struct aiordma_completion_more[]", capacity
        )
        self._bytes = ffi.buffer(self.pointer)
        self._more_bytes = ffi.buffer(self.extended_fields)

    def records(self, count: int) -> Iterator[tuple[Record, More]]:
        """Copy the first ``count`` completions, and return an iterator over them as tuples."""
        records = COMPLETION.iter_unpack(self._bytes[: count * COMPLETION.size])
        return zip(records, MORE.iter_unpack(self._more_bytes[: count * MORE.size]), strict=True)


class RequestArray:
    """Arrays of work requests and their scatter/gather entries. Not thread-safe."""

    __slots__ = (
        "_capacities", "posted", "recvs", "recvs_bytes", "sends", "sends_bytes", "sges",
        "sges_bytes",
    )  # fmt: skip

    def __init__(self) -> None:
        self._capacities = 0, 0  # of requests and of scatter/gather entries
        self.posted: IntegerPointer = ffi.new("uint32_t *")
        self.make_room(1, 1)

    def make_room(self, requests: int, sges: int) -> None:
        """Grow the arrays if necessary. Their contents may be lost."""
        if requests <= self._capacities[0] and sges <= self._capacities[1]:
            return
        self._capacities = max(self._capacities[0], requests), max(self._capacities[1], sges)
        self.sends: aiordma_send = ffi.new("struct aiordma_send[]", self._capacities[0])
        self.recvs: aiordma_recv = ffi.new("struct aiordma_recv[]", self._capacities[0])
        self.sges: ibv_sge = ffi.new("struct ibv_sge[]", self._capacities[1])
        self.sends_bytes = ffi.buffer(self.sends)
        self.recvs_bytes = ffi.buffer(self.recvs)
        self.sges_bytes = ffi.buffer(self.sges)


_types = cache(get_type_hints)


def copy_of(structure: object, record: Callable[..., T], **overrides: object) -> T:
    """Copy a C structure to a named tuple, converting each member to the type of its field.

    Values in `overrides` replace the members with the same names.
    """
    types: dict[str, Callable[[Any], object]] = _types(record)
    return record(
        **{
            name: overrides[name] if name in overrides else convert(getattr(structure, name))
            for name, convert in types.items()
        }
    )
