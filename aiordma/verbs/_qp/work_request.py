"""Work requests and their encoding as C structures."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aiordma import verbs
from aiordma._core.arguments import U32_MAX, U64_MAX, integer
from aiordma._native import RECV, SEND, SGE, RequestArray, ffi
from aiordma._native import handles as h

from .._device.enums import AccessFlags, PlacementType, SelectivityLevel, SendFlags, WROpcode
from .._device.resource import Resource


class ScatterGatherElement(NamedTuple):
    """A range of registered memory for a work request to use (``struct ibv_sge``)."""

    addr: int
    length: int
    lkey: int


class BindInfo(NamedTuple):
    """The memory to bind a type 2 window to (``struct ibv_mw_bind_info``).

    ``addr`` and ``length`` specify a range of the memory region ``mr``, and ``access`` contains the
    peer's rights. ``rkey`` is the window's new key, whose lowest 8 bits you choose
    (ibv_inc_rkey(3)). Posting the request sets the window's ``rkey`` attribute, so a single call
    must not bind the same window twice.
    """

    mw: Resource[h.ibv_mw]
    mr: verbs.MemoryRegion
    rkey: int
    addr: int
    length: int
    access: AccessFlags


class Segmentation(NamedTuple):
    """A segmented send's headers and segment size (TSO).

    Do not modify the headers until the send has completed. ``mss`` is the segment size in bytes.
    """

    header_addr: int
    header_size: int
    mss: int


class FlushInfo(NamedTuple):
    """The memory that a flush applies to, and the flush's guarantees.

    With SelectivityLevel.RANGE, a flush applies to ``length`` bytes at the request's
    ``remote_addr``. With SelectivityLevel.MR, it applies to the whole memory region identified by
    ``rkey``. When the flush completes, earlier writes to this memory have been placed as required
    by ``types``. See ibv_wr_flush in ibv_wr_post(3).
    """

    length: int
    types: PlacementType = PlacementType.GLOBAL
    level: SelectivityLevel = SelectivityLevel.RANGE


@dataclass(slots=True)
class SendWorkRequest:
    """A request for the send queue (``struct ibv_send_wr``). See ibv_post_send(3).

    - ``imm_data``: The immediate data, as a number in host byte order.
    - ``remote_addr`` and ``rkey``: The peer's memory, for writes, reads and atomics.
    - ``compare_add`` and ``swap``: The operands of an atomic. ``compare_add`` is the 64-bit number
      to compare with or to add, and ``swap`` is the new value. The previous value is stored in the
      only element of ``sges``, which must be 8 bytes long. An atomic write instead takes its new
      value from this element.
    - ``invalidate_rkey``: The key to invalidate, at the peer (SEND_WITH_INV) or on this side
      (LOCAL_INV).
    - ``ah``, ``remote_qpn`` and ``remote_qkey``: A datagram's destination. Keep the address handle
      open until the request has completed.
    - ``remote_srqn``: The number of the peer's shared receive queue, for XRC.
    - ``bind``, ``tso`` and ``flush``: Details of the BIND_MW, TSO and FLUSH operations.
    """

    wr_id: int
    opcode: WROpcode | int
    sges: Sequence[ScatterGatherElement] = ()
    send_flags: SendFlags | int = SendFlags.SIGNALED
    imm_data: int = 0
    remote_addr: int = 0
    rkey: int = 0
    compare_add: int = 0
    swap: int = 0
    invalidate_rkey: int = 0
    ah: Resource[h.ibv_ah] | None = None
    remote_qpn: int = 0
    remote_qkey: int = 0
    remote_srqn: int = 0
    bind: BindInfo | None = None
    tso: Segmentation | None = None
    flush: FlushInfo | None = None


@dataclass(slots=True)
class ReceiveWorkRequest:
    """A request for the receive queue (``struct ibv_recv_wr``). See ibv_post_recv(3)."""

    wr_id: int
    sges: Sequence[ScatterGatherElement] = ()


def one_sge(addr: int, length: int, lkey: int) -> tuple[ScatterGatherElement, ...]:
    """Return a one-element tuple for a range of memory, or an empty one if ``length`` is 0."""
    return (ScatterGatherElement(addr, length, lkey),) if length != 0 else ()


_U16_MAX = 0xFFFF

PACKING_ERRORS = (struct.error, TypeError, AttributeError, IndexError)
"""The exceptions raised when packing an invalid request. Callers then raise `packing_error`."""


def packing_error(
    label: str, error: Exception, requests: Sequence[SendWorkRequest | ReceiveWorkRequest]
) -> Exception:
    """Return an exception that explains why a queue's requests could not be packed.

    ``label`` is the queue's name.
    """
    if problem := wrong_requests(requests):
        return TypeError(f"{label}: {problem}")
    try:
        _check_numbers(requests)
    except (TypeError, ValueError) as field_error:
        return type(field_error)(f"{label}: {field_error}")
    return ValueError(f"{label}: a number is out of range: {error}")


def wrong_requests(requests: object) -> str:
    """Return why the requests cannot be posted, or an empty string if they can."""
    request_types = (SendWorkRequest, ReceiveWorkRequest)
    if isinstance(requests, request_types):
        return "requests must be a list; write [request]"
    if not isinstance(requests, Sequence):
        return f"requests must be a list, not {type(requests).__name__}"
    for wr in requests:
        if not isinstance(wr, request_types):
            return f"requests must be SendWorkRequest or ReceiveWorkRequest objects, not {wr!r:.60}"
        if problem := _sges_error(wr.sges):
            return problem
    return ""


# The maximum value of each integer field of a request, of its optional parts (_MAX_PART_FIELDS) and
# of a scatter/gather element (_MAX_SGE_FIELDS).
_MAX_REQUEST_FIELDS = {
    **dict.fromkeys(("wr_id", "remote_addr", "compare_add", "swap"), U64_MAX),
    **dict.fromkeys(("opcode", "send_flags", "imm_data", "rkey", "invalidate_rkey"), U32_MAX),
    **dict.fromkeys(("remote_qpn", "remote_qkey", "remote_srqn"), U32_MAX),
}
_MAX_PART_FIELDS = {
    "bind": {"addr": U64_MAX, "length": U64_MAX, "rkey": U32_MAX, "access": U32_MAX},
    "tso": {"header_addr": U64_MAX, "header_size": _U16_MAX, "mss": _U16_MAX},
    "flush": {"length": U64_MAX, "types": _U16_MAX, "level": _U16_MAX},
}
_MAX_SGE_FIELDS = {"addr": U64_MAX, "length": U32_MAX, "lkey": U32_MAX}


def _check_numbers(requests: Sequence[SendWorkRequest | ReceiveWorkRequest]) -> None:
    """Raise TypeError or ValueError for the first number that does not fit its field."""
    for wr in requests:
        for name, maximum in _MAX_REQUEST_FIELDS.items():
            integer(name, getattr(wr, name, 0), 0, maximum)
        for part, fields in _MAX_PART_FIELDS.items():
            if (value := getattr(wr, part, None)) is not None:
                for name, maximum in fields.items():
                    integer(f"{part}.{name}", getattr(value, name), 0, maximum)
        for sge in wr.sges:
            for (name, maximum), value in zip(_MAX_SGE_FIELDS.items(), sge, strict=True):
                integer(f"{name} of a ScatterGatherElement", value, 0, maximum)


def _sges_error(sges: object) -> str:
    """Return why a request's elements are invalid, or an empty string if they are valid."""
    wanted = "memory must be a list of ScatterGatherElement (from MemoryRegion.sge)"
    if isinstance(sges, ScatterGatherElement):
        return f"{wanted}, not a single one; write [element]"
    if not isinstance(sges, Sequence) or isinstance(sges, str | bytes | bytearray | memoryview):
        return f"{wanted}, not {type(sges).__name__}"
    for sge in sges:
        if not (isinstance(sge, tuple) and len(sge) == 3):
            return f"{wanted}, not of {type(sge).__name__}"
    return ""


