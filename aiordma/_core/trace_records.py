"""The lines of a trace of the embedded device, one class for each type (see docs/trace.md).

Times are nanoseconds of CLOCK_MONOTONIC. Names of opcodes, statuses, states and events are those of
the C header without their prefixes. A field that a line need not have is None when it has not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

from aiordma._core.strict_json import parse_json

VERSION = 1
"""The version of the schema that this module reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A line of a trace, with the time at which it was written."""

    TYPE: ClassVar[str]
    """The ``type`` of such lines."""

    t: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header(Record):
    """The first line of a run: which process, when by both clocks, in which boot of the kernel.

    ``t`` and ``realtime_ns`` are the same moment; traces with the same ``boot_id`` have one clock.
    """

    version: int
    realtime_ns: int
    boot_id: str
    pid: int
    command: str
    host: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted(Record):
    """A posted work request of either queue; ``length`` is the bytes of its memory.

    ``request`` is the number by which a completion names its request, unique among those under way.
    """

    request: int
    wr_id: int
    length: int
    num_sge: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PostedSend(Posted):
    """A work request in a send queue: ibv_post_send(3), ibv_wr_post(3), ibv_bind_mw(3)."""

    qp_num: int
    opcode: str
    send_flags: tuple[str, ...] = ()
    imm_data: int | None = None
    remote_addr: int | None = None
    rkey: int | None = None
    invalidate_rkey: int | None = None
    remote_qpn: int | None = None
    remote_srqn: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PostedReceive(Posted):
    """A receive of a queue pair: ibv_post_recv(3)."""

    qp_num: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PostedSharedReceive(Posted):
    """A receive of a shared receive queue: ibv_post_srq_recv(3)."""

    srq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Record):
    """A work request that was not taken, with the errno value that the call returned."""

    wr_id: int
    errno: int
    error: str
    qp_num: int | None = None
    srq: int | None = None
    opcode: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Record):
    """A work completion, when the device put it into its queue.

    ``request`` is 0 when the request was posted before the trace began. ``lost``: the completion
    queue had no room, so the application never saw it.
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
    lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedQP(Record):
    """A new queue pair, in RESET. With XRC, neither side has both completion queues."""

    qp_num: int
    qp_type: str
    send_cq: int | None = None
    recv_cq: int | None = None
    srq: int | None = None
    sq_sig_all: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DestroyedQP(Record):
    """A queue pair is no more, and what was outstanding on it is forgotten."""

    qp_num: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QPStateChange(Record):
    """A queue pair went from ``cur_qp_state`` to ``qp_state``, asked or by itself."""

    qp_num: int
    cur_qp_state: str
    qp_state: str
    dest_qp_num: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncEvent(Record):
    """An asynchronous event, when it came up: ibv_get_async_event(3)."""

    event_type: str
    qp_num: int | None = None
    cq: int | None = None
    srq: int | None = None
    port_num: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry(Record):
    """Requests are transmitted again, from the oldest on.

    ``cause`` is ``RNR`` when the receiver was not ready, ``LOSS`` when something got lost.
    """

    qp_num: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRefused(Record):
    """The peer of a queue pair may not reach what its request names: the owner's trace says why.

    ``reason`` is one of those in docs/trace.md. ``access`` are the rights that the request needs;
    one that ends a window has none, and no address.
    """

    qp_num: int
    reason: str
    rkey: int
    access: tuple[str, ...] = ()
    remote_addr: int | None = None
    length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(Record):
    """A fault on command struck: ``LOSS``, ``DUPLICATE``, ``RNR``, ``CUT``, ``OVERRUN`` ..."""

    fault: str
    qp_num: int | None = None
    cq: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Record):
    """The last line: the trace was stopped, or could not go on because of ``error``."""

    error: str | None = None


TYPES: dict[str, type[Record]] = {
    "trace": Header,
    "post_send": PostedSend,
    "post_recv": PostedReceive,
    "post_srq_recv": PostedSharedReceive,
    "refused": Refused,
    "completion": Completion,
    "create_qp": CreatedQP,
    "destroy_qp": DestroyedQP,
    "qp_state": QPStateChange,
    "async_event": AsyncEvent,
    "retry": Retry,
    "access_refused": AccessRefused,
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


# What a field's annotation asks of its value. Null is no way to leave a field out.
_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "int": (_is_number, "a number of at most 64 bits"),
    "str": (_is_text, "a text"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "tuple[str, ...]": (
        lambda value: isinstance(value, list) and all(map(_is_text, value)),
        "a list of texts",
    ),
}

_FIELDS: dict[type[Record], list[tuple[str, bool, Callable[[object], bool], str]]] = {
    cls: [
        (each.name, each.default is MISSING, *_CHECKS[str(each.type).removesuffix(" | None")])
        for each in fields(cls)
    ]
    for cls in TYPES.values()
}


def parse(line: str) -> Record:
    """One line as a record; ValueError with a text that says what is wrong with it.

    Fields that are not known are passed over, so that a newer writer may add some.
    """
    try:
        found = parse_json(line)
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    name = found.get("type")
    cls = TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"there is no record of type {name!r}")
    values: dict[str, Any] = {}
    for name, needed, check, what in _FIELDS[cls]:
        if name in found:
            value = found[name]
            if not check(value):
                raise ValueError(f"{name} is {value!r}, which is not {what}")
            values[name] = tuple(value) if isinstance(value, list) else value
        elif needed:
            raise ValueError(f"it has no {name}")
    return cls(**values)
