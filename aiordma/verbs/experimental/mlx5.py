"""Dynamically connected (DC) queue pairs on mlx5 devices, using ``libmlx5.so.1``.

**This module is experimental and has not been tested on hardware.** The structures passed to the
library are checked against libmlx5's header. The tests replace the library's functions with
stubs.

An *initiator* (DCI) sends to any number of *targets* (DCT). Each request specifies its target's
number and key, and the device connects to the target when necessary. A target receives through a
shared receive queue. The queue pairs go through the usual states, but the device determines which
attributes each transition requires. The functions raise UnsupportedError if the device is not an
mlx5 device, or if libmlx5 is not installed. See mlx5dv_create_qp(3) and mlx5dv_wr_post(3).
"""

from __future__ import annotations

from aiordma._native import ffi
from aiordma._native import handles as h

from .._cq.completion import CompletionQueue
from .._device.address_handle import AddressHandle
from .._device.protection_domain import ProtectionDomain
from .._device.resource import Resource
from .._qp.qp_attributes import QPCapabilities
from .._qp.transport_rules import SendOps
from .._qp.work_request import SendWorkRequest
from .driver_queue_pair import DriverQueuePair, init_attr

__all__ = ["DCInitiator", "DCTarget", "create_dc_initiator", "create_dc_target"]

_NEEDS = "dynamically connected queue pairs (DC), which need an mlx5 device and libmlx5.so.1"
_MASK_DC = 1 << 1  # MLX5DV_QP_INIT_ATTR_MASK_DC
_DCT, _DCI = 1, 2  # enum mlx5dv_dc_type


class DCInitiator(DriverQueuePair):
    """A queue pair that sends to DC targets, created by :func:`create_dc_initiator`.

    This class has not been tested on hardware.
    """

    def post_send(
        self, wr: SendWorkRequest, ah: AddressHandle, remote_dctn: int, remote_dc_key: int
    ) -> None:
        """Post a request to a DC target.

        ``remote_dctn`` is the target's ``qp_num``, and ``remote_dc_key`` is its access key. The
        request may be a send, a write or a read. Keep the address handle ``ah`` open until the
        request has completed.

        Raises:
            UnsupportedError: If the operation is not supported.
            ValueError: If a number is out of range.
            PostError: If the device rejects the request.
        """
        library = self.context.library
        dc = library.providers.mlx5dv_qp_ex_from_ibv_qp_ex(
            library.calls.ibv_qp_to_qp_ex(self.pointer)
        )
        self._post_to(wr, ah, remote_dctn, remote_dc_key, dc)


class DCTarget(DriverQueuePair):
    """A queue pair that receives from DC initiators, created by :func:`create_dc_target`.

    Initiators need the target's ``qp_num``. This number is valid once the target has reached the
    RTR state. This class has not been tested on hardware.
    """


def create_dc_initiator(
    pd: ProtectionDomain,
    send_cq: CompletionQueue,
    capabilities: QPCapabilities | None = None,
    *,
    send_ops: SendOps = SendOps.SEND | SendOps.SEND_WITH_IMM,
    sq_sig_all: bool = False,
) -> DCInitiator:
    """Create a DC initiator that accepts only the operations in ``send_ops``.

    The new initiator is in the RESET state.

    Raises:
        UnsupportedError: If the device is not an mlx5 device, or if libmlx5 is not installed.
    """
    wanted = capabilities or QPCapabilities(max_recv_wr=0, max_recv_sge=0)
    attr = init_attr(pd, send_cq, send_cq, wanted, send_ops, sq_sig_all)
    pointer = _create(pd, attr, _DCI, 0)
    return DCInitiator(pd, pointer, send_cq, send_cq, attr)


def create_dc_target(
    pd: ProtectionDomain, cq: CompletionQueue, srq: Resource[h.ibv_srq], access_key: int
) -> DCTarget:
    """Create a DC target that receives through ``srq``.

    The new target is in the RESET state.

    Args:
        pd: The protection domain.
        cq: The completion queue.
        srq: The shared receive queue.
        access_key: A 64-bit key that initiators must include in every request.

    Raises:
        UnsupportedError: If the device is not an mlx5 device, or if libmlx5 is not installed.
    """
    attr = init_attr(pd, cq, cq, QPCapabilities(0, 0, 0, 0, 0), SendOps.NONE, srq=srq)
    pointer = _create(pd, attr, _DCT, access_key)
    return DCTarget(pd, pointer, cq, cq, attr, srq)


def _create(
    pd: ProtectionDomain, attr: h.ibv_qp_init_attr_ex, dc_type: int, access_key: int
) -> h.ibv_qp:
    mlx5 = ffi.new("struct mlx5dv_qp_init_attr *")
    mlx5.comp_mask = _MASK_DC
    mlx5.dc_init_attr.dc_type = dc_type
    if dc_type == _DCT:
        mlx5.dc_init_attr.dct_access_key = access_key
    with pd.context._requires_capability(_NEEDS):
        return pd.context.library.providers.mlx5dv_create_qp(pd.context.pointer, attr, mlx5)
