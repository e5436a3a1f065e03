"""The objects of the fast path (native/fast): numbers of requests, read without calling Python.

Of one event loop, not thread-safe.  The members are set by the subclasses; they are plain numbers
to the device, so a wrong one is refused there or is somebody else's memory.
"""

from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sized
from contextvars import Context
from typing import Any, Self

from .._transport.sharing import RemoteRegion, RemoteSlice
from ..mr_pool import LocalMemory
from ..verbs._memory.buffers import AnyMemory
from .waiter import Waiter

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
    everything: int
    """A key for all memory of the process, to be sent from; or 0."""
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

    last: bool
    """Of its frame, whose receive is free then."""
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

class Promise:
    """What one task waits for: a future, but that a drain calls back at its own end.

    What is settled outside a drain, or already, is called back by the loop, as ever.
    """

    _asyncio_future_blocking: bool
    @property
    def _cancel_message(self) -> object: ...
    def _make_cancelled_error(self) -> BaseException: ...
    target: Any
    """What its owner brought."""
    sends: bool
    """`target` is a Traffic, whose `withdraw` is told of a cancellation."""
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
        """Nothing if it is over; so `set_exception`."""

    def set_exception(self, error: BaseException, /) -> None: ...

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

class Batch:
    """One-sided requests that are being collected.

    The subclass has `_write` and `_read`, which are called for what is not plain.
    """

    _transfer: Run | None
    """Inside the scope."""
    def write(self, source: LocalMemory | AnyMemory, target: RemoteRegion | RemoteSlice) -> None:
        """As `Connection.write`, done when the scope has ended."""

    def read(self, source: RemoteRegion | RemoteSlice, target: LocalMemory | AnyMemory) -> None:
        """As `Connection.read`; the bytes are there when the scope has ended."""

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

class Incoming:
    """A message that was offered, in its place in the order of arrival, and is to be read.

    `landing` is the target that it is being read into, instead of the pool's memory.
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
    """One RDMA READ of so many bytes of an offered message, from an offset of both memories.

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
        """Nothing: everybody who waits for the message hears of the queue pair's end."""

    def release(self) -> None: ...

class Outgoing:
    """A message that waits for its turn."""

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
    """A frame on its way out, in a leased block, which goes back to the pool, or to `spares`."""

    def __init__(
        self,
        block: Block,
        length: int,
        future: Waiter | None = None,
        spares: list[Any] | None = None,
    ) -> None: ...
    def failed(self, error: BaseException, /) -> None:
        """Tells those who wait for it."""

    def release(self) -> None:
        """The device has let go of the block.  Again does nothing."""

class Account:
    """The numbers of aiordma/_core/credits.py, and what C does to them by itself."""

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
        """A frame with messages is sent; None without a credit."""

    def plainly_receive(self, control: int, data: int, /) -> bool:
        """A frame with messages has arrived; False, and nothing happens, if it may not."""

    def plainly_spend_credit(self) -> tuple[int, int] | None:
        """A CREDIT frame is sent; None if none is due."""

    def plainly_receive_credit(self, control: int, data: int, /) -> bool:
        """A CREDIT frame has arrived, and its receive is posted again; False, and nothing happens,
        if it may not.
        """

    def plainly_repost(self, count: int, /) -> bool:
        """So many data receives are posted again; False, and nothing happens, for more than were
        used.
        """

    @property
    def plainly_due(self) -> bool:
        """A CREDIT frame is due."""

class Counts:
    """What a connection has done."""

    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    reads: int
    writes: int
    atomics: int

class Arrivals:
    """The messages of an inbox, one after another: an asynchronous iterator.

    What is not here for a task that is, comes from a coroutine that `otherwise` makes; its
    StopAsyncIteration is the end.
    """

    def __new__(
        cls, inbox: Inbox, otherwise: Callable[[], Coroutine[Any, Any, Any]], /
    ) -> Arrivals: ...
    def __aiter__(self) -> Arrivals: ...
    def __anext__(self) -> Awaitable[Any]: ...

