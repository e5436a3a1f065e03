"""The C structures and functions of libibverbs and librdmacm, for features without a Python API.

::

    from aiordma.verbs import raw

    attr = raw.ffi.new("struct ibv_device_attr *")
    context.library.calls.ibv_query_device(context.pointer, attr)
    print(attr.max_qp, raw.IBV_QPT_RC)

- The ``pointer`` attribute of every object in :mod:`aiordma.verbs` and :mod:`aiordma.cm` is a cffi
  pointer to its C structure.
- The ``library.calls`` attribute of a context, channel or ID provides the libraries' exported
  functions under their C names. A failed call raises VerbsError, or UnsupportedError if the device
  or library does not support it. Otherwise, it returns the C function's result without the error
  code.
- This module provides the functions defined inline in the C headers. The functions described in
  ibv_wr_post(3) and ibv_create_cq_ex(3) are structure members: ``qp_ex.wr_start(qp_ex)``.
- Every constant of the C headers is an attribute of this module, for example
  ``raw.IBV_SEND_SIGNALED``.

As in C, only the device checks arguments, and you must keep memory alive yourself. Call
:meth:`QueuePair.untrack` before posting requests with these functions. See docs/raw-handles.md.
"""

from __future__ import annotations

import errno

from aiordma._native import errno_of, failure, lib
from aiordma._native import ffi as _ffi
from aiordma._native import handles as h

__all__ = [
    "ffi", "ibv_poll_cq", "ibv_post_recv", "ibv_post_send", "ibv_post_srq_recv", "ibv_req_notify_cq"
]  # fmt: skip

ffi: h.FFI = _ffi
"""The cffi object for all of aiordma's C structures, with ``new``, ``cast``, ``sizeof`` etc.

``ffi.cast("struct ibv_qp *", address)`` converts an address to a pointer.
"""

_CONSTANTS = ("IBV_", "IB_UVERBS_", "RAI_", "RDMA_")


def __getattr__(name: str) -> int:
    """Return a constant or enumerator defined in infiniband/verbs.h or rdma/rdma_cma.h."""
    if name.startswith(_CONSTANTS) and isinstance(value := getattr(lib, name, None), int):
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def ibv_poll_cq(cq: h.ibv_cq, num_entries: int, wc: h.ibv_wc) -> int:
    """Store up to ``num_entries`` completions in the array ``wc`` and return the number stored.

    See ibv_poll_cq(3).
    """
    count: int = cq.context.ops.poll_cq(cq, num_entries, wc)
    if count < 0:
        raise failure("ibv_poll_cq", errno.EIO)
    return count


def ibv_req_notify_cq(cq: h.ibv_cq, solicited_only: int) -> None:
    """Request an event for the next completion on a completion queue. See ibv_req_notify_cq(3)."""
    _check("ibv_req_notify_cq", cq.context.ops.req_notify_cq(cq, solicited_only))


def ibv_post_send(
    qp: h.ibv_qp, wr: h.ibv_send_wr, bad_wr: h.Pointer[h.ibv_send_wr] | None = None
) -> None:
    """Post a linked list of send requests. See ibv_post_send(3).

    Args:
        qp: The queue pair.
        wr: The first request in the list.
        bad_wr: Set to a pointer to the first request that was not posted, if the device reports
            one.

    Raises:
        VerbsError: If the device rejects a request.
    """
    bad_wr = bad_wr or ffi.new("struct ibv_send_wr **")
    _check("ibv_post_send", qp.context.ops.post_send(qp, wr, bad_wr))


def ibv_post_recv(
    qp: h.ibv_qp, wr: h.ibv_recv_wr, bad_wr: h.Pointer[h.ibv_recv_wr] | None = None
) -> None:
    """Post a linked list of receive requests, like :func:`ibv_post_send`. See ibv_post_recv(3)."""
    bad_wr = bad_wr or ffi.new("struct ibv_recv_wr **")
    _check("ibv_post_recv", qp.context.ops.post_recv(qp, wr, bad_wr))


def ibv_post_srq_recv(
    srq: h.ibv_srq, wr: h.ibv_recv_wr, bad_wr: h.Pointer[h.ibv_recv_wr] | None = None
) -> None:
    """Post a linked list of receive requests to a shared receive queue.

    See ibv_post_srq_recv(3).
    """
    bad_wr = bad_wr or ffi.new("struct ibv_recv_wr **")
    _check("ibv_post_srq_recv", srq.context.ops.post_srq_recv(srq, wr, bad_wr))


def _check(verb: str, code: int) -> None:
    if code:
        raise failure(verb, errno_of(code))
