"""The error conventions of the C libraries' calls.

The build also reads this module to write the stub, so the module must not import the package.
"""

from __future__ import annotations

from enum import Enum, auto


class Convention(Enum):
    """How a C call reports errors."""

    ERRNO = auto()
    """The call returns 0 or an errno value; some providers return -1 and set errno."""
    MINUS_ONE = auto()
    """The call returns 0, or -1 and sets errno."""
    POINTER = auto()
    """The call returns a pointer, or NULL and sets errno."""
    COUNT = auto()
    """The call returns a number, or a negative errno value."""
    EVENT = auto()
    """Like MINUS_ONE, but EAGAIN is not an error. The call returns whether there was an event."""
    PLAIN = auto()
    """The call cannot fail, or its own error number is returned unchanged."""


_SPECIAL_CASES = {
    "ibv_close_device": Convention.MINUS_ONE,
    "ibv_query_gid": Convention.MINUS_ONE,
    "ibv_query_pkey": Convention.MINUS_ONE,
    "ibv_init_ah_from_wc": Convention.MINUS_ONE,
    "ibv_get_async_event": Convention.EVENT,
    "ibv_get_cq_event": Convention.EVENT,
    "rdma_get_cm_event": Convention.EVENT,
    "ibv_get_device_index": Convention.PLAIN,
    "ibv_get_pkey_index": Convention.PLAIN,
    "ibv_query_qp_data_in_order": Convention.PLAIN,
    "ibv_rate_to_mbps": Convention.PLAIN,
    "ibv_rate_to_mult": Convention.PLAIN,
    "ibv_rereg_mr": Convention.PLAIN,  # the error number encodes the state of the region
    "mlx5dv_qp_ex_from_ibv_qp_ex": Convention.PLAIN,
}


def convention_of(verb: str, result: str) -> Convention:
    """Return the convention documented in a call's manual page. `result` is its C return type."""
    if verb in _SPECIAL_CASES:
        return _SPECIAL_CASES[verb]
    if result == "int":
        return Convention.MINUS_ONE if verb.startswith("rdma_") else Convention.ERRNO
    if result == "ssize_t":
        return Convention.COUNT
    return Convention.POINTER if result.startswith("struct ") else Convention.PLAIN