class Inbox:
    """Messages that have arrived, in order, and those who wait for them.

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
    """Receivers that have been told, and have not had their turn yet."""
    offers: int
    """What in `incoming` is no message yet."""
    unstarted: int
    """Those of them that nobody reads."""
    ahead: int
    """Bytes of what was offered, is read or has been, and was not taken."""
    most_ahead: int
    """Of these, while nobody waits for them."""
    taken: int
    """Frames whose messages have been taken, and of which nobody has been told."""
    refill: int
    """Of so many `_tell_taken` is told, unless `traffic` can do it all."""
    traffic: Traffic | None
    ended: bool
    def take(self) -> Any:
        """The first message if it is here and nobody else waits, or None."""

    def take_here(self) -> Any:
        """As `take`, but for a task that a drain has called back: it is in the right loop."""

    def take_in_turn(self) -> Any:
        """The same for one who waited and was told."""

    def wait(self) -> Promise | None:
        """In line for the next message; None unless there is none, and nobody waits."""

    def wait_here(self) -> Promise | None:
        """As `wait`, for such a task."""

    def take_first(self) -> Any:
        """The same for one whose turn it is."""

    def went(self, last: bool, /) -> None:
        """The first was taken, the last of its frame: the next one's turn."""

    def add(self, message: Message, /) -> None:
        """The next message, which is here."""

    def wake_first(self) -> None: ...

class Offers:
    """What one side has offered and the peer has not answered for: memory that it may read.

    `domain` and the functions of the library are addresses; without `register_own` everything is
    registered by the subclass.  It has `_not_closed(code)`, which raises what that errno value of
    `deregister` means.  It works on nothing that was registered before a fork.
    """

    def __init__(self, most: int, domain: int, register_own: int, deregister: int, /) -> None: ...
    def __len__(self) -> int: ...
    @property
    def full(self) -> bool:
        """The peer has as many to answer as it may have."""

    @property
    def futures(self) -> list[Waiter]:
        """Of those whose end has not come."""

    def hold(self, request_id: int, region: int, outgoing: Outgoing, /) -> None:
        """It is offered under that number, in that region, by its address, and stays until its end.

        It takes over the memory: `outgoing` has no `view` then.
        """

    def close(self) -> None:
        """The queue pair is destroyed: nothing touches the memory any more."""

class Traffic:
    """The two-sided traffic of a connection: what is plain of it.

    What the subclass must have stands in native/fast/traffic.c.
    """

    counts: Counts
    queue: Any
    shelf: Shelf
    account: Any
    inbox: Any
    offers: Any
    message_type: type[Message]
    waiting: deque[Any]
    """Messages that wait for their turn."""
    controls: Sized
    """Control messages that wait."""
    peer_size: int
    """Bytes of the receive that the next frame comes into."""
    sent: int
    """Frames that `_count_sent` has not been told of."""
    used: int
    """Frames that have come, and of which nobody has been told: all of them no longer than
    `small_size`, or else `grown`."""
    fitted: int
    """Of these the latest ones in a row that were no longer."""
    oversized: int
    """Those of `used` that were offers longer than `large_size`: they say nothing of receives."""
    large_size: int
    longest: int
    """The longest message that is taken."""
    reposted: int
    """Receives that were posted again, and of which nobody has been told."""
    small_size: int
    receive_size: int
    """Bytes of receives that are posted again when messages have been taken; 0: `_tell_taken`."""
    patience: int
    """When so many frames have come that nobody was told of, it is `_tell_taken` all the same."""
    max_message: int
    closing: bool
    ended: bool
    takes: bool
    """Frames with messages may come, and are wanted."""
    blocked: bool
    """There is no memory for a frame now."""
    counting: bool
    """`_count_sent` is called for each frame that is sent."""
    grown: bool
    """Receives are larger than `small_size` now."""
    watching: bool
    """`_count_used` is called for each frame that arrives."""
    parting: bool
    """`_check_drained` is called when something may be done."""
    @property
    def under_way(self) -> int:
        """Frames with messages that are posted and not completed."""

    @property
    def started(self) -> bool: ...
    def begin(self) -> None:
        """Everything is there; frames may be sent."""

    def pump(self) -> None:
        """Sends what credits and room allow; called whenever either may have grown."""

    def collect(self) -> None:
        """Sends what was collected."""

    def collect_soon(self) -> None:
        """What waits is sent when the tasks of this turn of the loop have had theirs."""

    def post(self, frame: Frame, messages: int, bytes: int, /) -> None:
        """A frame that needs a data credit, whose header is written, with so much in it."""

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

        It takes over the lease; ValueError, and nothing has happened, for what cannot be an offer.
        """

    def offer_over(self, request_id: int, error: BaseException | None, /) -> bool:
        """The peer has read what was offered, or will not, and who waits is told `error`.

        False, and nothing happens, if nothing of that number was offered.
        """

    def request_id(self) -> int:
        """A number for a request, not 0 and not in use for 2^32 requests."""

    def answer(self, request_id: int, /) -> bool:
        """Says that an offered message has been read; False, and nothing is said, unless that is
        plain.
        """

    def offered(self, incoming: Incoming, /) -> None:
        """The next message, which is read as soon as it may be."""

    def take_frame(self, block: Block, length: int, /) -> None:
        """It has arrived."""

    def deliver(self, data: object, imm: int | None, /) -> Promise | None:
        """Sends a message, or lets it wait for others, for a task that a drain has called back.

        None, and nothing happens, if anything about it is not plain, or not as it should be.
        """

    def new_promise(self) -> Promise:
        """For a message: cancelling it is told to `withdraw`."""

    def send_plainly(
        self, data: bytes | bytearray | memoryview | Message, imm: int | None, waiter: Waiter, /
    ) -> bool:
        """Sends a message, or lets it wait for others; False, and nothing happens, if it must wait
        for anything else.
        """

class Table:
    """The slots of one event loop: which posted work a completion belongs to."""

    loop: AbstractEventLoop
    waking: bool
    """A drain calls back those whom it has told."""
    look: Callable[[int], object] | None
    """Called by who is about to wait, to look once more, for so many microseconds."""
    look_us: int
    """As many, or none where the last looks found nothing."""
    returns: bool
    """Whose drain this is looks again soon."""
    looking: bool
    """And so does the loop, before it sleeps."""
    @property
    def waiting(self) -> int:
        """Promises under way that somebody has asked to be told of."""

    later: bool
    """Whom a drain wakes is called back by the loop, not at the end of the drain."""
    @property
    def stray(self) -> int:
        """Completions that belonged to nothing under way."""

    def __len__(self) -> int:
        """Slots that are taken."""

    def drain(self, state: int, most: int, spin_us: int, returns: bool, /) -> int:
        """One crossing of aiordma_drain, by the address of its state, and all that follows from it.

        Of up to `most` completions, 1 to 128.  A negative errno value; or 1 if there were
        completions, or the device made progress, and 2 if there may be more, and 4 if there are
        other descriptors to be notified by.
        """

    closed: bool
    """`serve` and `look_again` do nothing: the channel is gone, or its process."""

    def serve(
        self,
        state: int,
        most: int,
        leaving: list[Any],
        otherwise: Callable[[int], object],
        spin_us: int,
        /,
    ) -> object:
        """What a loop calls that only ever drains; nothing of Python's is called to do so.

        `otherwise` has what `drain` would return, unless that is 0 or 1 and `leaving` is empty.
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
        """As `serve`, in the middle of something: whom it wakes is called back `later`.

        Who does it comes again if it `returns`, or is `looking`.
        """

    keep: Callable[[], object] | None
    """Called by the loop, to look before it sleeps; None: no more."""
    keep_us: int
    """Microseconds that it looks for."""
    found: bool
    """It has found something, since this was False."""
    def look_soon(self) -> None:
        """The loop calls `keep` in its next turn."""

    def keep_looking(
        self,
        state: int,
        most: int,
        leaving: list[Any],
        otherwise: Callable[[int], object],
        /,
    ) -> object:
        """As `serve`, and again in each turn of the loop in which there was something.

        `otherwise` has what `drain` would return, unless that is 1 and `leaving` is empty.
        """

