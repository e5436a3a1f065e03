"""The objects of the fast path (native/fast): work requests, messages and completions in C.

They belong to one event loop and are not thread-safe.  Subclasses set the members, which the device
takes as numbers: it refuses a wrong one, or reads other memory of this process.
"""

from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sized
from contextvars import Context
from typing import Any, Self

from .handles import AnyMemory, Waiter

TRANSFER_SIZE: int
"""The longest single request."""

OFFER_ROOM: int
"""Bytes of the block for the frame of an offer."""

EARLIER: int
"""In a wr_id: not the last request of its run, so it completes only if it fails."""

class Pinned:
    """Memory; `_retire` of the subclass is called when it is neither leased nor pinned any more."""

    def pin(self) -> None:
        """A work request is about to use the memory."""

    def unpin(self) -> None:
        """The work request has been done."""

    def lease(self) -> None:
        """One lease more."""

    def release(self) -> None:
        """One lease less."""

class Block(Pinned):
    """A place in a pool's registered memory.

    It goes back to the pool by itself when it is neither leased, nor pinned by a work request, nor
    seen through an `export`.
    """

    pool: Shelf
    address: int
    size: int
    lkey: int
    posted: int
    """Bytes of the receive that it was posted as."""
    def export(self, start: int, stop: int, /) -> memoryview:
        """A view for a user; while it exists the block does not go back."""

class Shelf:
    """A cache of a pool's free blocks, and the count of those that are leased.

    The subclass has `_returned(block)` for a block that cannot simply be kept.
    """

    before: Sized | None
    """Internal requests that wait for memory."""
    others: Sized | None
    """Users' requests that wait for memory."""
    trim_below: int
    """Slabs can be given up while fewer blocks `in_slabs` are leased."""
    slab_size: int
    """Bytes of the largest block that is part of a slab; larger ones are not cached here."""
    ready_bytes: int
    """Most bytes of cached blocks of one size, but at least one block."""
    smallest: int
    everything: int
    """The lkey of all memory of the process, for sending (`reg_local_dma`); 0 if there is none."""
    closed: bool
    """No block is cached any more."""
    @property
    def leases(self) -> int: ...
    @property
    def leased_bytes(self) -> int: ...
    @property
    def in_slabs(self) -> int: ...
    def take(self, size: int, /) -> Any:
        """Leases a cached block of at least `size` bytes; None if there is none."""

    def lease_block(self, block: Block, /) -> None:
        """Begins the lease of a new block."""

    def keep(self, block: Block, /) -> bool:
        """Caches a block; False if there are enough of its size."""

    def clear_ready(self) -> list[Any]:
        """Empties the cache; returns its blocks."""

class Message:
    """Some bytes of a block, which it leases until `let_go` or until the message is collected.

    `_inert` of the subclass raises the error of a later use.
    """

    last: bool
    """The last message of its frame, whose receive can be posted again after it."""
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

    `pinned` and `gone` are those of the `root`, which is the object itself unless set; if it is
    gone, its `_check` raises why.
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
        """A work request is about to use the memory; raises as `_check` does if it is gone."""

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

