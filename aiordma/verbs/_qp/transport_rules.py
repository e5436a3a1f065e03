"""A table of the operations and flags supported by each transport, for validating requests.

Sources: the opcodes and flags in ibv_post_send(3); the builders in ibv_wr_post(3); InfiniBand
Architecture Specification volume 1, clause 9.2 (table 35, the operations of each transport service)
and clause 10.8.2 (work requests).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntFlag
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from .._device.enums import DeviceCapability, QPType, SendFlags, WROpcode

if TYPE_CHECKING:
    from .posting import Posting
    from .work_request import SendWorkRequest


class SendOps(IntFlag):
    """The operations that a queue pair can post with the functions described in ibv_wr_post(3).

    The values are those of ``enum ibv_qp_create_send_ops_flags``.
    """

    NONE = 0
    RDMA_WRITE = 1 << 0
    RDMA_WRITE_WITH_IMM = 1 << 1
    SEND = 1 << 2
    SEND_WITH_IMM = 1 << 3
    RDMA_READ = 1 << 4
    ATOMIC_CMP_AND_SWP = 1 << 5
    ATOMIC_FETCH_AND_ADD = 1 << 6
    LOCAL_INV = 1 << 7
    BIND_MW = 1 << 8
    SEND_WITH_INV = 1 << 9
    TSO = 1 << 10
    FLUSH = 1 << 11
    ATOMIC_WRITE = 1 << 12


class Operation(NamedTuple):
    """The properties of an operation. ``text`` is its name in error messages."""

    text: str
    flags: SendFlags
    transports: frozenset[QPType]
    send_op: SendOps


ATOMICS = frozenset({WROpcode.ATOMIC_CMP_AND_SWP, WROpcode.ATOMIC_FETCH_AND_ADD})
"""Operations that change 8 aligned bytes of the peer's memory and return the old value."""

_ACKNOWLEDGED_QP_TYPES = frozenset({QPType.RC, QPType.XRC_SEND})
_CONNECTED_QP_TYPES = _ACKNOWLEDGED_QP_TYPES | {QPType.UC}
_MESSAGE_QP_TYPES = _CONNECTED_QP_TYPES | {QPType.UD}

_PLAIN_FLAGS = SendFlags.SIGNALED | SendFlags.FENCE
_DATA_FLAGS = _PLAIN_FLAGS | SendFlags.INLINE
_MESSAGE_FLAGS = _DATA_FLAGS | SendFlags.SOLICITED | SendFlags.IP_CSUM

_TABLE: Mapping[WROpcode, tuple[str, SendFlags, frozenset[QPType]]] = {
    WROpcode.SEND: ("send", _MESSAGE_FLAGS, _MESSAGE_QP_TYPES | {QPType.RAW_PACKET}),
    WROpcode.SEND_WITH_IMM: ("send", _MESSAGE_FLAGS, _MESSAGE_QP_TYPES),
    WROpcode.SEND_WITH_INV: ("send", _MESSAGE_FLAGS, _CONNECTED_QP_TYPES),
    WROpcode.RDMA_WRITE: ("write", _DATA_FLAGS, _CONNECTED_QP_TYPES),
    WROpcode.RDMA_WRITE_WITH_IMM: ("write", _DATA_FLAGS | SendFlags.SOLICITED, _CONNECTED_QP_TYPES),
    WROpcode.RDMA_READ: ("read", _PLAIN_FLAGS, _ACKNOWLEDGED_QP_TYPES),
    WROpcode.ATOMIC_CMP_AND_SWP: ("compare and swap", _PLAIN_FLAGS, _ACKNOWLEDGED_QP_TYPES),
    WROpcode.ATOMIC_FETCH_AND_ADD: ("fetch and add", _PLAIN_FLAGS, _ACKNOWLEDGED_QP_TYPES),
    WROpcode.ATOMIC_WRITE: ("atomic write", _DATA_FLAGS, frozenset({QPType.RC})),
    WROpcode.FLUSH: ("flush", _PLAIN_FLAGS, _ACKNOWLEDGED_QP_TYPES),
    WROpcode.LOCAL_INV: ("invalidate", _PLAIN_FLAGS, _CONNECTED_QP_TYPES),
    WROpcode.BIND_MW: ("bind window", _PLAIN_FLAGS, _CONNECTED_QP_TYPES),
    WROpcode.TSO: ("segmented send", _MESSAGE_FLAGS, frozenset({QPType.UD, QPType.RAW_PACKET})),
}
OPERATIONS: Mapping[WROpcode, Operation] = MappingProxyType(
    {opcode: Operation(*row, SendOps[opcode.name]) for opcode, row in _TABLE.items()}
)


def supports(qp_type: QPType, opcode: WROpcode) -> bool:
    """Return whether the transport supports the operation."""
    operation = OPERATIONS.get(opcode)
    return operation is not None and qp_type in operation.transports


def allowed_flags(qp_type: QPType, opcode: WROpcode) -> SendFlags:
    """Return the flags allowed for the operation on this transport."""
    # A request with FENCE waits for earlier reads and atomics (ibv_post_send(3)), which only
    # acknowledged transports support.
    return OPERATIONS[opcode].flags & ~(0 if qp_type in _ACKNOWLEDGED_QP_TYPES else SendFlags.FENCE)


# Operations that a device may lack even if it supports ibv_wr_post(3).
_OPTIONAL_OPS = (
    SendOps.LOCAL_INV
    | SendOps.BIND_MW
    | SendOps.SEND_WITH_INV
    | SendOps.TSO
    | SendOps.FLUSH
    | SendOps.ATOMIC_WRITE
)