class Queue:
    """The send and the receive queue of one queue pair: what is posted, and what completes.

    The subclass has `_went_wrong(work, facts)`, `_use_room()`, `_broken(error)`,
    `post_frame(frame)` and `_refused(frame, code, posted)`: see native/fast/drain.c and queue.c.
    """

    table: Table
    user: object
    """What remote memory must be for."""
    traffic: object
    """A Traffic, whose receives those of the queue pair are; or something that is told,
    `received(block, length)` and `written(block, length, imm)`."""
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
    watched: bool
    """`_use_room` is called whenever entries have become free."""
    failed: bool
    """Nothing is done any more: what completes is only over."""
    @property
    def completions(self) -> int:
        """Good ones: each is a sign of life of the peer's device."""

    def post_work(self, work: Work | Run, /) -> tuple[int, int]:
        """An errno value, and how many requests were posted nevertheless.

        ValueError if there are too few free entries.
        """

    def post_block(self, block: Block, length: int, /) -> int:
        """Posts a receive of so many bytes; an errno value."""

    def post_ready(self, shelf: Shelf, most: int, length: int, /) -> int:
        """Posts receives in blocks that are ready, for whom nobody waits: how many."""

    def write(self, local: object, remote: object, /) -> Promise | None:
        """Posts a write; None, and nothing happens, unless it is plain, allowed, and has room."""

    def read(self, local: object, remote: object, /) -> Promise | None:
        """The same for a read."""

    def under_way(self) -> list[object]:
        """The work of the send queue, oldest first."""

    def clear_slots(self) -> list[object]:
        """The queue pair is gone: all work that was under way.  Blocks of receives are released."""

def connect(drain: int, /) -> None:
    """The address of aiordma_drain, once for all."""
