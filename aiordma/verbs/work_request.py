"""Work requests: what is posted, which transport can do what, and their packing for C."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from aiordma._native import RECV, SEND, SGE, RequestArray

from .enums import QPType, SendFlags, WROpcode


class ScatterGatherElement(NamedTuple):
    """A piece of registered memory: ``struct ibv_sge``."""

    addr: int
    length: int
    lkey: int


@dataclass(slots=True)
class SendWorkRequest:
    """One request for the send queue: ``struct ibv_send_wr``, see ibv_post_send(3).

    ``imm_data`` is a number in host order (the rkey to invalidate, for SEND_WITH_INV and
    LOCAL_INV). ``remote_addr`` and ``rkey`` are for writes, reads and atomics; ``compare_add`` is
    what is compared or added, ``swap`` what is put there, numbers of 64 bits. An atomic returns
    the old value into its one 8-byte scatter/gather element.
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


@dataclass(slots=True)
class ReceiveWorkRequest:
    """One request for the receive queue: ``struct ibv_recv_wr``, see ibv_post_recv(3)."""

    wr_id: int
    sges: Sequence[ScatterGatherElement] = ()


def _mask(*opcodes: WROpcode) -> int:
    return sum(1 << opcode for opcode in opcodes)


_SENDS = _mask(WROpcode.SEND, WROpcode.SEND_WITH_IMM)
_WRITES = _mask(WROpcode.RDMA_WRITE, WROpcode.RDMA_WRITE_WITH_IMM)
_WINDOWS = _mask(WROpcode.SEND_WITH_INV, WROpcode.LOCAL_INV, WROpcode.BIND_MW)
_ANSWERED = _mask(WROpcode.RDMA_READ, WROpcode.ATOMIC_CMP_AND_SWP, WROpcode.ATOMIC_FETCH_AND_ADD)

ALLOWED: Mapping[QPType, int] = MappingProxyType(
    {
        QPType.RC: _SENDS | _WRITES | _ANSWERED | _WINDOWS,
        QPType.XRC_SEND: _SENDS | _WRITES | _ANSWERED | _WINDOWS,
        QPType.UC: _SENDS | _WRITES | _WINDOWS,
        QPType.UD: _SENDS | _mask(WROpcode.TSO),
        QPType.RAW_PACKET: _mask(WROpcode.SEND, WROpcode.TSO),
        QPType.XRC_RECV: 0,
    }
)
"""What each transport can do, a bit for each opcode (ibv_post_send(3), its table)."""


def pack_sends(room: RequestArray, requests: Iterable[SendWorkRequest]) -> None:
    """Into ``room``, which is large enough."""
    sends, sges = room.sends_bytes, room.sges_bytes
    entry = 0
    for index, wr in enumerate(requests):
        SEND.pack_into(
            sends,
            index * SEND.size,
            wr.wr_id,
            wr.remote_addr,
            wr.compare_add,
            wr.swap,
            wr.rkey,
            wr.opcode,
            wr.send_flags,
            wr.imm_data,
            entry,
            len(wr.sges),
        )
        for sge in wr.sges:
            SGE.pack_into(sges, entry * SGE.size, *sge)
            entry += 1


def pack_recvs(room: RequestArray, requests: Iterable[ReceiveWorkRequest]) -> None:
    """Into ``room``, which is large enough."""
    recvs, sges = room.recvs_bytes, room.sges_bytes
    entry = 0
    for index, wr in enumerate(requests):
        RECV.pack_into(recvs, index * RECV.size, wr.wr_id, entry, len(wr.sges))
        for sge in wr.sges:
            SGE.pack_into(sges, entry * SGE.size, *sge)
            entry += 1
