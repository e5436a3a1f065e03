"""Batches of work requests that are posted together, with a single notification of the device.

::

    with qp.batch() as batch:
        batch.write([local], remote_addr, rkey, wr_id=1, signaled=False)
        batch.send([more], wr_id=2)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Self, TypeVar

from aiordma._core.arguments import U64_MAX, integer
from aiordma.errors import BufferStateError

from .._device.address_handle import Destination
from .._device.enums import SendFlags, WROpcode
from .work_request import (
    BindInfo,
    FlushInfo,
    ReceiveWorkRequest,
    ScatterGatherElement,
    SendWorkRequest,
)

T = TypeVar("T")
_SIGNALED, _FENCE = int(SendFlags.SIGNALED), int(SendFlags.FENCE)
_SOLICITED, _INLINE = int(SendFlags.SOLICITED), int(SendFlags.INLINE)


class _Batch(Generic[T]):
    """A context manager that collects requests and posts them unless its block raises."""

    def __init__(self, post: Callable[[Sequence[T]], None]) -> None:
        self._post = post
        self._requests: list[T] | None = None

    def __enter__(self) -> Self:
        if self._requests is not None:
            raise BufferStateError("the batch is already active in another with block")
        self._requests = []
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        requests, self._requests = self._requests, None
        if kind is None and requests:
            self._post(requests)

    async def __aenter__(self) -> Self:
        raise TypeError(
            f"a {type(self).__name__} is not an asynchronous context manager: use 'with' instead of"
            " 'async with'"
        )

    async def __aexit__(self, kind: object, *_: object) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._requests or ())

    def add(self, request: T) -> None:
        """Add a request to the batch.

        Raises:
            BufferStateError: If the ``with`` block has not been entered or has ended.
        """
        if self._requests is None:
            raise BufferStateError("requests can be added to a batch only within its with block")
        self._requests.append(request)


class ReceiveBatch(_Batch[ReceiveWorkRequest]):
    """A batch of receives for a queue pair or a shared receive queue."""

    def recv(self, sges: Sequence[ScatterGatherElement] = (), *, wr_id: int = 0) -> None:
        """Add a receive to the batch."""
        self.add(ReceiveWorkRequest(wr_id, sges))


class SendBatch(_Batch[SendWorkRequest]):
    """A batch of requests for a queue pair's send queue.

    Posting the batch raises the same exceptions as :meth:`QueuePair.post_send`. The methods share
    the following keyword arguments (see ibv_post_send(3)):

    - ``wr_id``: A number of your choice, which is repeated in the completion.
    - ``signaled``: Whether a successful request generates a completion.
    - ``imm``: Immediate data for the peer, as a 32-bit number in host byte order.
    - ``remote_srqn``: The number of the peer's shared receive queue, for XRC queue pairs.
    - ``fence``: Whether to wait for all earlier reads and atomics before starting the request.
    - ``solicited``: Whether the message generates an event even if the peer is only waiting for
      solicited events.
    - ``inline``: Whether to copy the data when the request is posted. Without this, do not modify
      the memory until the request has completed.
    """

    def send(
        self,
        sges: Sequence[ScatterGatherElement] = (),
        *,
        wr_id: int = 0,
        to: Destination | None = None,
        imm: int | None = None,
        invalidate: int | None = None,
        remote_srqn: int = 0,
        signaled: bool = True,
        fence: bool = False,
        solicited: bool = False,
        inline: bool = False,
    ) -> None:
        """Send a message.

        ``to`` is a datagram's destination. ``invalidate`` is the key of the peer's memory to
        invalidate when the message arrives.
        """
        if imm is not None and invalidate is not None:
            raise ValueError("imm and invalidate cannot be combined in one send")
        opcode = WROpcode.SEND
        if imm is not None:
            opcode = WROpcode.SEND_WITH_IMM
        elif invalidate is not None:
            opcode = WROpcode.SEND_WITH_INV
        flags = _flags(signaled, fence, solicited, inline)
        request = SendWorkRequest(
            wr_id, opcode, sges, flags, imm or 0, invalidate_rkey=invalidate or 0,
            remote_srqn=remote_srqn,
        )  # fmt: skip
        if to is not None:
            request.ah, request.remote_qpn, request.remote_qkey = to
        self.add(request)

    def write(
        self,
        sges: Sequence[ScatterGatherElement],
        remote_addr: int,
        rkey: int,
        *,
        wr_id: int = 0,
        imm: int | None = None,
        remote_srqn: int = 0,
        signaled: bool = True,
        fence: bool = False,
        solicited: bool = False,
        inline: bool = False,
    ) -> None:
        """Write to the peer's memory.

        With ``imm``, the write also consumes one of the peer's receives, whose completion contains
        ``imm``.
        """
        opcode = WROpcode.RDMA_WRITE if imm is None else WROpcode.RDMA_WRITE_WITH_IMM
        flags = _flags(signaled, fence, solicited, inline)
        self.add(
            SendWorkRequest(
                wr_id, opcode, sges, flags, imm or 0, remote_addr, rkey, remote_srqn=remote_srqn
            )
        )

    def read(
        self,
        sges: Sequence[ScatterGatherElement],
        remote_addr: int,
        rkey: int,
        *,
        wr_id: int = 0,
        signaled: bool = True,
        fence: bool = False,
    ) -> None:
        """Read from the peer's memory."""
        flags = _flags(signaled, fence)
        self.add(SendWorkRequest(wr_id, WROpcode.RDMA_READ, sges, flags, 0, remote_addr, rkey))

    def compare_and_swap(
        self,
        old: ScatterGatherElement,
        remote_addr: int,
        rkey: int,
        compare: int,
        swap: int,
        *,
        wr_id: int = 0,
        signaled: bool = True,
        fence: bool = False,
    ) -> None:
        """Replace 8 bytes of the peer's memory with ``swap`` if they equal ``compare``.

        The previous value is stored in the local memory ``old``.
        """
        operands = remote_addr, rkey, _u64("compare", compare), _u64("swap", swap)
        flags = _flags(signaled, fence)
        self.add(SendWorkRequest(wr_id, WROpcode.ATOMIC_CMP_AND_SWP, (old,), flags, 0, *operands))

    def fetch_and_add(
        self,
        old: ScatterGatherElement,
        remote_addr: int,
        rkey: int,
        add: int,
        *,
        wr_id: int = 0,
        signaled: bool = True,
        fence: bool = False,
    ) -> None:
        """Add a number to 8 bytes of the peer's memory, modulo 2^64.

        The previous value is stored in the local memory ``old``.
        """
        operands = remote_addr, rkey, _u64("add", add)
        flags = _flags(signaled, fence)
        self.add(SendWorkRequest(wr_id, WROpcode.ATOMIC_FETCH_AND_ADD, (old,), flags, 0, *operands))

    def flush(
        self,
        flush: FlushInfo,
        remote_addr: int,
        rkey: int,
        *,
        wr_id: int = 0,
        remote_srqn: int = 0,
        signaled: bool = True,
        fence: bool = False,
    ) -> None:
        """Flush earlier writes to the peer's memory. See :class:`FlushInfo`."""
        flags = _flags(signaled, fence)
        self.add(
            SendWorkRequest(
                wr_id, WROpcode.FLUSH, (), flags, 0, remote_addr, rkey,
                remote_srqn=remote_srqn, flush=flush,
            )
        )  # fmt: skip

    def bind(
        self, bind: BindInfo, *, wr_id: int = 0, signaled: bool = True, fence: bool = False
    ) -> None:
        """Bind a type 2 memory window."""
        flags = _flags(signaled, fence)
        self.add(SendWorkRequest(wr_id, WROpcode.BIND_MW, (), flags, bind=bind))

    def invalidate(
        self, rkey: int, *, wr_id: int = 0, signaled: bool = True, fence: bool = False
    ) -> None:
        """Invalidate the key of a local type 2 memory window."""
        flags = _flags(signaled, fence)
        self.add(SendWorkRequest(wr_id, WROpcode.LOCAL_INV, (), flags, invalidate_rkey=rkey))


def _flags(signaled: bool, fence: bool, solicited: bool = False, inline: bool = False) -> int:
    return (
        (_SIGNALED if signaled else 0)
        | (_FENCE if fence else 0)
        | (_SOLICITED if solicited else 0)
        | (_INLINE if inline else 0)
    )


def _u64(name: str, value: int) -> int:
    """Return ``value`` modulo 2^64. Negative numbers become their two's complement."""
    return integer(name, value, None, None) & U64_MAX
