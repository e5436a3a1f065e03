"""Batches: work requests that are posted together, with one doorbell, or not at all.

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
    """Collects inside its ``with``; posts at the end, or drops everything on an exception."""

    def __init__(self, post: Callable[[Sequence[T]], None]) -> None:
        self._post = post
        self._requests: list[T] | None = None

    def __enter__(self) -> Self:
        if self._requests is not None:
            raise BufferStateError("this batch is collecting already")
        self._requests = []
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        requests, self._requests = self._requests, None
        if kind is None and requests:
            self._post(requests)

    def __len__(self) -> int:
        return len(self._requests or ())

    def add(self, request: T) -> None:
        """Collect one request; BufferStateError outside of the scope."""
        if self._requests is None:
            raise BufferStateError("a batch collects inside its with statement only")
        self._requests.append(request)


class ReceiveBatch(_Batch[ReceiveWorkRequest]):
    """Receives of a queue pair, or of a shared receive queue."""

    def recv(self, sges: Sequence[ScatterGatherElement] = (), *, wr_id: int = 0) -> None:
        """Collect one receive."""
        self.add(ReceiveWorkRequest(wr_id, sges))


class SendBatch(_Batch[SendWorkRequest]):
    """Requests of a send queue. Posting raises what :meth:`QueuePair.post_send` raises.

    ``imm`` is immediate data, a number in host order; ``remote_srqn`` is for XRC queue pairs.
    What the other keywords mean is in ibv_post_send(3): ``fence`` waits for reads and atomics
    before it, ``solicited`` wakes a peer that asked for such alone, ``inline`` copies the data at
    once. The memory otherwise belongs to the device until the completion.
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
        """Send a message; ``to`` is for datagrams, ``invalidate`` a remote key of the peer's."""
        if imm is not None and invalidate is not None:
            raise ValueError("a send has immediate data or a key to invalidate, not both")
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
        """Write into the peer's memory; with ``imm`` that completes a receive there."""
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
        """Put ``swap`` where ``compare`` is; ``old`` receives the 8 bytes that were there."""
        there = remote_addr, rkey, _u64("compare", compare), _u64("swap", swap)
        flags = _flags(signaled, fence)
        self.add(SendWorkRequest(wr_id, WROpcode.ATOMIC_CMP_AND_SWP, (old,), flags, 0, *there))

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
        """Add, modulo 2^64; ``old`` receives the 8 bytes that were there."""
        there = remote_addr, rkey, _u64("add", add)
        flags = _flags(signaled, fence)
        self.add(SendWorkRequest(wr_id, WROpcode.ATOMIC_FETCH_AND_ADD, (old,), flags, 0, *there))

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
        """Have what was written to the peer's memory be there, as ``flush`` says."""
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
        """Bind a memory window of type 2."""
        flags = _flags(signaled, fence)
        self.add(SendWorkRequest(wr_id, WROpcode.BIND_MW, (), flags, bind=bind))

    def invalidate(
        self, rkey: int, *, wr_id: int = 0, signaled: bool = True, fence: bool = False
    ) -> None:
        """Invalidate a key of this side's: that of a window of type 2."""
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
    """Modulo 2^64: negative numbers are added as well."""
    return integer(name, value, None, None) & U64_MAX