_INVALIDATING = frozenset({WROpcode.SEND_WITH_INV, WROpcode.LOCAL_INV})


def _address(resource: Resource[h.ibv_ah] | Resource[h.ibv_mw] | verbs.MemoryRegion) -> int:
    return int(ffi.cast("uintptr_t", resource.pointer))


def _shared_union_values(wr: SendWorkRequest) -> tuple[int, int, int, int, int, int]:
    """Return the values of the first six unions in ``struct aiordma_send``, in order.

    See native/verbs/interface.h for the members of each union.
    """
    if (bind := wr.bind) is not None:
        mw, mr = _address(bind.mw), _address(bind.mr)
        return mw, mr, bind.addr, bind.length, bind.rkey, int(bind.access)
    if (flush := wr.flush) is not None:
        return wr.remote_addr, 0, 0, flush.length, wr.rkey, wr.remote_srqn
    header_or_operand = wr.tso.header_addr if wr.tso is not None else wr.compare_add
    if wr.ah is not None:
        return _address(wr.ah), header_or_operand, wr.swap, 0, wr.remote_qpn, wr.remote_qkey
    return wr.remote_addr, header_or_operand, wr.swap, 0, wr.rkey, wr.remote_srqn


def _last_union_values(wr: SendWorkRequest) -> tuple[int, int]:
    """Return the values of the last two unions in ``struct aiordma_send``."""
    if (tso := wr.tso) is not None:
        return tso.header_size, tso.mss
    return (int(wr.flush.types), int(wr.flush.level)) if wr.flush is not None else (0, 0)


def pack_sends(array: RequestArray, requests: Sequence[SendWorkRequest]) -> None:
    """Encode the requests as C structures (``struct aiordma_send``) into ``array``."""
    array.make_room(len(requests), sum(len(wr.sges) for wr in requests))
    sends = array.sends_bytes
    sge_index = 0
    for index, wr in enumerate(requests):
        SEND.pack_into(
            sends,
            index * SEND.size,
            wr.wr_id,
            *_shared_union_values(wr),
            wr.invalidate_rkey if wr.opcode in _INVALIDATING else wr.imm_data,
            wr.opcode,
            wr.send_flags,
            sge_index,
            len(wr.sges),
            *_last_union_values(wr),
        )
        sge_index = _pack_sges(array, sge_index, wr.sges)


def pack_recvs(array: RequestArray, requests: Sequence[ReceiveWorkRequest], label: str) -> None:
    """Encode the receives for the queue ``label`` into ``array``."""
    try:
        array.make_room(len(requests), sum(len(wr.sges) for wr in requests))
        recvs = array.recvs_bytes
        sge_index = 0
        for index, wr in enumerate(requests):
            RECV.pack_into(recvs, index * RECV.size, wr.wr_id, sge_index, len(wr.sges))
            sge_index = _pack_sges(array, sge_index, wr.sges)
    except PACKING_ERRORS as error:
        raise packing_error(label, error, requests) from None


def _pack_sges(array: RequestArray, sge_index: int, sges: Sequence[ScatterGatherElement]) -> int:
    """Encode elements into ``array`` from ``sge_index`` on. Return the index after the last one."""
    for sge in sges:
        if not isinstance(sge, tuple):  # `bytes` of length 3 would also unpack to numbers
            raise TypeError
        SGE.pack_into(array.sges_bytes, sge_index * SGE.size, *sge)
        sge_index += 1
    return sge_index
