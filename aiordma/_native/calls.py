"""A table of calls with every failure turned into an exception: the only place that does.

C reports failure in several ways, and each call has its own; `CONVENTIONS` says which, from the
manual page of the call (ibv_*(3), rdma_*(3)). A call here returns what remains without failure:
nothing, a pointer, a count.
"""

from __future__ import annotations

import errno
import os
import resource as limits
from collections.abc import Callable, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from aiordma.errors import UnsupportedError, VerbsError

from ._lib import ffi, lib

if TYPE_CHECKING:
    from . import handles as h


class Convention(Enum):
    """How a call says that it failed."""

    ERRNO = auto()
    """Returns 0 or an errno value; some providers return -1 and set errno."""
    MINUS_ONE = auto()
    """Returns 0, or -1 and sets errno."""
    POINTER = auto()
    """Returns a pointer, or NULL and sets errno."""
    COUNT = auto()
    """Returns a number, or a negative errno value."""
    EVENT = auto()
    """As MINUS_ONE, but EAGAIN is an answer: here the call returns whether there was an event."""
    PLAIN = auto()
    """Cannot fail; what it returns is passed on."""


CONVENTIONS: Mapping[str, Convention] = MappingProxyType(
    {
        "ibv_get_device_list": Convention.POINTER,
        "ibv_free_device_list": Convention.PLAIN,
        "ibv_get_device_name": Convention.PLAIN,
        "ibv_get_device_guid": Convention.PLAIN,
        "ibv_open_device": Convention.POINTER,
        "ibv_close_device": Convention.MINUS_ONE,
        "ibv_get_async_event": Convention.EVENT,
        "ibv_ack_async_event": Convention.PLAIN,
        "ibv_query_device": Convention.ERRNO,
        "ibv_query_port": Convention.ERRNO,
        "ibv_query_gid": Convention.MINUS_ONE,
        "_ibv_query_gid_ex": Convention.ERRNO,
        "_ibv_query_gid_table": Convention.COUNT,
        "ibv_query_pkey": Convention.MINUS_ONE,
        "ibv_alloc_pd": Convention.POINTER,
        "ibv_dealloc_pd": Convention.ERRNO,
        "ibv_reg_mr": Convention.POINTER,
        "ibv_reg_mr_iova2": Convention.POINTER,
        "ibv_dereg_mr": Convention.ERRNO,
        "ibv_create_comp_channel": Convention.POINTER,
        "ibv_destroy_comp_channel": Convention.ERRNO,
        "ibv_create_cq": Convention.POINTER,
        "ibv_resize_cq": Convention.ERRNO,
        "ibv_destroy_cq": Convention.ERRNO,
        "ibv_get_cq_event": Convention.EVENT,
        "ibv_ack_cq_events": Convention.PLAIN,
        "ibv_create_qp": Convention.POINTER,
        "ibv_modify_qp": Convention.ERRNO,
        "ibv_query_qp": Convention.ERRNO,
        "ibv_destroy_qp": Convention.ERRNO,
        "ibv_create_srq": Convention.POINTER,
        "ibv_modify_srq": Convention.ERRNO,
        "ibv_query_srq": Convention.ERRNO,
        "ibv_destroy_srq": Convention.ERRNO,
        "ibv_qp_to_qp_ex": Convention.POINTER,
        "ibv_set_ece": Convention.ERRNO,
        "ibv_query_ece": Convention.ERRNO,
        "ibv_create_ah": Convention.POINTER,
        "ibv_init_ah_from_wc": Convention.MINUS_ONE,
        "ibv_destroy_ah": Convention.ERRNO,
        "ibv_attach_mcast": Convention.ERRNO,
        "ibv_detach_mcast": Convention.ERRNO,
        "ibv_is_fork_initialized": Convention.PLAIN,
        "ibv_wc_status_str": Convention.PLAIN,
        "ibv_event_type_str": Convention.PLAIN,
        "ibv_rereg_mr": Convention.PLAIN,  # a number of its own says what state the region is in
        "ibv_reg_dmabuf_mr": Convention.POINTER,
        "rdma_create_event_channel": Convention.POINTER,
        "rdma_destroy_event_channel": Convention.PLAIN,
        "rdma_create_id": Convention.MINUS_ONE,
        "rdma_destroy_id": Convention.MINUS_ONE,
        "rdma_bind_addr": Convention.MINUS_ONE,
        "rdma_resolve_addr": Convention.MINUS_ONE,
        "rdma_resolve_route": Convention.MINUS_ONE,
        "rdma_create_qp": Convention.MINUS_ONE,
        "rdma_create_qp_ex": Convention.MINUS_ONE,
        "rdma_destroy_qp": Convention.PLAIN,
        "rdma_connect": Convention.MINUS_ONE,
        "rdma_establish": Convention.MINUS_ONE,
        "rdma_listen": Convention.MINUS_ONE,
        "rdma_accept": Convention.MINUS_ONE,
        "rdma_reject": Convention.MINUS_ONE,
        "rdma_notify": Convention.MINUS_ONE,
        "rdma_disconnect": Convention.MINUS_ONE,
        "rdma_get_cm_event": Convention.EVENT,
        "rdma_ack_cm_event": Convention.MINUS_ONE,
        "rdma_get_src_port": Convention.PLAIN,
        "rdma_get_dst_port": Convention.PLAIN,
        "rdma_event_str": Convention.PLAIN,
        "rdma_set_option": Convention.MINUS_ONE,
        "rdma_migrate_id": Convention.MINUS_ONE,
        "rdma_init_qp_attr": Convention.MINUS_ONE,
        "rdma_join_multicast_ex": Convention.MINUS_ONE,
        "rdma_leave_multicast": Convention.MINUS_ONE,
        "rdma_getaddrinfo": Convention.MINUS_ONE,
        "rdma_freeaddrinfo": Convention.PLAIN,
        "rdma_get_devices": Convention.POINTER,
        "rdma_free_devices": Convention.PLAIN,
        "rdma_reject_ece": Convention.MINUS_ONE,
        "rdma_set_local_ece": Convention.MINUS_ONE,
        "rdma_get_remote_ece": Convention.MINUS_ONE,
    }
)

