"""Memory that the peer may read for a moment: a message that is too long to be sent.

Each of these messages has a registration of its own, so what it costs in Python counts.  A
:class:`MemoryRegion` can be dropped, inspected, changed and closed along with its protection
domain, and takes three times as long; an :class:`Opening` is closed by who made it, before the
protection domain, which otherwise cannot be (ibv_dealloc_pd(3)).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from aiordma._native import ffi

from .enums import AccessFlags
from .memory_region import is_there, reg_mr

if TYPE_CHECKING:
    from aiordma._native import handles as h

    from .protection_domain import ProtectionDomain

_NOTHING = memoryview(b"")


class Opening:
    """``length`` bytes at ``address``, which whoever has ``rkey`` may read until it is closed.

    The view, of bytes, pins the memory. Registering fails as :meth:`ProtectionDomain.reg_mr` does.
    """

    __slots__ = ("_pd", "_pointer", "_view", "address", "length", "rkey")
    access: ClassVar[AccessFlags] = AccessFlags.REMOTE_READ

    def __init__(self, pd: ProtectionDomain, view: memoryview) -> None:
        # A buffer that is not writable has no address for cffi but as one of characters.
        pointer, self.address = reg_mr(
            pd,
            ffi.from_buffer(view),
            view.nbytes,
            self.access,
            None,
            there=is_there(view.obj),
        )
        self._pd = pd
        self._view = view
        self._pointer: h.MRPointer | None = pointer
        self.rkey = pointer.rkey
        self.length = view.nbytes

    @property
    def closed(self) -> bool:
        return self._pointer is None

    def close(self) -> None:
        """The peer may read it no more. Again does nothing, nor where the domain has gone."""
        pointer, self._pointer = self._pointer, None
        self._view = _NOTHING
        if pointer is not None and not self._pd.closed:  # a child of a fork has neither
            self._pd.context.library.calls.ibv_dereg_mr(pointer)
