"""Queue pair creation: which C function to call, and explanations for failures."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypedDict

from aiordma import verbs
from aiordma._core.arguments import U32_MAX, choice, instance, integer, truth
from aiordma._native import failure, ffi
from aiordma._native import handles as h
from aiordma.errors import UnsupportedError, VerbsError

from .._cq.completion import CompletionQueue
from .._device.enums import DeviceCapability, QPCreateFlags, QPType
from .._device.resource import Node, Resource
from .qp_attributes import QPCapabilities, reset_function
from .queue_pair import QueuePair
from .shared_receive_queue import SharedReceiveQueue
from .transport_rules import SendOps

# Bits of enum ibv_qp_init_attr_mask.
_PD, _CREATE_FLAGS, _MAX_TSO_HEADER, _SEND_OPS = 1 << 0, 1 << 2, 1 << 3, 1 << 6

# The device capabilities for each optional operation, from the kernel's enum
# ib_uverbs_device_cap_flags. `_check_supported` checks them, because some providers accept these
# operations even if the device does not support them (rdma-core 44 on Linux 6.1).
_CAPABILITIES = {
    SendOps.ATOMIC_WRITE: (1 << 40, "atomic writes"),
    SendOps.FLUSH: (1 << 38 | 1 << 39, "flushes"),
}

XRC = "extended reliable connections (XRC)"

# The device attribute that limits each capability (ibv_query_device(3)).
_DEVICE_LIMITS = {
    "max_send_wr": "max_qp_wr",
    "max_recv_wr": "max_qp_wr",
    "max_send_sge": "max_sge",
    "max_recv_sge": "max_sge",
}


class QPOptions(NamedTuple):
    """Options that only ibv_create_qp_ex(3) supports. If none is set, ibv_create_qp(3) is used."""

    send_ops: SendOps = SendOps.NONE
    create_flags: QPCreateFlags = QPCreateFlags.NONE
    source_qpn: int | None = None
    max_tso_header: int = 0

    def checked(self) -> Self:
        """Return the options with the caller's values converted to Python integers."""
        if self == _DEFAULT_OPTIONS:
            return self
        source_qpn = self.source_qpn
        return self._replace(
            send_ops=choice("send_ops", self.send_ops, SendOps),
            create_flags=choice("create_flags", self.create_flags, QPCreateFlags),
            source_qpn=None
            if source_qpn is None
            else integer("source_qpn", source_qpn, 0, U32_MAX),
            max_tso_header=integer("max_tso_header", self.max_tso_header, 0, U32_MAX),
        )

    def __bool__(self) -> bool:
        return self != _DEFAULT_OPTIONS

    def write(self, attr: h.ibv_qp_init_attr_ex) -> None:
        """Write the options to ``struct ibv_qp_init_attr_ex``."""
        flags = self.create_flags
        if self.source_qpn is not None:
            flags |= QPCreateFlags.SOURCE_QPN
            attr.source_qpn = self.source_qpn
        if flags:
            attr.comp_mask |= _CREATE_FLAGS
            attr.create_flags = int(flags)
        if self.max_tso_header:
            attr.comp_mask |= _MAX_TSO_HEADER
            attr.max_tso_header = self.max_tso_header
        if self.send_ops:
            attr.comp_mask |= _SEND_OPS
            attr.send_ops_flags = int(self.send_ops)

    def __str__(self) -> str:
        parts = [
            f"{name}={value!r}"
            for name in self._fields
            if (value := getattr(self, name)) != getattr(_DEFAULT_OPTIONS, name)
        ]
        return f" with {', '.join(parts)}" if parts else ""


_DEFAULT_OPTIONS = QPOptions()


class QPKeywords(TypedDict, total=False):
    """The keyword arguments of :meth:`ProtectionDomain.create_qp`, for functions that wrap it."""

    qp_type: QPType
    sq_sig_all: bool
    srq: SharedReceiveQueue | None
    send_ops: SendOps
    create_flags: QPCreateFlags
    source_qpn: int | None
    max_tso_header: int


class QPFactory:
    """Creates and destroys queue pairs with ibv_ functions. A subclass uses librdmacm instead."""

    def create(self, pd: verbs.ProtectionDomain, attr: h.ibv_qp_init_attr) -> h.ibv_qp:
        return pd.context.library.calls.ibv_create_qp(pd.pointer, attr)

    def create_ex(self, pd: verbs.ProtectionDomain, attr: h.ibv_qp_init_attr_ex) -> h.ibv_qp:
        return pd.context.library.calls.ibv_create_qp_ex(pd.context.pointer, attr)

    def destroy(self, pd: verbs.ProtectionDomain) -> Callable[[h.ibv_qp], object]:
        """Return the function that destroys the queue pair."""
        return pd.context.library.calls.ibv_destroy_qp

    def parents(self) -> list[Node[Any]]:
        """Return any additional nodes that must stay open until the queue pair is closed."""
        return []


_VERBS_FACTORY = QPFactory()