EXTENDED: Mapping[str, Convention] = MappingProxyType(
    {
        "ibv_query_device_ex": Convention.ERRNO,
        "ibv_query_rt_values_ex": Convention.ERRNO,
        "ibv_create_cq_ex": Convention.POINTER,
        "ibv_modify_cq": Convention.ERRNO,
        "ibv_advise_mr": Convention.ERRNO,
        "ibv_alloc_null_mr": Convention.POINTER,
        "ibv_alloc_dm": Convention.POINTER,
        "ibv_free_dm": Convention.ERRNO,
        "ibv_reg_dm_mr": Convention.POINTER,
        "ibv_memcpy_to_dm": Convention.ERRNO,
        "ibv_memcpy_from_dm": Convention.ERRNO,
        "ibv_alloc_td": Convention.POINTER,
        "ibv_dealloc_td": Convention.ERRNO,
        "ibv_alloc_parent_domain": Convention.POINTER,
        "ibv_open_xrcd": Convention.POINTER,
        "ibv_close_xrcd": Convention.ERRNO,
        "ibv_create_srq_ex": Convention.POINTER,
        "ibv_get_srq_num": Convention.ERRNO,
        "ibv_create_qp_ex": Convention.POINTER,
        "ibv_open_qp": Convention.POINTER,
        "ibv_modify_qp_rate_limit": Convention.ERRNO,
        "ibv_alloc_mw": Convention.POINTER,
        "ibv_dealloc_mw": Convention.ERRNO,
        "ibv_bind_mw": Convention.ERRNO,
    }
)
"""Calls that no library exports: native/verbs/extended.c has each, as ``aiordma_`` for ``ibv_``."""

# 524 is the kernel's ENOTSUPP, which is not for programs but reaches them.
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, 524})


def failure(verb: str, code: int, detail: str = "") -> VerbsError:
    """The exception for a call that failed with errno value ``code``."""
    if code in _UNSUPPORTED:
        return UnsupportedError(detail or verb, verb=verb, errno=code)
    if code == errno.EMFILE:
        detail = f"{detail}; {open_files_hint()}" if detail else open_files_hint()
    return VerbsError(code, verb, detail)


