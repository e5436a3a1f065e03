"""Messages that are too long for a frame: offered to the peer, which reads them with RDMA."""

from __future__ import annotations

from collections.abc import Callable

from .._core import protocol
from .._native import Outgoing, Waiter
from ..errors import ProtocolError, RDMAError
from ..mr_pool import MemoryPool
from ..verbs.opening import Opening

OK = int(protocol.ErrorCode.OK)


class Offered:
    """An outgoing message that the peer will read: the memory it reads from."""

    __slots__ = ("future", "memory")

    def __init__(self, memory: Opening, future: Waiter) -> None:
        self.memory = memory
        self.future = future


class Offers:
    """What one side has offered and the peer has not answered for, by request.

    `max_message` is the longest that this side takes itself; `request_id` makes a number.
    """

    def __init__(self, pool: MemoryPool, max_message: int, request_id: Callable[[], int]) -> None:
        self._pool = pool
        self._max_message = max_message
        self._request_id = request_id
        self._offered: dict[int, Offered] = {}

    def __len__(self) -> int:
        return len(self._offered)

    @property
    def full(self) -> bool:
        """The peer has as many to answer as it may have."""
        return len(self._offered) >= protocol.MAX_UNANSWERED

    @property
    def futures(self) -> list[Waiter]:
        """Of those whose end has not come."""
        return [offered.future for offered in self._offered.values()]

    def make(self, outgoing: Outgoing) -> tuple[int, Opening]:
        """Opens the message's memory to the peer, to read; and the request's number."""
        memory = Opening(self._pool.pd, outgoing.view)
        request_id = self._request_id()
        self._offered[request_id] = Offered(memory, outgoing.future)
        return request_id, memory

    def answered(self, request_id: int, status: int) -> int | None:
        """The peer has read so many bytes, or will not (None).

        ProtocolError for what was not offered.
        """
        offered = self._offered.pop(request_id, None)
        if offered is None:
            raise ProtocolError("the peer says it has read a message that was not offered")
        length = offered.memory.length
        offered.memory.close()
        taken = status == OK
        if offered.future.done():
            pass
        elif taken:
            offered.future.set_result(None)
        else:
            offered.future.set_exception(
                RDMAError(f"the peer could not take the message (code {status})")
            )
        return length if taken else None

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

    def close(self) -> None:
        """The queue pair is destroyed: nothing touches the memory any more."""
        del self._request_id
        for offered in self._offered.values():
            offered.memory.close()
        self._offered.clear()