def init_members(
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    capabilities: QPCapabilities,
    qp_type: int,
    sq_sig_all: bool,
    srq: Resource[h.ibv_srq] | None = None,
) -> dict[str, Any]:
    """Return the members common to ``ibv_qp_init_attr`` and ``ibv_qp_init_attr_ex``."""
    return {
        "send_cq": send_cq.pointer,
        "recv_cq": recv_cq.pointer,
        "srq": ffi.NULL if srq is None else srq.pointer,
        "cap": capabilities,
        "qp_type": qp_type,
        "sq_sig_all": int(sq_sig_all),
    }


def init_attr_ex(
    pd: verbs.ProtectionDomain, members: dict[str, Any], options: QPOptions
) -> h.ibv_qp_init_attr_ex:
    """Create a ``struct ibv_qp_init_attr_ex`` from the common members and the options.

    Raises:
        OverflowError: If a number does not fit into its member.
    """
    attr = ffi.new("struct ibv_qp_init_attr_ex *", members)
    attr.comp_mask, attr.pd = _PD, pd.pointer
    options.write(attr)
    return attr


def create_qp(
    pd: verbs.ProtectionDomain,
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    capabilities: QPCapabilities,
    qp_type: QPType,
    sq_sig_all: bool,
    srq: SharedReceiveQueue | None,
    options: QPOptions,
    reserved: bool,
    factory: QPFactory = _VERBS_FACTORY,
) -> QueuePair:
    """Create a queue pair for a protection domain or a :class:`ConnectionId`.

    ``factory`` calls the C functions, which differ between libibverbs and librdmacm.
    """
    context = pd.context
    hint = "pass it as capabilities=..." if isinstance(recv_cq, QPCapabilities) else ""
    for name, cq in (("send_cq", send_cq), ("recv_cq", recv_cq)):
        instance(name, cq, CompletionQueue, "a CompletionQueue (from create_cq)", hint)
    if srq is not None:
        instance("srq", srq, Resource, "a SharedReceiveQueue (from create_srq)")
    capabilities = QPCapabilities._convert(capabilities)
    qp_type, sq_sig_all = choice("qp_type", qp_type, QPType), truth("sq_sig_all", sq_sig_all)
    options = options.checked()
    _check_supported(context, qp_type, options.send_ops)
    members = init_members(send_cq, recv_cq, capabilities, qp_type, sq_sig_all, srq)
    attr: h.ibv_qp_init_attr | h.ibv_qp_init_attr_ex
    try:
        if options:
            attr = init_attr_ex(pd, members, options)
            pointer = factory.create_ex(pd, attr)
        else:
            attr = ffi.new("struct ibv_qp_init_attr *", members)
            pointer = factory.create(pd, attr)
    except OverflowError as error:
        message = f"cannot create a queue pair with {capabilities}{options}"
        raise ValueError(f"{message}: {error}") from None
    except VerbsError as error:
        raise creation_error(error, context, qp_type, capabilities, options) from None
    parents: list[Node[Any]] = [pd.node, send_cq.node, recv_cq.node, *factory.parents()]
    if srq is not None:
        parents.append(srq.node)
    node = Node("QueuePair", pointer, factory.destroy(pd), parents)
    node.halt = reset_function(context.library)
    return QueuePair(
        node, pd, send_cq, recv_cq, attr, srq=srq, send_ops=options.send_ops, reserved=reserved
    )


def _check_supported(context: verbs.Context, qp_type: QPType, send_ops: SendOps) -> None:
    if qp_type is QPType.XRC_RECV:
        raise ValueError(
            "cannot create an XRC_RECV queue pair from a protection domain; use"
            " XRCDomain.create_qp()"
        )
    if qp_type is QPType.XRC_SEND:
        require_xrc(context, "ibv_create_qp")
    for operation, (bits, text) in _CAPABILITIES.items():
        if send_ops & operation and not context.query_device_ex().device_cap_flags_ex & bits:
            raise context._unsupported_error(text, "ibv_create_qp_ex")


def require_xrc(context: verbs.Context, verb: str) -> None:
    """Raise UnsupportedError if the device does not report XRC support."""
    if not context.query_device().device_cap_flags & DeviceCapability.XRC:
        raise context._unsupported_error(XRC, verb)


def creation_error(
    error: VerbsError,
    context: verbs.Context,
    qp_type: QPType,
    capabilities: QPCapabilities,
    options: QPOptions,
) -> VerbsError:
    code = error.errno or 0
    if isinstance(error, UnsupportedError):
        return context._unsupported_error(f"{qp_type.name} queue pairs{options}", error.verb, code)
    description = f"{qp_type.name} queue pair with {capabilities}{options}"
    detail = f"cannot create the {description} on {context.name}"
    limits = context.query_device()
    for name, limit in _DEVICE_LIMITS.items():
        if getattr(capabilities, name) > getattr(limits, limit):
            detail += f"; {name} must be at most {getattr(limits, limit)} ({limit} of the device)"
    if qp_type is QPType.RAW_PACKET and code == errno.EPERM:
        detail += "; raw packets require the capability CAP_NET_RAW"
    return failure(error.verb, code, detail)
