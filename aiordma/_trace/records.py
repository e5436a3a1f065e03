"""The lines of an embedded device's trace, with one class for each type (see docs/trace.md).

Times are nanoseconds of CLOCK_MONOTONIC. Opcodes, statuses, states and events have the names of the
C header without their prefixes. An optional field is None if the line does not have it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, TypeVar, dataclass_transform

from aiordma._core.strict_json import parse_json

T = TypeVar("T")

VERSION = 1
"""The version of the schema that this module reads."""


REASONS = {
    # Reasons for rejecting a work request
    "STATE": "the state of the queue pair does not allow the request: sends need RTS, receives "
    "need INIT or later",
    "NO_QUEUE": "this queue pair does not have that queue: it uses a shared receive queue, or it "
    "is an XRC queue pair",
    "OPCODE": "queue pairs of this type do not support the operation",
    "UNSUPPORTED": "the device or this call does not support the operation, or the "
    "send_ops_flags of the queue pair do not include it",
    "DESTINATION": "the address handle is missing or belongs to another protection domain, or "
    "the queue pair number has more than 24 bits",
    "FLAGS": "the flags are unknown or not valid for this operation",
    "SGES": "the request has more SGEs than max_send_sge or max_recv_sge",
    "INLINE": "the request has more inline bytes than max_inline_data",
    "BIND": "the bind does not match the type of the window, its region or the rights",
    "SETTER": "the wr_set_* call does not match the preceding request",
    "UNFINISHED": "wr_start was called again before wr_complete",
    "NO_MEMORY": "the process is out of memory",
    "FULL": "the queue is full (max_send_wr or max_recv_wr); an unsignaled request occupies its "
    "slot until a later request completes",
    # Reasons for rejecting other calls
    "TRANSITION": "queue pairs of this type do not have this state transition",
    "MASK_MISSING": "attr_mask lacks attributes that this state transition requires",
    "MASK_UNEXPECTED": "attr_mask contains attributes that this state transition does not allow",
    "CUR_STATE": "cur_qp_state differs from the state of the queue pair",
    "PORT": "the port number must be 1, because the device has one port",
    "PKEY_INDEX": "the partition key index must be 0, because the device has one partition key",
    "SGID_INDEX": "the GID table of the device has no entry at grh.sgid_index",
    "GRH": "RoCE needs a GRH: set is_global, grh.dgid and grh.sgid_index",
    "GID_FAMILY": "grh.dgid and the GID at grh.sgid_index must both be IPv4, or both IPv6",
    "ROUTE": "this host has no route from the GID at grh.sgid_index to grh.dgid",
    "ALT_PATH": "the device does not support alternate paths",
    "MTU": "path_mtu must be a value of enum ibv_mtu, from 1 (256 bytes) to 5 (4096 bytes)",
    "LINK": "the process is out of memory, or the queue pair's own address or port cannot be used",
    "LIMIT": "the value exceeds what the device or the object allows",
    "NO_ENTRIES": "the queue must have at least one entry",
    "OUTSTANDING": "more entries of the queue are in use than the new size allows",
    "QP_TYPE": "the device, or this call, does not support queue pairs of this type",
    "MW_TYPE": "the type of a memory window must be 1 or 2",
    "ACCESS": "access contains flags that are unknown or not valid for this kind of region",
    "LOCAL_WRITE": "REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE",
    "ZERO_BASED": "a region of device memory needs ZERO_BASED",
    "EMPTY": "the length must not be 0",
    "PAGE_OFFSET": "offset and iova must have the same offset within a page",
    "FIXED": "only regions of the program's own memory can be registered again",
    "NULL_OBJECT": "a protection domain, completion queue or XRC domain is missing",
    "FOREIGN_OBJECT": "an object is missing, or belongs to another device, context or domain",
    "MULTICAST": "the GID is not a multicast address",
    "NOT_ATTACHED": "the queue pair is not attached to that multicast group",
    "IN_USE": "other objects still use this object: destroy those objects first",
    "FATAL": "the device has failed: close the context and open the device again",
    "FORKED": "the context was opened before a fork: the child must open the device itself",
    # Reasons for denying access to memory
    "KEY": "the key is unknown: this process did not create it, or created it before the trace "
    "began",
    "ENDED": "the key is no longer valid: the region was deregistered, or the window was unbound",
    "DOMAIN": "the key and the queue pair belong to different protection domains",
    "RIGHT": "the region or window does not grant the right",
    "RANGE": "some of the bytes are outside of the region, window or device memory",
    "PAGES": "the memory at that address is not mapped or not writable",
    "WINDOW": "the key belongs to a window, which grants access only to peers",
    "WINDOW_UNBOUND": "the key belongs to a window that is not bound",
    "WINDOW_QP": "the window belongs to another queue pair, or has type 1, which a request "
    "cannot invalidate",
    "REGION": "the key belongs to a region, but a request can only invalidate a window",
    "QUEUE_PAIR": "the queue pair itself lacks the right (qp_access_flags)",
    # Reasons for rejecting a peer's request
    "NO_RECEIVE": "no receive is posted",
    "LENGTH": "the message is longer than the receive",
    "QKEY": "the qkey of the datagram differs from that of the queue pair",
    "READS": "more READs and atomic operations are in flight than max_dest_rd_atomic allows",
    "ALIGNMENT": "the address of an atomic operation is not a multiple of 8",
    "PATH_MTU": "the peer has a different path_mtu",
    "SRQ": "the shared receive queue does not exist in this domain, or its completion queue has "
    "overflowed",
    "PACKET": "the packet is not valid after the packets before it",
    # Reasons for dropping a packet, message or handshake
    "QPN": "this process has no queue pair with that number: the peer's dest_qp_num or "
    "remote_qpn is wrong",
    "QP_STATE": "the queue pair cannot receive: it is not in RTR yet, is in ERR, or has lost its "
    "link",
    "TRANSPORT": "the queue pair and the sender's queue pair have different types",
    "SOURCE": "the sender is not the peer of this queue pair (dest_qp_num, dgid), or has a "
    "forged address",
    "DESTINATION_GID": "the packet is addressed to a GID that the queue pair or group does not "
    "have",
    "PSN": "the PSN is not the expected PSN: an earlier packet is missing, or the sender's "
    "sq_psn differs from the receiver's rq_psn",
    "PKEY": "the packet belongs to another partition",
    "ICRC": "the invariant CRC is wrong: the packet was modified on the way",
    "HEADER": "the packet belongs to another protocol or protocol version",
    "GUESSES": "the sender has guessed too many wrong queue pair numbers",
    "PORT_DOWN": "the port is down",
    "NO_ROOM": "the device has no room for the packet or message",
    "REQUEST_RATE": "too many connection manager requests arrive, in total or from the sender's "
    "network; the sender repeats the request",
    "UNSENT": "the host's network stack did not accept the packet",
    # Causes of a retry
    "RNR": "the peer has no receive posted",
    "LOSS": "a packet or its acknowledgement was lost, or the peer dropped the packet, for "
    "example because of a wrong dest_qp_num or PSN (see the peer's trace)",
    # Completion statuses that imply their reason
    "RNR_RETRY_EXC_ERR": "the peer had no receive posted, even after rnr_retry retries",
    "RETRY_EXC_ERR": "the peer did not respond, even after retry_cnt retries: the peer is "
    "unreachable, or drops the requests (wrong dest_qp_num, PSN or address; see the peer's trace)",
    "REM_ACCESS_ERR": "see the peer's trace for the reason",
    "REM_INV_REQ_ERR": "see the peer's trace for the reason",
    "REM_OP_ERR": "the peer could not use the receive that it posted; see the peer's trace for "
    "the reason",
    "LOC_LEN_ERR": "the message is longer than the receive, 1 GiB or (for a datagram) the MTU, "
    "or an atomic operation does not have 8 bytes",
    "LOC_QP_OP_ERR": "max_rd_atomic is 0, or queue pairs of this type do not support the operation",
    "MW_BIND_ERR": "the request does not match the key, region, rights or state of the window",
}
"""The meaning of each ``reason`` and ``cause``, and of each status that implies its reason."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _record(cls: type[T]) -> type[T]:
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


