"""The parameters exchanged by the two sides of a connection through the connection manager."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple, Self

from aiordma._core.arguments import U32_MAX, integer, refusal, truth
from aiordma._native import copy_of, ffi
from aiordma._native import handles as h
from aiordma.errors import LimitError
from aiordma.verbs import AddressVector
from aiordma.verbs._memory.buffers import require_data


class PortSpace(IntEnum):
    """A namespace for port numbers (``enum rdma_port_space``).

    The port space determines the type of service, such as connections or datagrams.
    """

    IPOIB = 0x0002
    TCP = 0x0106
    UDP = 0x0111
    IB = 0x013F

    @property
    def datagrams(self) -> bool:
        """Whether the port space is for datagrams (UD) rather than connections (RC)."""
        return self in (PortSpace.UDP, PortSpace.IPOIB)


UDP_QKEY = 0x01234567
"""The Q_Key of queue pairs in PortSpace.UDP (``RDMA_UDP_QKEY``)."""


# The size of the private data field depends on the message type. For connections, it is 92 bytes in
# a REQ, 196 bytes in a REP and 148 bytes in a REJ message (IBTA volume 1, clause 12.6). For
# datagram services, it is 216 bytes in a request and 136 bytes in a response (clause 12.11). In
# requests, the connection manager uses 36 bytes for its own header (rdma_connect(3)).
CONNECT_DATA_MAX = 56
"""The maximum size of the private data in a connection request (PortSpace.TCP), in bytes."""
ACCEPT_DATA_MAX = 196
"""The maximum size of the private data when accepting a request (PortSpace.TCP), in bytes."""
REJECT_DATA_MAX = 148
"""The maximum size of the private data when rejecting a request (PortSpace.TCP), in bytes."""
DATAGRAM_REQUEST_DATA_MAX = 180
"""The maximum size of the private data in a datagram service request (PortSpace.UDP), in bytes."""
DATAGRAM_ANSWER_DATA_MAX = 136
"""The maximum size of the private data in a datagram service response (PortSpace.UDP), in bytes."""

# The maximum sizes of the private data for each call. The first value of each pair applies to
# connections, and the second value to datagram services.
_LIMITS = {
    "connect": (CONNECT_DATA_MAX, DATAGRAM_REQUEST_DATA_MAX),
    "accept": (ACCEPT_DATA_MAX, DATAGRAM_ANSWER_DATA_MAX),
    "reject": (REJECT_DATA_MAX, DATAGRAM_ANSWER_DATA_MAX),
}


def check_private_data(
    port_space: PortSpace, call: str, data: bytes | bytearray | memoryview
) -> None:
    """Raise LimitError if the private data is too long, or TypeError if it is not bytes."""
    try:
        length = memoryview(data).nbytes
    except TypeError:
        raise TypeError(refusal("private_data", "bytes", data)) from None
    require_data(data)
    limit = _LIMITS[call][port_space.datagrams]
    if length > limit:
        raise LimitError(
            f"too much private data: {length} bytes (maximum {limit} for {call}() in"
            f" PortSpace.{port_space.name}); send the rest after connecting",
            amount=length,
            limit=limit,
        )


# The numeric members of struct rdma_conn_param, with their conversion functions and bounds.
_FIELDS: dict[str, tuple[Callable[..., int], tuple[int, ...]]] = {
    "responder_resources": (integer, (0, 0xFF)),
    "initiator_depth": (integer, (0, 0xFF)),
    "flow_control": (truth, ()),
    "retry_count": (integer, (0, 0xFF)),
    "rnr_retry_count": (integer, (0, 0xFF)),
    "srq": (truth, ()),
    "qp_num": (integer, (0, U32_MAX)),
}


class ConnectionParameters(NamedTuple):
    """Connection parameters (``struct rdma_conn_param``). See rdma_connect(3).

    ``initiator_depth`` is the maximum number of outstanding reads and atomics from this side to the
    peer. ``responder_resources`` is the maximum number of outstanding reads and atomics from the
    peer to this side. A ConnectionEvent contains the values that the peer requested or granted.

    ``retry_count`` and ``rnr_retry_count`` range from 0 to 7. An ``rnr_retry_count`` of 7 means no
    limit. ``private_data`` contains data for the peer's program, which receives the data padded
    with zeros. ``srq`` and ``qp_num`` are used only if the queue pair was not created by
    :meth:`ConnectionId.create_qp`.
    """

    private_data: bytes = b""
    responder_resources: int = 1
    initiator_depth: int = 1
    flow_control: bool = True
    retry_count: int = 7
    rnr_retry_count: int = 7
    srq: bool = False
    qp_num: int = 0

    def packed(self) -> tuple[h.rdma_conn_param, object]:
        """Return the C structure, and an object to keep alive while the structure is in use."""
        param = ffi.new("struct rdma_conn_param *")
        # Copy the data. Otherwise, an error's traceback could keep an exported view of the caller's
        # buffer, which could then not be resized.
        content = bytes(self.private_data)
        data = ffi.new("char[]", content)
        if content:
            param.private_data, param.private_data_len = data, len(content)
        for name, (convert, bounds) in _FIELDS.items():
            setattr(param, name, convert(name, getattr(self, name), *bounds))
        return param, data

    @classmethod
    def read(cls, param: h.rdma_conn_param) -> ConnectionParameters:
        """Convert a ``struct rdma_conn_param``, including its private data."""
        return copy_of(param, cls, private_data=_private_data(param))


def _private_data(param: h.rdma_conn_param | h.rdma_ud_param) -> bytes:
    length = param.private_data_len
    return ffi.buffer(param.private_data, length)[:] if length else b""


class DatagramParameters(NamedTuple):
    """A datagram destination and the peer's private data (``struct rdma_ud_param``).

    To send to the destination, create an address handle from ``vector``. Use the handle with
    ``qp_num`` and ``qkey`` in each send. Only ESTABLISHED and MULTICAST_JOIN events contain a
    destination. In other events, ``vector`` is None, and ``qp_num`` and ``qkey`` are 0.
    ``private_data`` is padded with zeros.
    """

    private_data: bytes = b""
    vector: AddressVector | None = None
    qp_num: int = 0
    qkey: int = 0

    @classmethod
    def read(cls, param: h.rdma_ud_param, *, private_data: bool, destination: bool) -> Self:
        """Convert the members of a ``struct rdma_ud_param`` that are valid for an event."""
        data = _private_data(param) if private_data else b""
        if not destination:
            return cls(data)
        return cls(data, AddressVector.read(param.ah_attr), param.qp_num, param.qkey)
