"""Messages that are too long for a frame: offered to the peer, which reads them with RDMA."""

from __future__ import annotations

from typing import NoReturn

from .._core import protocol
from .._native import Offers as NativeOffers
from .._native import Outgoing, failure, ffi
from ..errors import ProtocolError
from ..verbs import AccessFlags, ProtectionDomain
from ..verbs._memory.memory_region import is_there, reg_mr


class Offers(NativeOffers):
    """What one side has offered and the peer has not answered for, by request.

    `max_message` is the longest that this side takes itself.  Memory of the plain kinds is opened
    in C (native/fast/offering.c), all other here.
    """

    def __init__(self, pd: ProtectionDomain, max_message: int) -> None:
        register_own, deregister = pd.context.library.addresses
        domain = int(ffi.cast("uintptr_t", pd.pointer))
        super().__init__(protocol.MAX_UNANSWERED, domain, register_own, deregister)
        self._pd = pd
        self._max_message = max_message

    def open(self, request_id: int, outgoing: Outgoing) -> tuple[int, int]:
        """Opens the message's memory to the peer, to read: its address, and the key.

        Registering fails as :meth:`ProtectionDomain.reg_mr` does.
        """
        view = outgoing.view
        # A buffer that is not writable has no address for cffi but as one of characters.
        pointer, address = reg_mr(
            self._pd,
            ffi.from_buffer(view),
            view.nbytes,
            AccessFlags.REMOTE_READ,
            None,
            there=is_there(view.obj),
        )
        self.hold(request_id, int(ffi.cast("uintptr_t", pointer)), outgoing)
        return address, pointer.rkey

    def _not_closed(self, code: int) -> NoReturn:
        raise failure("ibv_dereg_mr", code)

    def checked(self, offer: protocol.Message) -> protocol.Rendezvous:
        """What the peer offers, if it may: ProtocolError otherwise."""
        if not isinstance(offer, protocol.Rendezvous):
            raise ProtocolError(f"the peer offers a {type(offer).__name__} as a message")
        if not offer.length:
            raise ProtocolError("the peer offers a message of no bytes")
        if offer.length > self._max_message:
            raise ProtocolError(
                f"the peer sent a message of {offer.length} bytes; this side said in the "
                f"handshake that it takes {self._max_message}"
            )
        return offer