@_record
class Record:
    """A line of a trace. ``t`` is the time at which it was written."""

    TYPE: ClassVar[str]
    """The value of ``type`` in these lines."""

    t: int


@_record
class Header(Record):
    """The first line of a run, which describes the process, its host and its clocks.

    ``t`` and ``realtime_ns`` denote the same time. Traces with the same ``boot_id`` share a clock.
    """

    version: int
    realtime_ns: int
    boot_id: str
    pid: int
    command: str
    host: str
    device: str


@_record
class Posted(Record):
    """A work request that was posted to a send or receive queue.

    ``length`` is the total size of its buffers in bytes. ``request`` is unique among outstanding
    requests, and the completion contains the same number.
    """

    request: int
    wr_id: int
    length: int
    num_sge: int


@_record
class PostedSend(Posted):
    """A send request, posted by ibv_post_send(3), ibv_wr_post(3) or ibv_bind_mw(3)."""

    qp_num: int
    opcode: str
    send_flags: tuple[str, ...] = ()
    imm_data: int | None = None
    remote_addr: int | None = None
    rkey: int | None = None
    invalidate_rkey: int | None = None
    remote_qpn: int | None = None
    remote_srqn: int | None = None


@_record
class PostedReceive(Posted):
    """A receive that ibv_post_recv(3) posted to a queue pair."""

    qp_num: int


