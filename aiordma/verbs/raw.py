"""The C structures and calls of libibverbs and librdmacm, for features without a method.

::

    from aiordma.verbs import raw

    attr = raw.ffi.new("struct ibv_device_attr *")
    context.library.calls.ibv_query_device(context.pointer, attr)
    print(attr.max_qp, raw.IBV_QPT_RC)

- ``pointer`` of an object of :mod:`aiordma.verbs` or :mod:`aiordma.cm` is its C structure, for use
  with cffi.
- ``library.calls`` of a context, channel or ID has the calls that the libraries export, under their
  C names. A call that fails raises VerbsError, or UnsupportedError if the device or the library
  does not support it. A call that succeeds returns its C result without the error code.
- The functions of this module are the calls that the C header defines inline. The calls of
  ibv_wr_post(3) and ibv_create_cq_ex(3) are members of a structure: ``qp_ex.wr_start(qp_ex)``.
- Each constant of the headers is an attribute of this module: ``raw.IBV_SEND_SIGNALED``.

As in C, only the device checks arguments, and nothing keeps memory alive. Call
:meth:`QueuePair.untrack` before posting. See docs/raw-handles.md.
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
"""The cffi object with every structure that aiordma knows: ``new``, ``cast``, ``sizeof`` ...

``ffi.cast("struct ibv_qp *", address)`` converts an address to a pointer.
"""

_CONSTANTS = ("IBV_", "IB_UVERBS_", "RAI_", "RDMA_")


def __getattr__(name: str) -> int:
    """Return a constant or enumerator of infiniband/verbs.h or rdma/rdma_cma.h."""
    if name.startswith(_CONSTANTS) and isinstance(value := getattr(lib, name, None), int):
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def ibv_poll_cq(cq: h.ibv_cq, num_entries: int, wc: h.ibv_wc) -> int:
    """Store up to ``num_entries`` completions in the array ``wc``, and return their number.

    Source: ibv_poll_cq(3).
    """
    count: int = cq.context.ops.poll_cq(cq, num_entries, wc)
    if count < 0:
        raise failure("ibv_poll_cq", errno.EIO)
    return count


def ibv_req_notify_cq(cq: h.ibv_cq, solicited_only: int) -> None:
    """Arm a completion queue. Source: ibv_req_notify_cq(3)."""
    _check("ibv_req_notify_cq", cq.context.ops.req_notify_cq(cq, solicited_only))


def ibv_post_send(
    qp: h.ibv_qp, wr: h.ibv_send_wr, bad_wr: h.Pointer[h.ibv_send_wr] | None = None
) -> None:
    """Post a list of send requests. Source: ibv_post_send(3).

    Args:
        qp: The queue pair.
        wr: The first request of the list.
        bad_wr: Set to the first request that was not posted, if the device reports it.

    Raises:
        VerbsError: If the device rejects a request.
    """
    bad_wr = bad_wr or ffi.new("struct ibv_send_wr **")
    _check("ibv_post_send", qp.context.ops.post_send(qp, wr, bad_wr))


def ibv_post_recv(
    qp: h.ibv_qp, wr: h.ibv_recv_wr, bad_wr: h.Pointer[h.ibv_recv_wr] | None = None
) -> None:
    """Post a list of receives, like :func:`ibv_post_send`. Source: ibv_post_recv(3)."""
    bad_wr = bad_wr or ffi.new("struct ibv_recv_wr **")
    _check("ibv_post_recv", qp.context.ops.post_recv(qp, wr, bad_wr))


def ibv_post_srq_recv(
    srq: h.ibv_srq, wr: h.ibv_recv_wr, bad_wr: h.Pointer[h.ibv_recv_wr] | None = None
) -> None:
    """Post a list of receives to a shared receive queue. Source: ibv_post_srq_recv(3)."""
    bad_wr = bad_wr or ffi.new("struct ibv_recv_wr **")
    _check("ibv_post_srq_recv", srq.context.ops.post_srq_recv(srq, wr, bad_wr))


def _check(verb: str, code: int) -> None:
    if code:
        raise failure(verb, errno_of(code))