class Promise:
    """A future for one task, which the drain that settles it calls back at its own end.

    Callbacks of one that is settled outside a drain, or already, are called by the loop.
    """

    _asyncio_future_blocking: bool
    @property
    def _cancel_message(self) -> object: ...
    def _make_cancelled_error(self) -> BaseException: ...
    target: Any
    """For its owner."""
    sends: bool
    """`target` is a Traffic, whose `withdraw` is called when this is cancelled."""
    def __init__(self, table: Table, /) -> None: ...
    def __await__(self) -> Generator[Any]: ...
    def __iter__(self) -> Generator[Any]: ...
    def done(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def result(self) -> None: ...
    def exception(self) -> BaseException | None: ...
    def cancel(self, msg: object = None) -> bool: ...
    def add_done_callback(
        self, callback: Callable[[Any], object], /, *, context: Context | None = None
    ) -> None: ...
    def remove_done_callback(self, callback: Callable[[Any], object], /) -> int: ...
    def get_loop(self) -> AbstractEventLoop: ...
    def set_result(self, result: None, /) -> None:
        """Does nothing if it is settled; so does `set_exception`."""

    def set_exception(self, error: BaseException, /) -> None: ...

class Run:
    """One-sided requests that are posted together; their memory is pinned until `release`.

    `user` must be that of the remote memory, `kind` is the operation's.  The waiter is settled when
    all requests are done.
    """

    waiter: Waiter | None
    partial: bool
    """The parent run completes the waiter."""
    @property
    def kind(self) -> int: ...
    @property
    def entries(self) -> int:
        """Number of requests."""

    @property
    def lengths(self) -> list[int]:
        """Bytes of each request."""

    def __init__(self, user: object, kind: int, waiter: Waiter | None = None) -> None: ...
    def __len__(self) -> int: ...
    def write(self, local: object, remote: object, /) -> bool:
        """Adds a write; False, and nothing happens, if it is not allowed or not the common case."""

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
        """Adds any request without checking it."""

    def part(self, entries: int, /) -> Run:
        """Splits off the first requests as a run of their own."""

    def failed(self, error: BaseException, /) -> None:
        """Fails the waiter, unless it is settled."""

    def release(self) -> None:
        """The device has let go of all the memory.  A second call does nothing."""

class Batch:
    """One-sided requests that are being collected.

    The subclass has `_write` and `_read` for requests beyond the common case.
    """

    _transfer: Run | None
    """The run that it collects, inside the scope."""
    def write(self, source: Local | AnyMemory, target: Remote) -> None:
        """As `Connection.write`, done when the scope has ended."""

    def read(self, source: Remote, target: Local | AnyMemory) -> None:
        """As `Connection.read`; the bytes are there when the scope has ended."""

class Work:
    """One work request with one piece of memory.

    `done(byte_len)` of the subclass is called when it has succeeded.
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

class Incoming:
    """A message that the peer offered (rendezvous), to be read, in the order of arrival.

    `landing` is the target that it is read into, in place of the pool's memory.
    """

    def __init__(
        self, request_id: int, address: int, rkey: int, length: int, imm: int | None
    ) -> None: ...
    request_id: int
    address: int
    rkey: int
    message: Message | None
    landing: Any
    reads_left: int
    started: bool
    @property
    def imm(self) -> int | None: ...
    @property
    def ready(self) -> bool: ...
    def __len__(self) -> int: ...

class Fetch(Work):
    """One RDMA READ of an offered message, `length` bytes from the same offset of both memories.

    It pins the memory until the device has let go of it.
    """

    entries: int
    def __init__(
        self,
        inbox: Inbox,
        incoming: Incoming,
        memory: Block | Local,
        offset: int,
        length: int,
        /,
    ) -> None: ...
    def failed(self, error: BaseException, /) -> None:
        """Does nothing: the end of the queue pair fails the tasks that wait for the message."""

    def release(self) -> None: ...

class Outgoing:
    """A message that waits to be sent."""

    turn: int
    def __init__(
        self, data: bytes | bytearray | memoryview | Message, imm: int | None, future: Waiter
    ) -> None: ...
    @property
    def view(self) -> memoryview: ...
    @property
    def length(self) -> int: ...
    @property
    def imm(self) -> int | None: ...
    @property
    def future(self) -> Waiter: ...
    def drop(self) -> None:
        """It will not be sent."""

class Frame(Work):
    """A frame to be sent, in a leased block that goes back to the pool, or to `spares`."""

    def __init__(
        self,
        block: Block,
        length: int,
        future: Waiter | None = None,
        spares: list[Any] | None = None,
    ) -> None: ...
    def failed(self, error: BaseException, /) -> None:
        """Fails the futures that wait for it."""

    def release(self) -> None:
        """The device has let go of the block.  A second call does nothing."""

class Account:
    """The credits of aiordma/_core/credits.py, with their common cases in C."""

    _control: int
    _control_limit: int
    _control_receives: int
    _data: int
    _data_limit: int
    _data_receives: int
    _data_threshold: int
    _held_control: int
    _held_data: int
    _owed_control: int
    _owed_data: int

    def plainly_spend(self) -> tuple[int, int] | None:
        """Sends a frame with messages; None without a credit."""

    def plainly_receive(self, control: int, data: int, /) -> bool:
        """Takes a frame with messages; False, and nothing happens, if it is not allowed."""

    def plainly_spend_credit(self) -> tuple[int, int] | None:
        """Sends a CREDIT frame; None if none is due."""

    def plainly_receive_credit(self, control: int, data: int, /) -> bool:
        """Takes a CREDIT frame, whose receive is posted again; False, and nothing happens, if it is
        not allowed.
        """

    def plainly_repost(self, count: int, /) -> bool:
        """Posts `count` data receives again; False, and nothing happens, beyond those used."""

    @property
    def plainly_due(self) -> bool:
        """A CREDIT frame is due."""

class Counts:
    """Statistics of a connection."""

    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    reads: int
    writes: int
    atomics: int

class Arrivals:
    """The messages of an inbox, one after another: an asynchronous iterator.

    It returns buffered messages; otherwise it awaits the coroutine that `otherwise` makes, whose
    StopAsyncIteration is the end.
    """

    def __new__(
        cls, inbox: Inbox, otherwise: Callable[[], Coroutine[Any, Any, Any]], /
    ) -> Arrivals: ...
    def __aiter__(self) -> Arrivals: ...
    def __anext__(self) -> Awaitable[Any]: ...

class Inbox:
    """Messages that have arrived, in order, and the tasks that wait for them.

    The subclass has `_fetch_ahead()`, `fetched()`, `_answer_for()` and `_tell_taken()`: see
    native/fast/inbox.c and fetch.c.
    """

    incoming: deque[Any]
    receivers: deque[Promise]
    table: Table
    @property
    def counts(self) -> Counts: ...
    @counts.setter
    def counts(self, counts: Counts) -> None: ...
    woken: int
    """Receivers that are settled and have not run yet."""
    offers: int
    """Entries of `incoming` that are no messages yet."""
    unstarted: int
    """Those of them that are not being read."""
    ahead: int
    """Bytes of offered messages that are being read or have been, and were not taken."""
    most_ahead: int
    """The most of these while no task waits for them."""
    taken: int
    """Frames whose messages have been taken, not yet passed to `_tell_taken`."""
    refill: int
    """How many of them call `_tell_taken`, unless `traffic` handles them itself."""
    traffic: Traffic | None
    ended: bool
    def take(self) -> Any:
        """The first message if it is here and no other task waits, or None."""

    def take_here(self) -> Any:
        """As `take`, but for a task that a drain has called back: it is in the right loop."""

    def take_in_turn(self) -> Any:
        """The same for a receiver that waited and was settled."""

    def wait(self) -> Promise | None:
        """A promise of the next message; None if there is one, or another task waits."""

    def wait_here(self) -> Promise | None:
        """As `wait`, for such a task."""

    def take_first(self) -> Any:
        """The same for the receiver that is first in line."""

    def went(self, last: bool, /) -> None:
        """The first message was taken, as the `last` of its frame; settles the next receiver."""

    def add(self, message: Message, /) -> None:
        """Adds the next message, which has arrived."""

    def wake_first(self) -> None: ...

class Offers:
    """Offered messages (rendezvous) that the peer has not acknowledged: memory that it may read.

    `domain` and the functions of the library are addresses; without `register_own` the subclass
    registers all memory.  Its `_not_closed(code)` raises the error of a failed `deregister`.
    Memory that was registered before a fork is left alone.
    """

    def __init__(self, most: int, domain: int, register_own: int, deregister: int, /) -> None: ...
    def __len__(self) -> int: ...
    @property
    def full(self) -> bool:
        """As many are unacknowledged as may be."""

    @property
    def futures(self) -> list[Waiter]:
        """Those of the messages that are not acknowledged."""

    def hold(self, request_id: int, region: int, outgoing: Outgoing, /) -> None:
        """Keeps the memory of a message, offered under that number in that region (an address).

        `outgoing` has no `view` any more.
        """

    def close(self) -> None:
        """Releases all: the queue pair is destroyed, and nothing uses the memory any more."""

class Traffic:
    """Two-sided messages of a connection: the common case.

    native/fast/traffic.c lists what the subclass must have.
    """

    counts: Counts
    queue: Any
    shelf: Shelf
    account: Any
    inbox: Any
    offers: Any
    message_type: type[Message]
    waiting: deque[Any]
    """Messages that wait to be sent."""
    controls: Sized
    """Control messages that wait to be sent."""
    peer_size: int
    """Bytes of the peer's receive for the next frame."""
    sent: int
    """Frames not yet passed to `_count_sent`."""
    used: int
    """Frames that have come and were not yet passed to `_count_used`: all of them no longer than
    `small_size`, or else `grown`."""
    fitted: int
    """The latest of these in a row that were no longer."""
    oversized: int
    """Receives used by offers longer than `large_size`; ignored when sizing."""
    large_size: int
    longest: int
    """The longest message that is accepted."""
    reposted: int
    """Receives that were posted again, not yet passed to `_tell_taken`."""
    small_size: int
    receive_size: int
    """Bytes of receives that are posted again when messages have been taken; 0: `_tell_taken`."""
    patience: int
    """The number of `used` frames at which `_tell_taken` is called in any case."""
    max_message: int
    closing: bool
    ended: bool
    takes: bool
    """Frames with messages are accepted."""
    blocked: bool
    """There is no memory for a frame now."""
    counting: bool
    """`_count_sent` is called for each frame that is sent."""
    grown: bool
    """Receives are larger than `small_size` now."""
    watching: bool
    """`_count_used` is called for each frame that arrives."""
    parting: bool
    """The connection is draining: `_check_drained` is called when work may have ended."""
    @property
    def under_way(self) -> int:
        """Frames with messages that are posted and not completed."""

    @property
    def started(self) -> bool: ...
    def begin(self) -> None:
        """All members are set; frames may be sent."""

    def pump(self) -> None:
        """Sends what credits and room allow; called whenever either may have grown."""

    def collect(self) -> None:
        """Sends the collected messages."""

    def collect_soon(self) -> None:
        """Sends what waits after the tasks of this iteration of the loop."""

    def post(self, frame: Frame, messages: int, bytes: int, /) -> None:
        """Posts a frame that needs a data credit and whose header is written."""

    def post_offer(
        self,
        block: Block,
        request_id: int,
        address: int,
        rkey: int,
        length: int,
        imm: int | None,
        /,
    ) -> None:
        """Posts an offer of that memory, in a block of OFFER_ROOM bytes or more.

        It takes over the lease.  ValueError, and nothing has happened, for an invalid offer.
        """

    def offer_over(self, request_id: int, error: BaseException | None, /) -> bool:
        """The peer has read the offered message, or will not; settles its future with `error`.

        False, and nothing happens, if no message was offered under that number.
        """

    def request_id(self) -> int:
        """A number for a request, not 0 and not in use for 2^32 requests."""

    def answer(self, request_id: int, /) -> bool:
        """Acknowledges an offered message; False, and nothing is sent, beyond the common case."""

    def offered(self, incoming: Incoming, /) -> None:
        """Adds an offered message, which is read as soon as limits allow."""

    def take_frame(self, block: Block, length: int, /) -> None:
        """Takes a frame that has arrived."""

    def deliver(self, data: object, imm: int | None, /) -> Promise | None:
        """Sends or queues a message, for a task that a drain has called back.

        None, and nothing happens, beyond the common case.
        """

    def new_promise(self) -> Promise:
        """For a message: cancelling it calls `withdraw`."""

    def send_plainly(
        self, data: bytes | bytearray | memoryview | Message, imm: int | None, waiter: Waiter, /
    ) -> bool:
        """Sends a message, or queues it behind others; False, and nothing happens, if it must wait
        for anything else.
        """

class Table:
    """The work requests of one event loop: finds the posted work of a completion."""

    loop: AbstractEventLoop
    waking: bool
    """A drain calls the callbacks of the promises that it settles."""
    look: Callable[[int], object] | None
    """Called by a task before it waits, to poll for so many microseconds."""
    look_us: int
    """How many; none after polls that found nothing."""
    returns: bool
    """The caller of this drain will poll again soon."""
    looking: bool
    """The loop will poll before it sleeps."""
    @property
    def waiting(self) -> int:
        """Promises under way that have callbacks."""

    later: bool
    """The loop calls the callbacks, not the drain."""
    @property
    def stray(self) -> int:
        """Completions that matched no posted work."""

    def __len__(self) -> int:
        """Slots that are taken."""

    def drain(self, state: int, most: int, spin_us: int, returns: bool, /) -> int:
        """Drains up to `most` completions, 1 to 128, and handles them.

        `state` is the address of a struct aiordma_drain.  Returns a negative errno value; or the
        sum of 1 if there were completions or the device made progress, 2 if there may be more, and
        4 if other descriptors are to be watched.
        """

    closed: bool
    """`serve` and `look_again` do nothing: the channel is closed, or this is a forked child."""

    def serve(
        self,
        state: int,
        most: int,
        leaving: list[Any],
        otherwise: Callable[[int], object],
        spin_us: int,
        /,
    ) -> object:
        """Drains, as the reader of a loop that does not poll before it sleeps.

        `otherwise` is called with the result of `drain`, unless that is 0 or 1 and `leaving` is
        empty.
        """

    def look_again(
        self,
        state: int,
        most: int,
        leaving: list[Any],
        otherwise: Callable[[int], object],
        spin_us: int,
        /,
    ) -> object:
        """As `serve`, for a task that is running: callbacks are called `later`.

        The task polls again soon if the table `returns`, or is `looking`.
        """

    keep: Callable[[], object] | None
    """Called by the loop to poll before it sleeps; None: not any more."""
    keep_us: int
    """Microseconds that it polls for."""
    found: bool
    """It has found something since this was set to False."""
    def look_soon(self) -> None:
        """Has the loop call `keep` in its next iteration."""

    def keep_looking(
        self,
        state: int,
        most: int,
        leaving: list[Any],
        otherwise: Callable[[int], object],
        /,
    ) -> object:
        """As `serve`, and again in each iteration of the loop in which there were completions.

        `otherwise` is called with the result of `drain`, unless that is 1 and `leaving` is empty.
        """

class Queue:
    """The send and the receive queue of one queue pair: what is posted, and what completes.

    The subclass has `_went_wrong(work, facts)`, `_use_room()`, `_broken(error)`,
    `post_frame(frame)` and `_refused(frame, code, posted)`: see native/fast/drain.c and queue.c.
    """

    table: Table
    user: object
    """Remote memory must have the same."""
    traffic: object
    """The Traffic that takes what the queue pair receives; or an object with
    `received(block, length)` and `written(block, length, imm)`."""
    address: int
    """Of struct ibv_qp."""
    extended_address: int
    """Of struct ibv_qp_ex, or 0."""
    capacity: int
    """Entries of the send queue."""
    free: int
    """Entries that are free."""
    reserved: int
    """Entries that `write` and `read` leave free."""
    accepting: bool
    """`write` and `read` may post."""
    backlogged: bool
    """Other work has to be posted first."""
    watched: bool
    """`_use_room` is called whenever entries have become free."""
    failed: bool
    """The queue pair failed: completions only release their work."""
    @property
    def completions(self) -> int:
        """Successful completions: each is a sign of life of the peer's device."""

    def post_work(self, work: Work | Run, /) -> tuple[int, int]:
        """An errno value, and how many requests were posted nevertheless.

        ValueError if there are too few free entries.
        """

    def post_block(self, block: Block, length: int, /) -> int:
        """Posts a receive of so many bytes; an errno value."""

    def post_ready(self, shelf: Shelf, most: int, length: int, /) -> int:
        """Posts receives in cached blocks while no task waits for memory; returns how many."""

    def write(self, local: object, remote: object, /) -> Promise | None:
        """Posts a write; None, and nothing happens, beyond the common case, or without room."""

    def read(self, local: object, remote: object, /) -> Promise | None:
        """The same for a read."""

    def under_way(self) -> list[object]:
        """The work of the send queue, oldest first."""

    def clear_slots(self) -> list[object]:
        """The queue pair is destroyed: returns all work under way, and releases its receives."""

def connect(drain: int, /) -> None:
    """Sets the address of aiordma_drain."""
