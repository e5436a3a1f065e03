"""The attributes of a queue pair: what a modify sets, what a query reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypedDict

from aiordma._core.arguments import U32_MAX, choice, instance, integer, integers, truth
from aiordma._core.timers import (
    decode_ack_timeout,
    decode_rnr_timer,
    encode_ack_timeout,
    encode_rnr_timer,
)
from aiordma._native import Library, ffi

from .._device.address import AddressVector, vector_fields
from .._device.enums import MTU, AccessFlags, MigrationState, QPAttrMask, QPState, QPType

if TYPE_CHECKING:
    from aiordma._native import handles as h

    from .._cq.completion import CompletionQueue
    from .._device.resource import Resource


class QPCapabilities(NamedTuple):
    """Sizes of a queue pair: ``struct ibv_qp_cap``.

    Work requests outstanding in each direction, scatter/gather entries of one work request, and
    the bytes that a send may carry inline.
    """

    max_send_wr: int = 16
    max_recv_wr: int = 16
    max_send_sge: int = 1
    max_recv_sge: int = 1
    max_inline_data: int = 0

    @classmethod
    def read(cls, attr: h.ibv_qp_init_attr | h.ibv_qp_init_attr_ex | h.ibv_qp_attr) -> Self:
        """From the ``cap`` of a C structure."""
        cap = attr.cap
        return cls(
            cap.max_send_wr,
            cap.max_recv_wr,
            cap.max_send_sge,
            cap.max_recv_sge,
            cap.max_inline_data,
        )

    @classmethod
    def _of(cls, value: object) -> Self:
        """Those that a caller gives, as Python's own numbers."""
        given = instance(
            "capabilities",
            value,
            QPCapabilities,
            "a QPCapabilities, as QPCapabilities(max_send_wr=64)",
        )
        return cls(**integers("capabilities", given._asdict(), U32_MAX))

    def write(self, attr: h.ibv_qp_init_attr | h.ibv_qp_init_attr_ex | h.ibv_qp_attr) -> None:
        """Into the ``cap`` of a C structure."""
        attr.cap.max_send_wr = self.max_send_wr
        attr.cap.max_recv_wr = self.max_recv_wr
        attr.cap.max_send_sge = self.max_send_sge
        attr.cap.max_recv_sge = self.max_recv_sge
        attr.cap.max_inline_data = self.max_inline_data


def resets(library: Library) -> Callable[[h.ibv_qp], None]:
    """A function, for any thread, that resets a queue pair whose type has no table of states."""

    def reset(pointer: h.ibv_qp) -> None:
        attr = ffi.new("struct ibv_qp_attr *")
        attr.qp_state = int(QPState.RESET)
        library.calls.ibv_modify_qp(pointer, attr, int(QPAttrMask.STATE))

    return reset


def init_attr(
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    capabilities: QPCapabilities,
    qp_type: QPType,
    sq_sig_all: bool,
    srq: Resource[h.ibv_srq] | None = None,
) -> h.ibv_qp_init_attr:
    """``struct ibv_qp_init_attr`` for a new queue pair."""
    return ffi.new(
        "struct ibv_qp_init_attr *",
        {
            "send_cq": send_cq.pointer,
            "recv_cq": recv_cq.pointer,
            "srq": ffi.NULL if srq is None else srq.pointer,
            "cap": capabilities,
            "qp_type": qp_type,
            "sq_sig_all": int(sq_sig_all),
        },
    )


