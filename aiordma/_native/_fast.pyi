"""The objects of the fast path (native/fast): numbers of requests, read without calling Python.

Of one event loop, not thread-safe.  The members are set by the subclasses; they are plain numbers
to the device, so a wrong one is refused there or is somebody else's memory.
"""

from asyncio import Future
from collections.abc import Callable, Sized
from typing import Any, Protocol, Self

TRANSFER_SIZE: int
"""The longest single request."""

EARLIER: int
"""In a wr_id: not the last request of its run, so it completes only if it fails."""

class Pinned:
    """Memory; `_retire` of the subclass is called when it is neither leased nor pinned any more."""

    def pin(self) -> None:
        """A work request is about to use the memory."""

    def unpin(self) -> None:
        """The work request has been done."""

    def lease(self) -> None:
        """Somebody has it now."""

    def release(self) -> None:
        """The lease is over."""

class Block(Pinned):
    """A place in registered memory, of a pool, to which it goes back by itself: when nobody has it,
    no work request is under way on it, and nobody sees it through `export`.
    """

    pool: Shelf
    address: int
    size: int
    lkey: int
    posted: int
    """Bytes of the receive that it was posted as."""
    def export(self, start: int, stop: int, /) -> memoryview:
        """A view for a user, whose life is watched."""

class Shelf:
    """Blocks of a pool that are ready, and the account of those that are leased.

    The subclass has `_returned(block)` for a block that cannot simply be kept.
    """

    before: Sized | None
    """Who waits for memory that is needed for a moment."""
    others: Sized | None
    """Who waits for other memory."""
    trim_below: int
    """When fewer `in_slabs` are leased, slabs can be given up."""
    slab_size: int
    """Bytes of the largest block that is not large, and not kept here."""
    ready_bytes: int
    """Of the blocks of a size that are kept, unless one is more."""
    smallest: int
    closed: bool
    """Nothing is kept any more."""
    @property
    def leases(self) -> int: ...
    @property
    def leased_bytes(self) -> int: ...
    @property
    def in_slabs(self) -> int: ...
    def take(self, size: int, /) -> Any:
        """A leased block of at least so many bytes, or None when none is ready."""

    def lease_block(self, block: Block, /) -> None:
        """The lease of a new one begins."""

    def keep(self, block: Block, /) -> bool:
        """It is ready for the next; False when there are enough of its size."""

    def clear_ready(self) -> list[Any]:
        """All that are ready, and none is then."""

class Message:
    """Some bytes of a block, and a lease of it until `let_go`, or until the message is garbage.

    `_inert` of the subclass raises what a use after that does.
    """

    @property
    def _block(self) -> Block | None: ...
    @property
    def imm(self) -> int | None: ...
    @property
    def written(self) -> int | None: ...
    def __init__(
        self,
        block: Block,
        offset: int,
        length: int,
        imm: int | None,
        written: int | None = None,
    ) -> None: ...
    def __len__(self) -> int: ...
    def __bytes__(self) -> bytes: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *raised: object) -> None: ...
    def let_go(self) -> None:
        """Gives the memory back; a second call does nothing."""

    def export(self) -> memoryview: ...

class Local:
    """Registered memory of this process, or a slice of it.

    `pinned` and `gone` are those of the `root`, which is the object itself unless set; what is
    gone has a `_check` that raises why.
    """

    address: int
    length: int
    lkey: int
    writable: bool
    gone: bool
    pinned: Pinned
    @property
    def root(self) -> Local: ...
    @root.setter
    def root(self, memory: Local) -> None: ...
    def __len__(self) -> int: ...
    def pin(self) -> None:
        """A work request is about to use the memory; raises what `_check` does if it is gone."""

    def unpin(self) -> None:
        """The work request has been done."""

class Remote:
    """Memory of the peer, or a slice of it.  `usable` and `user` are those of the `root`."""

    address: int
    length: int
    rkey: int
    allowed: int
    usable: bool
    user: object
    @property
    def root(self) -> Remote: ...
    @root.setter
    def root(self, memory: Remote) -> None: ...
    def __len__(self) -> int: ...

class Waiter(Protocol):
    """Who waits for a run: a future, or what does as one."""

    def done(self) -> bool: ...
    def set_result(self, result: None, /) -> None: ...
    def set_exception(self, error: BaseException, /) -> None: ...
    def cancel(self) -> bool: ...