def shortage_hint() -> str:
    """A hint for an error text if this process is out of file descriptors, else ""."""
    try:
        os.close(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return f"this process can open no more files: {open_files_hint()}"
    return ""


def open_files_hint() -> str:
    """The limit on open files, and how to raise it."""
    soft, hard = limits.getrlimit(limits.RLIMIT_NOFILE)
    return (
        f"this process may have {soft} files open at a time (RLIMIT_NOFILE, hard limit: {hard}),"
        " and a connection over TCP is one of them; raise it with 'ulimit -n' or LimitNOFILE="
        " of the systemd unit"
    )


def errno_of(code: int) -> int:
    """The errno value of a failed call that returns one; some providers return -1 and set errno."""
    return code if code > 0 else ffi.errno if code == -1 else -code


def explained(error: VerbsError, detail: str) -> VerbsError:
    """The failure with a text that says what it was about."""
    return failure(error.verb, error.errno or 0, detail)


def checked(verb: str, call: Callable[..., Any], convention: Convention) -> Callable[..., Any]:
    """A C function as a call that raises, by its convention."""

    # errno is cleared first: a call that fails without setting it must not show an older one.
    def errno_value(*arguments: object) -> None:
        ffi.errno = 0
        code: int = call(*arguments)
        if code:
            raise failure(verb, errno_of(code))

    def minus_one(*arguments: object) -> None:
        ffi.errno = 0
        code: int = call(*arguments)
        if code:
            # The manual says -1; older librdmacm and some providers pass errno values through.
            raise failure(verb, ffi.errno or abs(code))

    def pointer(*arguments: object) -> object:
        ffi.errno = 0
        result: object = call(*arguments)
        if not result:
            raise failure(verb, ffi.errno)
        return result

    def count(*arguments: object) -> int:
        result: int = call(*arguments)
        if result < 0:
            raise failure(verb, -result)
        return result

    def event(*arguments: object) -> bool:
        while True:
            ffi.errno = 0
            if call(*arguments) == 0:
                return True
            code = ffi.errno
            if code == errno.EAGAIN:
                return False
            if code != errno.EINTR:
                raise failure(verb, code)

    return {
        Convention.ERRNO: errno_value,
        Convention.MINUS_ONE: minus_one,
        Convention.POINTER: pointer,
        Convention.COUNT: count,
        Convention.EVENT: event,
        Convention.PLAIN: call,
    }[convention]


def _missing(verb: str) -> Callable[..., Any]:
    # One of the OPTIONAL calls of native/abi/calls.h, which an older library does not have.
    def missing(*arguments: object) -> None:
        raise failure(verb, errno.ENOSYS, f"{verb}: the installed library is too old to have it")

    return missing


class Calls:
    """The calls of one library, each raising :class:`VerbsError` (or its ``UnsupportedError``).

    The annotations are what is left to pass and to return; a test compares them with `CONVENTIONS`,
    with `EXTENDED` and with the C structure, which has more: what only unmodified C programs call
    is not here.
    """

    ibv_get_device_list: Callable[[h.IntegerPointer], h.DeviceList]
    ibv_free_device_list: Callable[[h.DeviceList], None]
    ibv_get_device_name: Callable[[h.DevicePointer], h.Text]
    ibv_get_device_guid: Callable[[h.DevicePointer], int]
    ibv_open_device: Callable[[h.DevicePointer], h.ContextPointer]
    ibv_close_device: Callable[[h.ContextPointer], None]
    ibv_get_async_event: Callable[[h.ContextPointer, h.AsyncEvent], bool]
    ibv_ack_async_event: Callable[[h.AsyncEvent], None]
    ibv_query_device: Callable[[h.ContextPointer, h.DeviceAttr], None]
    ibv_query_port: Callable[[h.ContextPointer, int, h.CompatPortAttr], None]
    ibv_query_gid: Callable[[h.ContextPointer, int, int, h.Gid], None]
    _ibv_query_gid_ex: Callable[[h.ContextPointer, int, int, h.GidEntry, int, int], None]
    _ibv_query_gid_table: Callable[[h.ContextPointer, h.GidEntries, int, int, int], int]
    ibv_query_pkey: Callable[[h.ContextPointer, int, int, h.IntegerPointer], None]
    ibv_alloc_pd: Callable[[h.ContextPointer], h.PDPointer]
    ibv_dealloc_pd: Callable[[h.PDPointer], None]
    ibv_reg_mr: Callable[[h.PDPointer, h.VoidPointer | h.Characters, int, int], h.MRPointer]
    ibv_reg_mr_iova2: Callable[
        [h.PDPointer, h.VoidPointer | h.Characters, int, int, int], h.MRPointer
    ]
    ibv_dereg_mr: Callable[[h.MRPointer], None]
    ibv_create_comp_channel: Callable[[h.ContextPointer], h.ChannelPointer]
    ibv_destroy_comp_channel: Callable[[h.ChannelPointer], None]
    ibv_create_cq: Callable[
        [h.ContextPointer, int, h.Null, h.ChannelPointer | h.Null, int], h.CQPointer
    ]
    ibv_resize_cq: Callable[[h.CQPointer, int], None]
    ibv_destroy_cq: Callable[[h.CQPointer], None]
    ibv_get_cq_event: Callable[
        [h.ChannelPointer, h.Pointer[h.CQPointer], h.Pointer[h.VoidPointer]], bool
    ]
    ibv_ack_cq_events: Callable[[h.CQPointer, int], None]
    ibv_create_qp: Callable[[h.PDPointer, h.QPInitAttr], h.QPPointer]
    ibv_modify_qp: Callable[[h.QPPointer, h.QPAttr, int], None]
    ibv_query_qp: Callable[[h.QPPointer, h.QPAttr, int, h.QPInitAttr], None]
    ibv_destroy_qp: Callable[[h.QPPointer], None]
    ibv_create_srq: Callable[[h.PDPointer, h.SRQInitAttr], h.SRQPointer]
    ibv_modify_srq: Callable[[h.SRQPointer, h.SRQAttr, int], None]
    ibv_query_srq: Callable[[h.SRQPointer, h.SRQAttr], None]
    ibv_destroy_srq: Callable[[h.SRQPointer], None]
    ibv_qp_to_qp_ex: Callable[[h.QPPointer], h.QPExPointer]
    ibv_set_ece: Callable[[h.QPPointer, h.Ece], None]
    ibv_query_ece: Callable[[h.QPPointer, h.Ece], None]
    ibv_create_ah: Callable[[h.PDPointer, h.AHAttr], h.AHPointer]
    ibv_init_ah_from_wc: Callable[[h.ContextPointer, int, h.WC, h.Grh, h.AHAttr], None]
    ibv_destroy_ah: Callable[[h.AHPointer], None]
    ibv_attach_mcast: Callable[[h.QPPointer, h.Gid, int], None]
    ibv_detach_mcast: Callable[[h.QPPointer, h.Gid, int], None]
    ibv_is_fork_initialized: Callable[[], int]
    ibv_wc_status_str: Callable[[int], h.Text]
    ibv_event_type_str: Callable[[int], h.Text]
    ibv_rereg_mr: Callable[
        [h.MRPointer, int, h.PDPointer | h.Null, h.VoidPointer | h.Characters | h.Null, int, int],
        int,
    ]
    ibv_reg_dmabuf_mr: Callable[[h.PDPointer, int, int, int, int, int], h.MRPointer]
    ibv_query_device_ex: Callable[[h.ContextPointer, h.DeviceAttrEx], None]
    ibv_query_rt_values_ex: Callable[[h.ContextPointer, h.ValuesEx], None]
    ibv_create_cq_ex: Callable[[h.ContextPointer, h.CQInitAttrEx], h.CQExPointer]
    ibv_modify_cq: Callable[[h.CQPointer, h.ModifyCQAttr], None]
    ibv_advise_mr: Callable[[h.PDPointer, int, int, h.Sge, int], None]
    ibv_alloc_null_mr: Callable[[h.PDPointer], h.MRPointer]
    ibv_alloc_dm: Callable[[h.ContextPointer, h.AllocDMAttr], h.DMPointer]
    ibv_free_dm: Callable[[h.DMPointer], None]
    ibv_reg_dm_mr: Callable[[h.PDPointer, h.DMPointer, int, int, int], h.MRPointer]
    ibv_memcpy_to_dm: Callable[[h.DMPointer, int, h.VoidPointer, int], None]
    ibv_memcpy_from_dm: Callable[[h.Characters, h.DMPointer, int, int], None]
    ibv_alloc_td: Callable[[h.ContextPointer, h.TDInitAttr], h.TDPointer]
    ibv_dealloc_td: Callable[[h.TDPointer], None]
    ibv_alloc_parent_domain: Callable[[h.ContextPointer, h.ParentDomainInitAttr], h.PDPointer]
    ibv_open_xrcd: Callable[[h.ContextPointer, h.XRCDInitAttr], h.XRCDPointer]
    ibv_close_xrcd: Callable[[h.XRCDPointer], None]
    ibv_create_srq_ex: Callable[[h.ContextPointer, h.SRQInitAttrEx], h.SRQPointer]
    ibv_get_srq_num: Callable[[h.SRQPointer, h.IntegerPointer], None]
    ibv_create_qp_ex: Callable[[h.ContextPointer, h.QPInitAttrEx], h.QPPointer]
    ibv_open_qp: Callable[[h.ContextPointer, h.QPOpenAttr], h.QPPointer]
    ibv_modify_qp_rate_limit: Callable[[h.QPPointer, h.QPRateLimitAttr], None]
    ibv_alloc_mw: Callable[[h.PDPointer, int], h.MWPointer]
    ibv_dealloc_mw: Callable[[h.MWPointer], None]
    ibv_bind_mw: Callable[[h.QPPointer, h.MWPointer, h.MWBind], None]
    rdma_create_event_channel: Callable[[], h.EventChannelPointer]
    rdma_destroy_event_channel: Callable[[h.EventChannelPointer], None]
    rdma_create_id: Callable[[h.EventChannelPointer, h.Pointer[h.IdPointer], h.Null, int], None]
    rdma_destroy_id: Callable[[h.IdPointer], None]
    rdma_bind_addr: Callable[[h.IdPointer, h.SocketAddress], None]
    rdma_resolve_addr: Callable[[h.IdPointer, h.SocketAddress | h.Null, h.SocketAddress, int], None]
    rdma_resolve_route: Callable[[h.IdPointer, int], None]
    rdma_create_qp: Callable[[h.IdPointer, h.PDPointer, h.QPInitAttr], None]
    rdma_create_qp_ex: Callable[[h.IdPointer, h.QPInitAttrEx], None]
    rdma_destroy_qp: Callable[[h.IdPointer], None]
    rdma_connect: Callable[[h.IdPointer, h.ConnParam], None]
    rdma_establish: Callable[[h.IdPointer], None]
    rdma_listen: Callable[[h.IdPointer, int], None]
    rdma_accept: Callable[[h.IdPointer, h.ConnParam], None]
    rdma_reject: Callable[[h.IdPointer, bytes | h.Null, int], None]
    rdma_notify: Callable[[h.IdPointer, int], None]
    rdma_disconnect: Callable[[h.IdPointer], None]
    rdma_get_cm_event: Callable[[h.EventChannelPointer, h.Pointer[h.EventPointer]], bool]
    rdma_ack_cm_event: Callable[[h.EventPointer], None]
    rdma_get_src_port: Callable[[h.IdPointer], int]
    rdma_get_dst_port: Callable[[h.IdPointer], int]
    rdma_event_str: Callable[[int], h.Text]
    rdma_set_option: Callable[[h.IdPointer, int, int, h.IntegerPointer, int], None]
    rdma_migrate_id: Callable[[h.IdPointer, h.EventChannelPointer], None]
    rdma_init_qp_attr: Callable[[h.IdPointer, h.QPAttr, h.IntegerPointer], None]
    rdma_join_multicast_ex: Callable[[h.IdPointer, h.JoinAttr, h.VoidPointer], None]
    rdma_leave_multicast: Callable[[h.IdPointer, h.SocketAddress], None]
    rdma_getaddrinfo: Callable[
        [h.Characters | h.Null, h.Characters | h.Null, h.AddrInfo, h.Pointer[h.AddrInfo]], None
    ]
    rdma_freeaddrinfo: Callable[[h.AddrInfo], None]
    rdma_get_devices: Callable[[h.IntegerPointer], h.Pointer[h.ContextPointer]]
    rdma_free_devices: Callable[[h.Pointer[h.ContextPointer]], None]
    rdma_reject_ece: Callable[[h.IdPointer, bytes | h.Null, int], None]
    rdma_set_local_ece: Callable[[h.IdPointer, h.Ece], None]
    rdma_get_remote_ece: Callable[[h.IdPointer, h.Ece], None]

    def __init__(self, table: h.CallsPointer) -> None:
        for verb, convention in CONVENTIONS.items():
            call = getattr(table, verb)
            setattr(self, verb, checked(verb, call, convention) if call else _missing(verb))
        for verb, convention in EXTENDED.items():
            call = getattr(lib, verb.replace("ibv_", "aiordma_", 1))
            setattr(self, verb, checked(verb, call, convention))
