"""Options of a queue pair beyond the standard attributes: agreed on with its peer, or limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

from aiordma._core.arguments import U32_MAX, integers
from aiordma._native import ffi

if TYPE_CHECKING:
    from aiordma._native import handles as h


class ECE(NamedTuple):
    """Enhanced connection establishment: ``struct ibv_ece``, see ibv_set_ece(3).

    What two devices of the same ``vendor_id`` can agree on beyond the standard: ``options`` are
    that vendor's bits.
    """

    vendor_id: int
    options: int = 0

    def packed(self) -> h.ibv_ece:
        """The C structure."""
        ece = ffi.new("struct ibv_ece *")
        for name, number in integers("ECE", self._asdict(), U32_MAX).items():
            setattr(ece, name, number)
        return ece

    @classmethod
    def read(cls, ece: h.ibv_ece) -> Self:
        """A copy of the C structure."""
        return cls(ece.vendor_id, ece.options)


class RateLimit(NamedTuple):
    """How fast a queue pair may send: ``struct ibv_qp_rate_limit_attr``.

    ``rate_limit`` is in kbit/s, 0 for none; ``max_burst_sz`` in bytes and ``typical_pkt_sz`` in
    bytes are 0 for the device's own. Source: ibv_modify_qp_rate_limit(3).
    """

    rate_limit: int
    max_burst_sz: int = 0
    typical_pkt_sz: int = 0

    def packed(self) -> h.ibv_qp_rate_limit_attr:
        """The C structure; ValueError for a number out of range."""
        attr = ffi.new("struct ibv_qp_rate_limit_attr *")
        try:
            for name, number in integers("RateLimit", self._asdict(), U32_MAX).items():
                setattr(attr, name, number)
        except OverflowError as error:
            raise ValueError(f"{self}: {error}") from None
        return attr
