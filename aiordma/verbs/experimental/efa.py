"""Scalable reliable datagrams (SRD) on Amazon's EFA devices, using ``libefa.so.1``.

**This module is experimental and has not been tested on hardware.** The structures passed to the
library are checked against libefa's header. The tests replace the library's functions with
stubs.

SRD delivers messages reliably, but not necessarily in order. As with UD, each message has its own
destination, and a single queue pair serves all peers. The functions raise UnsupportedError if the
device is not an EFA device, or if libefa is not installed. See efadv_query_device(3) and
efadv_create_qp_ex(3).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

from aiordma._native import copy_of, ffi

from .._cq.completion import CompletionQueue
from .._device.address_handle import AddressHandle
from .._device.context import Context
from .._device.enums import QPState
from .._device.protection_domain import ProtectionDomain
from .._qp.qp_attributes import QPCapabilities
from .._qp.transport_rules import SendOps
from .._qp.work_request import SendWorkRequest
from .driver_queue_pair import DriverQueuePair, init_attr

__all__ = ["EFACapability", "EFADeviceAttributes", "SRDQueuePair", "create_srd_qp", "query_device"]

_NEEDS = "scalable reliable datagrams (SRD), which need an EFA device and libefa.so.1"
_SRD = 0  # EFADV_QP_DRIVER_TYPE_SRD


class EFACapability(IntFlag):
    """An EFA device's capabilities (the ``EFADV_DEVICE_ATTR_CAPS_*`` constants)."""

    NONE = 0
    RDMA_READ = 1 << 0
    RNR_RETRY = 1 << 1
    CQ_WITH_SGID = 1 << 2


@dataclass(frozen=True, slots=True)
class EFADeviceAttributes:
    """Capabilities and queue pair limits of an EFA device (``struct efadv_device_attr``).

    The limits count requests (``_wr``) or scatter/gather elements (``_sge``), or are sizes in bytes
    (``_size``).
    """

    max_sq_wr: int
    max_rq_wr: int
    max_sq_sge: int
    max_rq_sge: int
    inline_buf_size: int
    device_caps: EFACapability
    max_rdma_size: int


def query_device(context: Context) -> EFADeviceAttributes:
    """Return the device's EFA-specific attributes.

    Raises:
        UnsupportedError: If the device is not an EFA device.
    """
    attr = ffi.new("struct efadv_device_attr *")
    with context._requires_capability(_NEEDS):
        context.library.providers.efadv_query_device(
            context.pointer, attr, ffi.sizeof("struct efadv_device_attr")
        )
    return copy_of(attr, EFADeviceAttributes)


class SRDQueuePair(DriverQueuePair):
    """An SRD queue pair, created by :func:`create_srd_qp`.

    This class has not been tested on hardware.
    """

    def start(self, *, qkey: int, port_num: int = 1, pkey_index: int = 0, sq_psn: int = 0) -> None:
        """Move the queue pair from RESET to RTS, so that it can send and receive.

        The arguments have the same meaning as the attributes of a UD queue pair. Peers must know
        ``qkey`` to send to this queue pair.

        Raises:
            VerbsError: If the device rejects a transition.
        """
        self.modify(qp_state=QPState.INIT, pkey_index=pkey_index, port_num=port_num, qkey=qkey)
        self.modify(qp_state=QPState.RTR)
        self.modify(qp_state=QPState.RTS, sq_psn=sq_psn)

    def post_send(
        self, wr: SendWorkRequest, ah: AddressHandle, remote_qpn: int, remote_qkey: int
    ) -> None:
        """Post a request to a peer.

        The request may be a send or, on devices that support RDMA, a read or a write. Keep the
        address handle ``ah`` open until the request has completed.

        Raises:
            UnsupportedError: If the operation is not supported.
            ValueError: If a number is out of range.
            PostError: If the device rejects the request.
        """
        self._post_to(wr, ah, remote_qpn, remote_qkey)


def create_srd_qp(
    pd: ProtectionDomain,
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue | None = None,
    capabilities: QPCapabilities | None = None,
    *,
    send_ops: SendOps = SendOps.SEND | SendOps.SEND_WITH_IMM,
    sq_sig_all: bool = False,
) -> SRDQueuePair:
    """Create an SRD queue pair that accepts only the operations in ``send_ops``.

    The new queue pair is in the RESET state. Call :meth:`SRDQueuePair.start` before use.

    Raises:
        UnsupportedError: If the device is not an EFA device, or if libefa is not installed.
    """
    recv_cq = recv_cq or send_cq
    wanted = capabilities or QPCapabilities()
    attr = init_attr(pd, send_cq, recv_cq, wanted, send_ops, sq_sig_all)
    efa = ffi.new("struct efadv_qp_init_attr *")
    efa.driver_qp_type = _SRD
    with pd.context._requires_capability(_NEEDS):
        pointer = pd.context.library.providers.efadv_create_qp_ex(
            pd.context.pointer, attr, efa, ffi.sizeof("struct efadv_qp_init_attr")
        )
    return SRDQueuePair(pd, pointer, send_cq, recv_cq, attr)