class QPChanges(TypedDict, total=False):
    """Arguments of :meth:`QueuePair.modify`: the fields of ``struct ibv_qp_attr``.

    ``timeout``, ``alt_timeout`` and ``min_rnr_timer`` are seconds.
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


# ibv_modify_qp(3): which bit of the mask speaks of which field.
MASK_OF_FIELD: Mapping[str, QPAttrMask] = MappingProxyType(
    {
        "qp_state": QPAttrMask.STATE,
        "cur_qp_state": QPAttrMask.CUR_STATE,
        "path_mtu": QPAttrMask.PATH_MTU,
        "path_mig_state": QPAttrMask.PATH_MIG_STATE,
        "qkey": QPAttrMask.QKEY,
        "rq_psn": QPAttrMask.RQ_PSN,
        "sq_psn": QPAttrMask.SQ_PSN,
        "dest_qp_num": QPAttrMask.DEST_QPN,
        "qp_access_flags": QPAttrMask.ACCESS_FLAGS,
        "cap": QPAttrMask.CAP,
        "ah_attr": QPAttrMask.AV,
        "alt_ah_attr": QPAttrMask.ALT_PATH,
        "alt_pkey_index": QPAttrMask.ALT_PATH,
        "alt_port_num": QPAttrMask.ALT_PATH,
        "alt_timeout": QPAttrMask.ALT_PATH,
        "pkey_index": QPAttrMask.PKEY_INDEX,
        "en_sqd_async_notify": QPAttrMask.EN_SQD_ASYNC_NOTIFY,
        "max_rd_atomic": QPAttrMask.MAX_QP_RD_ATOMIC,
        "max_dest_rd_atomic": QPAttrMask.MAX_DEST_RD_ATOMIC,
        "min_rnr_timer": QPAttrMask.MIN_RNR_TIMER,
        "port_num": QPAttrMask.PORT,
        "timeout": QPAttrMask.TIMEOUT,
        "retry_cnt": QPAttrMask.RETRY_CNT,
        "rnr_retry": QPAttrMask.RNR_RETRY,
        "rate_limit": QPAttrMask.RATE_LIMIT,
    }
)
# How a value goes into its field, other than as it is.
_CONVERSIONS: Mapping[str, Callable[[Any], object]] = MappingProxyType(
    {
        "qp_state": partial(choice, "qp_state", kind=QPState),
        "cur_qp_state": partial(choice, "cur_qp_state", kind=QPState),
        "path_mtu": partial(choice, "path_mtu", kind=MTU),
        "path_mig_state": partial(choice, "path_mig_state", kind=MigrationState),
        "qp_access_flags": partial(choice, "qp_access_flags", kind=AccessFlags),
        "cap": QPCapabilities._of,
        "ah_attr": partial(vector_fields, "ah_attr"),
        "alt_ah_attr": partial(vector_fields, "alt_ah_attr"),
        "en_sqd_async_notify": partial(truth, "en_sqd_async_notify"),
        "min_rnr_timer": encode_rnr_timer,
        "timeout": encode_ack_timeout,
        "alt_timeout": encode_ack_timeout,
    }
)
# The most that each of the others holds: its field, or IBTA volume 1, clause 11.2.5.2.
_MOST = {
    "qkey": U32_MAX,
    "rq_psn": U32_MAX,
    "sq_psn": U32_MAX,
    "dest_qp_num": U32_MAX,
    "pkey_index": 0xFFFF,
    "alt_pkey_index": 0xFFFF,
    "max_rd_atomic": 0xFF,
    "max_dest_rd_atomic": 0xFF,
    "port_num": 0xFF,
    "alt_port_num": 0xFF,
    "retry_cnt": 7,
    "rnr_retry": 7,
    "rate_limit": U32_MAX,
}
_BITS = {name: int(bit) for name, bit in MASK_OF_FIELD.items()}

# Everything that ibv_query_qp(3) can be asked for; libibverbs refuses bits beyond DEST_QPN.
QUERY_ALL = QPAttrMask((1 << 21) - 1)


def fill(changes: QPChanges) -> tuple[h.ibv_qp_attr, QPAttrMask]:
    """``struct ibv_qp_attr`` and its mask. TypeError for a name that is no field."""
    mask = 0
    for name in changes:
        if name not in _BITS:
            raise TypeError(f"modify() has no attribute {name!r}")
        mask |= _BITS[name]
    return filled(changes), QPAttrMask(mask)


def filled(changes: QPChanges) -> h.ibv_qp_attr:
    """``struct ibv_qp_attr`` of names that are fields."""
    values: dict[str, Any] = {}
    for name, value in changes.items():
        convert = _CONVERSIONS.get(name)
        values[name] = convert(value) if convert else integer(name, value, 0, _MOST[name])
    return ffi.new("struct ibv_qp_attr *", values)


class QPAttributes(NamedTuple):
    """``struct ibv_qp_attr`` as :meth:`QueuePair.query` reads it; timers in seconds.

    A device fills what the queue pair's type and state have; the rest is zero.
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
        """From ``struct ibv_qp_attr``."""
        return cls(
            qp_state=QPState(attr.qp_state),
            path_mtu=MTU(attr.path_mtu) if attr.path_mtu in MTU._value2member_map_ else None,
            path_mig_state=MigrationState(attr.path_mig_state),
            qkey=attr.qkey,
            rq_psn=attr.rq_psn,
            sq_psn=attr.sq_psn,
            dest_qp_num=attr.dest_qp_num,
            qp_access_flags=AccessFlags(attr.qp_access_flags),
            cap=QPCapabilities.read(attr),
            ah_attr=AddressVector.read(attr.ah_attr),
            alt_ah_attr=AddressVector.read(attr.alt_ah_attr),
            pkey_index=attr.pkey_index,
            sq_draining=bool(attr.sq_draining),
            max_rd_atomic=attr.max_rd_atomic,
            max_dest_rd_atomic=attr.max_dest_rd_atomic,
            min_rnr_timer=decode_rnr_timer(attr.min_rnr_timer),
            port_num=attr.port_num,
            timeout=decode_ack_timeout(attr.timeout),
            retry_cnt=attr.retry_cnt,
            rnr_retry=attr.rnr_retry,
        )