def send_ops_of(qp_type: QPType) -> SendOps:
    """Return the operations a transport supports, for use as the ``send_ops`` argument.

    Operations that some devices lack are not included: memory window operations, segmented sends,
    flushes and atomic writes. Add them with ``|`` if you need them.
    """
    ops = SendOps.NONE
    for operation in OPERATIONS.values():
        if qp_type in operation.transports:
            ops |= operation.send_op
    return ops & ~_OPTIONAL_OPS


# A request needs a full check only if one of its flags is set in the table entry for its opcode.
# ALWAYS is added to every request's flags, so setting it in an entry forces the check. IP_CSUM is
# set in every entry, because only some devices support checksums.
ALWAYS = 1 << 31
ALL_BITS = (1 << 32) - 1
_OPCODE_COUNT = 16
_ALWAYS_CHECKED = ATOMICS | {WROpcode.FLUSH, WROpcode.ATOMIC_WRITE, WROpcode.TSO, WROpcode.BIND_MW}


def _opcode_full_check_bits(qp_type: QPType, opcode_number: int) -> int:
    """Return the bits of ``send_flags | ALWAYS`` that require a full check for this opcode."""
    opcode = next((known for known in OPERATIONS if known == opcode_number), None)
    if opcode is None or not supports(qp_type, opcode):
        return ALL_BITS
    unchecked_flags = int(allowed_flags(qp_type, opcode) & ~SendFlags.IP_CSUM)
    return ALL_BITS & ~unchecked_flags & ~(0 if opcode in _ALWAYS_CHECKED else ALWAYS)


FULL_CHECK_BITS: Mapping[QPType, tuple[int, ...]] = MappingProxyType(
    {qp_type: tuple(_opcode_full_check_bits(qp_type, number) for number in range(_OPCODE_COUNT))
     for qp_type in QPType}
)  # fmt: skip
"""For each type and opcode, the bits of ``send_flags | ALWAYS`` that require a full check."""


def full_check_bits(qp_type: QPType, send_ops: SendOps) -> tuple[int, ...]:
    """Return the row of `FULL_CHECK_BITS` for a queue pair, indexed by opcode.

    If the queue pair was created with ``send_ops``, all other operations require a full check.
    """
    row = FULL_CHECK_BITS[qp_type]
    if not send_ops:
        return row
    unavailable = {
        int(opcode) for opcode, operation in OPERATIONS.items() if not operation.send_op & send_ops
    }
    return tuple(
        ALL_BITS if opcode_number in unavailable else bits for opcode_number, bits in enumerate(row)
    )


# Operations that ibv_wr_post(3) supports, but ibv_post_send(3) does not.
_EXTENDED_ONLY = frozenset({WROpcode.FLUSH, WROpcode.ATOMIC_WRITE})

# The device capability for IP checksums, by queue pair type (ibv_post_send(3)).
_CHECKSUM_CAPABILITY = {
    QPType.UD: DeviceCapability.UD_IP_CSUM,
    QPType.RC: DeviceCapability.RC_IP_CSUM,
    QPType.RAW_PACKET: DeviceCapability.RAW_IP_CSUM,
}


def check_request(qp: Posting, wr: SendWorkRequest, opcode: WROpcode) -> None:
    """Raise an exception if a request is invalid for a queue pair."""
    unsupported_error, verb = qp.context._unsupported_error, "ibv_post_send"
    if not supports(qp.qp_type, opcode):
        raise unsupported_error(f"{opcode.name} on a {qp.qp_type.name} queue pair", verb)
    if qp.send_ops and not OPERATIONS[opcode].send_op & qp.send_ops:
        raise ValueError(
            f"cannot post {opcode.name} to {qp!r}: the queue pair was created without"
            f" SendOps.{OPERATIONS[opcode].send_op.name}"
        )
    if opcode in _EXTENDED_ONLY and not qp.send_ops:
        raise unsupported_error(f"{opcode.name} on a queue pair created without send_ops", verb)
    disallowed_flags = SendFlags(wr.send_flags) & ~allowed_flags(qp.qp_type, opcode)
    if disallowed_flags:
        raise ValueError(
            f"{opcode.name} on a {qp.qp_type.name} queue pair does not allow {disallowed_flags!r}"
        )
    if wr.send_flags & SendFlags.IP_CSUM:
        capabilities = qp.context.query_device().device_cap_flags
        if not capabilities & _CHECKSUM_CAPABILITY.get(qp.qp_type, DeviceCapability(0)):
            raise unsupported_error(f"IP checksums on a {qp.qp_type.name} queue pair", verb)
    if opcode in ATOMICS or opcode is WROpcode.ATOMIC_WRITE:
        # Atomics operate on 8 naturally aligned bytes (IBTA volume 1, clause 9.4.5).
        if wr.remote_addr % 8:
            raise ValueError(
                f"remote_addr for {opcode.name} must be a multiple of 8, not {wr.remote_addr:#x}"
            )
        if (length := sum(sge[1] for sge in wr.sges)) != 8:
            raise ValueError(
                f"{opcode.name} requires exactly 8 bytes of local memory, not {length}"
            )
    if opcode is WROpcode.BIND_MW and wr.bind is None:
        raise ValueError("BIND_MW requires bind=BindInfo(...)")
    if opcode is WROpcode.TSO and wr.tso is None:
        raise ValueError("TSO requires tso=Segmentation(...)")
    if opcode is WROpcode.FLUSH and (wr.flush is None or wr.sges):
        raise ValueError(
            "FLUSH requires flush=FlushInfo(...) and does not allow scatter/gather elements"
        )