@_record
class PostedSharedReceive(Posted):
    """A receive that ibv_post_srq_recv(3) posted to a shared receive queue."""

    srq: int


@_record
class Refused(Record):
    """A rejected work request, with the errno value that the call returned."""

    wr_id: int
    errno: int
    error: str
    reason: str | None = None
    qp_num: int | None = None
    srq: int | None = None
    opcode: str | None = None


@_record
class CallRefused(Record):
    """A failed verbs call that does not post work requests.

    ``field`` is the name of the invalid argument, and ``value`` is its value. ``limit`` is set if
    the value is too large. ``attributes`` lists the missing or unexpected bits of ``attr_mask``.
    """

    call: str
    errno: int
    error: str
    reason: str | None = None
    field: str | None = None
    value: int | None = None
    limit: int | None = None
    attributes: tuple[str, ...] = ()
    qp_num: int | None = None
    cur_qp_state: str | None = None
    qp_state: str | None = None
    cq: int | None = None
    srq: int | None = None
    pd: int | None = None
    key: int | None = None


@_record
class Completion(Record):
    """A work completion. ``t`` is the time at which the device added it to the completion queue.

    ``request`` is 0 if the request was posted before the trace began. ``lost`` means that the
    completion queue was full, so the application never saw the completion. ``reason`` and ``lkey``
    are set for LOC_PROT_ERR.
    """

    request: int
    cq: int
    qp_num: int
    wr_id: int
    status: str
    opcode: str
    byte_len: int | None = None
    src_qp: int | None = None
    imm_data: int | None = None
    invalidated_rkey: int | None = None
    reason: str | None = None
    lkey: int | None = None
    lost: bool = False


@_record
class CreatedQP(Record):
    """A new queue pair in state RESET. XRC queue pairs do not have both completion queues."""

    qp_num: int
    qp_type: str
    pd: int | None = None
    send_cq: int | None = None
    recv_cq: int | None = None
    srq: int | None = None
    sq_sig_all: bool = False


@_record
class DestroyedQP(Record):
    """The destruction of a queue pair, which drops its outstanding requests."""

    qp_num: int


@_record
class QPStateChange(Record):
    """A state change of a queue pair, requested by a call or caused by an event."""

    qp_num: int
    cur_qp_state: str
    qp_state: str
    dest_qp_num: int | None = None


@_record
class AsyncEvent(Record):
    """An asynchronous event (ibv_get_async_event(3)). ``t`` is the time at which it occurred."""

    event_type: str
    qp_num: int | None = None
    cq: int | None = None
    srq: int | None = None
    port_num: int | None = None


@_record
class RegisteredMR(Record):
    """A region that was registered by ibv_reg_mr(3) or changed by ibv_rereg_mr(3).

    ``key`` is both the lkey and the rkey.
    """

    key: int
    pd: int
    addr: int
    length: int
    access: tuple[str, ...] = ()


