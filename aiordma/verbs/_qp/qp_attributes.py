"""Queue pair attributes, for modifying and querying a queue pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple, Self, TypeAlias, TypedDict

from aiordma import verbs
from aiordma._core.arguments import U32_MAX, choice, instance, integer, integers, truth
from aiordma._core.timers import (
    decode_ack_timeout,
    decode_rnr_timer,
    encode_ack_timeout,
    encode_rnr_timer,
)
from aiordma._native import Library, copy_of, ffi
from aiordma._native import handles as h

from .._device.address import AddressVector, vector_fields
from .._device.enums import MTU, AccessFlags, MigrationState, QPAttrMask, QPState


class QPCapabilities(NamedTuple):
    """A queue pair's sizes (``struct ibv_qp_cap``).

    ``max_send_wr`` and ``max_recv_wr`` are the maximum numbers of outstanding work requests in each
    queue. ``max_send_sge`` and ``max_recv_sge`` are the maximum numbers of scatter/gather elements
    per request. ``max_inline_data`` is the maximum number of bytes copied into a send request that
    is posted inline.
    """

    max_send_wr: int = 16
    max_recv_wr: int = 16
    max_send_sge: int = 1
    max_recv_sge: int = 1
    max_inline_data: int = 0

    @classmethod
    def read(cls, attr: h.ibv_qp_init_attr | h.ibv_qp_init_attr_ex | h.ibv_qp_attr) -> Self:
        """Copy the sizes from the ``cap`` member of a C structure."""
        return copy_of(attr.cap, cls)

    @classmethod
    def _convert(cls, value: object) -> Self:
        """Convert a caller's values to Python integers."""
        capabilities = instance(
            "capabilities",
            value,
            QPCapabilities,
            "a QPCapabilities, such as QPCapabilities(max_send_wr=64)",
        )
        return cls(**integers("capabilities", capabilities._asdict(), U32_MAX))


def reset_function(library: Library) -> Callable[[h.ibv_qp], None]:
    """Return a thread-safe function that resets a queue pair of any type, for `Node.halt`.

    After the reset, the device no longer accesses memory for the queue pair.
    """

    def reset(pointer: h.ibv_qp) -> None:
        attr = ffi.new("struct ibv_qp_attr *")
        attr.qp_state = int(QPState.RESET)
        library.calls.ibv_modify_qp(pointer, attr, int(QPAttrMask.STATE))

    return reset


class QPChanges(TypedDict, total=False):
    """The arguments of :meth:`QueuePair.modify`, which are the fields of ``struct ibv_qp_attr``.

    ``timeout``, ``alt_timeout`` and ``min_rnr_timer`` are in seconds.
    """

    qp_state: QPState
    cur_qp_state: QPState
    path_mtu: MTU
    path_mig_state: MigrationState
    qkey: int
    rq_psn: int
    sq_psn: int
    dest_qp_num: int
    qp_access_flags: AccessFlags
    cap: QPCapabilities
    ah_attr: AddressVector
    alt_ah_attr: AddressVector
    pkey_index: int
    alt_pkey_index: int
    en_sqd_async_notify: bool
    max_rd_atomic: int
    max_dest_rd_atomic: int
    min_rnr_timer: float
    port_num: int
    timeout: float
    retry_cnt: int
    rnr_retry: int
    alt_port_num: int
    alt_timeout: float
    rate_limit: int


Convert: TypeAlias = Callable[[str, Any], object]
"""A function that converts an attribute, given its name and value."""


def _integer_up_to(maximum: int) -> Convert:
    return lambda name, value: integer(name, value, 0, maximum)


def _enum_of(kind: type[Enum]) -> Convert:
    return lambda name, value: choice(name, value, kind)


_U8, _U16, _U32 = _integer_up_to(0xFF), _integer_up_to(0xFFFF), _integer_up_to(U32_MAX)
_ACK_TIMEOUT: Convert = lambda _, value: encode_ack_timeout(value)  # noqa: E731

# Each field's mask bit and conversion function (ibv_modify_qp(3)). The retry counts are limited by
# IBTA volume 1, clause 11.2.5.2. Other integers may use the full range of their C types.
_FIELDS: Mapping[str, tuple[QPAttrMask, Convert]] = {
    "qp_state": (QPAttrMask.STATE, _enum_of(QPState)),
    "cur_qp_state": (QPAttrMask.CUR_STATE, _enum_of(QPState)),
    "path_mtu": (QPAttrMask.PATH_MTU, _enum_of(MTU)),
    "path_mig_state": (QPAttrMask.PATH_MIG_STATE, _enum_of(MigrationState)),
    "qkey": (QPAttrMask.QKEY, _U32),
    "rq_psn": (QPAttrMask.RQ_PSN, _U32),
    "sq_psn": (QPAttrMask.SQ_PSN, _U32),
    "dest_qp_num": (QPAttrMask.DEST_QPN, _U32),
    "qp_access_flags": (QPAttrMask.ACCESS_FLAGS, _enum_of(AccessFlags)),
    "cap": (QPAttrMask.CAP, lambda _, value: QPCapabilities._convert(value)),
    "ah_attr": (QPAttrMask.AV, vector_fields),
    "alt_ah_attr": (QPAttrMask.ALT_PATH, vector_fields),
    "alt_pkey_index": (QPAttrMask.ALT_PATH, _U16),
    "alt_port_num": (QPAttrMask.ALT_PATH, _U8),
    "alt_timeout": (QPAttrMask.ALT_PATH, _ACK_TIMEOUT),
    "pkey_index": (QPAttrMask.PKEY_INDEX, _U16),
    "en_sqd_async_notify": (QPAttrMask.EN_SQD_ASYNC_NOTIFY, truth),
    "max_rd_atomic": (QPAttrMask.MAX_QP_RD_ATOMIC, _U8),
    "max_dest_rd_atomic": (QPAttrMask.MAX_DEST_RD_ATOMIC, _U8),
    "min_rnr_timer": (QPAttrMask.MIN_RNR_TIMER, lambda _, value: encode_rnr_timer(value)),
    "port_num": (QPAttrMask.PORT, _U8),
    "timeout": (QPAttrMask.TIMEOUT, _ACK_TIMEOUT),
    "retry_cnt": (QPAttrMask.RETRY_CNT, _integer_up_to(7)),
    "rnr_retry": (QPAttrMask.RNR_RETRY, _integer_up_to(7)),
    "rate_limit": (QPAttrMask.RATE_LIMIT, _U32),
}
MASK_OF_FIELD = {name: mask for name, (mask, _) in _FIELDS.items()}
_BIT_OF_FIELD = {name: int(bit) for name, bit in MASK_OF_FIELD.items()}