class Run:
    """One-sided requests that are posted together; their memory is pinned until `release`.

    `user` is what the remote memory must be for, `kind` that of the operation.  The waiter is told
    when all is done.
    """

    waiter: Waiter | None
    partial: bool
    """What is left of the run it was a part of tells the waiter that all is done."""
    @property
    def kind(self) -> int: ...
    @property
    def entries(self) -> int:
        """How many requests it is."""

    @property
    def lengths(self) -> list[int]:
        """Bytes of each."""

    def __init__(self, user: object, kind: int, waiter: Waiter | None = None) -> None: ...
    def __len__(self) -> int: ...
    def write(self, local: object, remote: object, /) -> bool:
        """Adds a write; False, and nothing is added, if it is not plain, or not allowed."""

    def read(self, local: object, remote: object, /) -> bool:
        """The same for a read."""

    def put(
        self,
        opcode: int,
        pinned: Pinned,
        address: int,
        length: int,
        lkey: int,
        remote_address: int,
        rkey: int,
        imm: int,
        compare_add: int = 0,
        swap: int = 0,
        /,
    ) -> None:
        """Adds any request, unchecked."""

    def part(self, entries: int, /) -> Run:
        """The first of them, as a run of its own; it is the rest from now on."""

    def failed(self, error: BaseException, /) -> None:
        """Tells the waiter, unless that is over."""

    def release(self) -> None:
        """The device has let go of all the memory.  Again does nothing."""

class Work:
    """One work request of one piece of memory.

    `done(byte_len)` of the subclass is called when it has completed well.
    """

    kind: int
    opcode: int
    address: int
    length: int
    lkey: int
    remote_address: int
    rkey: int
    imm: int
    def __init__(
        self,
        kind: int,
        opcode: int,
        address: int,
        length: int,
        lkey: int,
        remote_address: int = 0,
        rkey: int = 0,
        imm: int = 0,
    ) -> None: ...

class Table:
    """The slots of one event loop: which posted work a completion belongs to."""

    @property
    def stray(self) -> int:
        """Completions that belonged to nothing under way."""

    def __len__(self) -> int:
        """Slots that are taken."""

    def drain(self, state: int, most: int, spin_us: int, returns: bool, /) -> int:
        """One crossing of aiordma_drain, by the address of its state, and all that follows from it.

        Of up to `most` completions, 1 to 128.  A negative errno value; or 1 if there were
        completions, and 2 if there may be more.
        """

class Queue:
    """The send and the receive queue of one queue pair: what is posted, and what completes.

    The subclass has `_went_wrong(work, facts)`, `_use_room()` and `_broken(error)`: see
    native/fast/drain.c.
    """

    table: Table
    user: object
    """What remote memory must be for."""
    make_future: Callable[[], Future[None]]
    address: int
    """Of the queue pair in C."""
    extended_address: int
    """Of its extended self, or 0."""
    capacity: int
    """Entries of the send queue."""
    free: int
    """Those of them that are free."""
    reserved: int
    """Those that `write` and `read` leave."""
    accepting: bool
    """`write` and `read` may post."""
    backlogged: bool
    """Something else has to be posted first."""
    failed: bool
    """Nothing is done any more: what completes is only over."""
    @property
    def completions(self) -> int:
        """Good ones: each is a sign of life of the peer's device."""

    def post_work(self, work: Work | Run, /) -> tuple[int, int]:
        """An errno value, and how many requests were posted nevertheless.

        ValueError if there are too few free entries.
        """

    def post_recv(self, work: object, address: int, length: int, lkey: int, /) -> int:
        """An errno value.  `done(byte_len)` of `work` is called, or `written(byte_len, imm)`."""

    def write(self, local: object, remote: object, /) -> Future[None] | None:
        """Posts a write; None, and nothing happens, unless it is plain, allowed, and has room."""

    def read(self, local: object, remote: object, /) -> Future[None] | None:
        """The same for a read."""

    def under_way(self) -> list[object]:
        """The work of the send queue, oldest first."""

    def clear_slots(self) -> list[object]:
        """The queue pair is gone: all work that was under way, receives last."""

def connect(drain: int, /) -> None:
    """The address of aiordma_drain, once for all."""