@_record
class KeyEnded(Record):
    """A key that became invalid because its region was deregistered or its window was unbound."""

    key: int


@_record
class Retry(Record):
    """A retransmission that starts with the oldest outstanding request.

    ``cause`` is ``RNR`` if the receiver was not ready, or ``LOSS`` if a packet or its
    acknowledgement was lost.
    """

    qp_num: int
    cause: str


@_record
class AccessRefused(Record):
    """A peer's request that was denied access to memory. Only the owner's trace has the reason.

    ``access`` contains the rights that the request needs. A request that invalidates a window has
    no rights and no address.
    """

    qp_num: int
    reason: str
    rkey: int
    access: tuple[str, ...] = ()
    remote_addr: int | None = None
    length: int | None = None


@_record
class RequestRefused(Record):
    """A peer's rejected request or dropped datagram. Only the receiver's trace has the reason."""

    qp_num: int
    reason: str


@_record
class Dropped(Record):
    """A packet or message that was silently dropped on arrival, or that could not be sent.

    ``qp_num`` is the queue pair number in the packet. ``remote_qpn`` and ``remote`` are the queue
    pair number and address of the other side. At most 100 drops per second are traced, and
    ``omitted`` is the number of earlier drops that were not.
    """

    reason: str
    qp_num: int | None = None
    remote_qpn: int | None = None
    remote: str | None = None
    psn: int | None = None
    expected_psn: int | None = None
    omitted: int | None = None


@_record
class Fault(Record):
    """An injected fault, such as ``LOSS``, ``DUPLICATE``, ``RNR``, ``CUT`` or ``OVERRUN``."""

    fault: str
    qp_num: int | None = None
    cq: int | None = None


@_record
class End(Record):
    """The last line of a trace. ``error`` is set if the trace could not continue."""

    error: str | None = None


TYPES: dict[str, type[Record]] = {
    "trace": Header,
    "post_send": PostedSend,
    "post_recv": PostedReceive,
    "post_srq_recv": PostedSharedReceive,
    "refused": Refused,
    "call_refused": CallRefused,
    "completion": Completion,
    "create_qp": CreatedQP,
    "destroy_qp": DestroyedQP,
    "qp_state": QPStateChange,
    "async_event": AsyncEvent,
    "reg_mr": RegisteredMR,
    "key_ended": KeyEnded,
    "retry": Retry,
    "access_refused": AccessRefused,
    "request_refused": RequestRefused,
    "dropped": Dropped,
    "fault": Fault,
    "end": End,
}
"""The class of each ``type``."""

for _name, _cls in TYPES.items():
    _cls.TYPE = _name


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64


def _is_text(value: object) -> bool:
    return isinstance(value, str)


# The validator for the values of a field and a description of valid values, by the field's
# annotation. No validator accepts null. A record must omit an optional field that has no value.
_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "int": (_is_number, "a number of at most 64 bits"),
    "str": (_is_text, "a string"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "tuple[str, ...]": (
        lambda value: isinstance(value, list) and all(map(_is_text, value)),
        "a list of strings",
    ),
}

# For each field of each class: its name, whether it is required, the validator of its values, and a
# description of valid values.
_FIELDS: dict[type[Record], list[tuple[str, bool, Callable[[object], bool], str]]] = {
    cls: [
        (each.name, each.default is MISSING, *_CHECKS[str(each.type).removesuffix(" | None")])
        for each in fields(cls)
    ]
    for cls in TYPES.values()
}


def parse(line: str) -> Record:
    """Parse a line into a record. Unknown fields are ignored, because newer writers may add some.

    Raises:
        ValueError: If the line is invalid; the message says why.
    """
    try:
        found = parse_json(line)
    except ValueError as error:
        raise ValueError(f"invalid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    name = found.get("type")
    cls = TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"unknown record type {name!r}")
    values: dict[str, Any] = {}
    for name, is_required, check, expected in _FIELDS[cls]:
        if name in found:
            value = found[name]
            if not check(value):
                raise ValueError(f"{name} must be {expected}, not {value!r}")
            values[name] = tuple(value) if isinstance(value, list) else value
        elif is_required:
            raise ValueError(f"missing field {name}")
    return cls(**values)