# All attributes supported by ibv_query_qp(3). libibverbs rejects mask bits beyond DEST_QPN.
QUERY_ALL = QPAttrMask((1 << 21) - 1)


def attr_and_mask(changes: QPChanges) -> tuple[h.ibv_qp_attr, QPAttrMask]:
    """Create a ``struct ibv_qp_attr`` and the mask that selects the given attributes.

    Raises:
        TypeError: If a name is not a field of the structure.
    """
    mask = 0
    for name in changes:
        if name not in _BIT_OF_FIELD:
            raise TypeError(f"modify() got an unexpected keyword argument {name!r}")
        mask |= _BIT_OF_FIELD[name]
    return attr_from(changes), QPAttrMask(mask)


def attr_from(changes: QPChanges) -> h.ibv_qp_attr:
    """Create a ``struct ibv_qp_attr`` from attributes whose names are known to be valid."""
    values = {name: _FIELDS[name][1](name, value) for name, value in changes.items()}
    return ffi.new("struct ibv_qp_attr *", values)


class QPAttributes(NamedTuple):
    """The result of :meth:`QueuePair.query` (``struct ibv_qp_attr``, but with times in seconds).

    Fields that do not apply to the queue pair's type and state are zero.
    """

    qp_state: QPState
    path_mtu: MTU | None
    path_mig_state: MigrationState
    qkey: int
    rq_psn: int
    sq_psn: int
    dest_qp_num: int
    qp_access_flags: AccessFlags
    cap: QPCapabilities
    ah_attr: AddressVector
    alt_ah_attr: AddressVector
    pkey_index: int
    sq_draining: bool
    max_rd_atomic: int
    max_dest_rd_atomic: int
    min_rnr_timer: float
    port_num: int
    timeout: float
    retry_cnt: int
    rnr_retry: int

    @classmethod
    def read(cls, attr: h.ibv_qp_attr) -> Self:
        """Convert a ``struct ibv_qp_attr`` to Python values."""
        return copy_of(
            attr,
            cls,
            path_mtu=MTU(attr.path_mtu) if attr.path_mtu in MTU._value2member_map_ else None,
            cap=QPCapabilities.read(attr),
            ah_attr=AddressVector.read(attr.ah_attr),
            alt_ah_attr=AddressVector.read(attr.alt_ah_attr),
            min_rnr_timer=decode_rnr_timer(attr.min_rnr_timer),
            timeout=decode_ack_timeout(attr.timeout),
        )


def query(context: verbs.Context, pointer: h.ibv_qp) -> QPAttributes:
    """Query a queue pair's current attributes. See ibv_query_qp(3)."""
    attr = ffi.new("struct ibv_qp_attr *")
    init = ffi.new("struct ibv_qp_init_attr *")
    context.library.calls.ibv_query_qp(pointer, attr, QUERY_ALL, init)
    return QPAttributes.read(attr)


class ECE(NamedTuple):
    """Options for enhanced connection establishment (``struct ibv_ece``). See ibv_set_ece(3).

    These options let two devices from the same vendor agree on features that the InfiniBand
    standard does not define. ``vendor_id`` determines the meaning of the bits in ``options``.
    """

    vendor_id: int
    options: int = 0

    def packed(self) -> h.ibv_ece:
        """Convert the options to ``struct ibv_ece``."""
        return ffi.new("struct ibv_ece *", integers("ECE", self._asdict(), U32_MAX))

    @classmethod
    def read(cls, ece: h.ibv_ece) -> Self:
        """Convert a ``struct ibv_ece`` to options."""
        return copy_of(ece, cls)


class RateLimit(NamedTuple):
    """A limit on a queue pair's sending rate (``struct ibv_qp_rate_limit_attr``).

    ``rate_limit`` is in kbit/s; 0 means no limit. ``max_burst_sz`` and ``typical_pkt_sz`` are in
    bytes; 0 means the device's default. See ibv_modify_qp_rate_limit(3).
    """

    rate_limit: int
    max_burst_sz: int = 0
    typical_pkt_sz: int = 0

    def packed(self) -> h.ibv_qp_rate_limit_attr:
        """Convert the limit to ``struct ibv_qp_rate_limit_attr``.

        Raises:
            ValueError: If a number is out of range.
        """
        try:
            numbers = integers("RateLimit", self._asdict(), U32_MAX)
            return ffi.new("struct ibv_qp_rate_limit_attr *", numbers)
        except OverflowError as error:
            raise ValueError(f"invalid rate limit {self}: {error}") from None
