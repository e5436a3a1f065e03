# The protocol of one connection. `Session` connects the parts, checks incoming frames, and shuts
# the parts down.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint16_t, uint32_t
from libc.string cimport memcpy

cimport cython

from .frames cimport (
    BUNDLE,
    CONTROL,
    CREDIT,
    DATA,
    ENTRY_HAS_IMM,
    HAS_IMM,
    HEADER,
    Credits,
    PeerRoom,
    RNDV_ACK,
    RNDV_KEYS,
    RNDV_RTS,
    WRITTEN,
    BundleEntry,
    FrameHeader,
    RendezvousAck,
    RendezvousKey,
    RendezvousKeys,
    bundled_size,
    carries_message,
    frame_name,
    validate_bundle,
)
from .controls cimport Controls
from .futures cimport DONE, PENDING, OpFuture, warn_never_awaited
from .inbox cimport (
    Inbox,
    MessageIterator,
    PendingRendezvous,
    RecvOperation,
    claim_messages,
    next_of_iteration,
    parse_rendezvous,
)
from .message cimport Counts, Message, new_message
from .one_sided cimport begin_transfer
from .outbox cimport ENDED, NOT_STARTED, SWITCHING, Outbox, require_open
from .rail cimport SendQueue
from .receives cimport Receives, ReceiveSizes
from .memory cimport Local, PoolBlock, Remote, release_all
from .rendezvous cimport Opening
from .sealing cimport TAG
from .sends cimport Frame, MessageOwner, cannot_send_error, new_frame
from .stripes cimport Lane
from .work_queue cimport (
    KIND_READ,
    KIND_SEND,
    KIND_WRITE,
    TO_ANY_DEVICE,
    FrameHandler,
    WorkQueues,
)

from aiordma._core import arguments, protocol
from aiordma._core.operations import OperationKind
from aiordma._native import failure
from aiordma.errors import ConnectionClosedError, ProtocolError
from aiordma.verbs._memory.buffers import bytes_of

cdef extern from "<endian.h>" nogil:
    uint16_t le16toh(uint16_t)
    uint32_t le32toh(uint32_t)


# This must be a C variable. Destructors use it, and Python globals may already be None during
# interpreter shutdown.
cdef dict names_of_kinds = {int(kind): kind.text for kind in OperationKind}


cdef class MessageMethods:
    """The methods of a Connection that send, receive, read and write.

    A subclass defines `_transfer` for memory that is not registered.
    """

    cdef Outbox outbox
    cdef Inbox inbox

    def _set_session(self, Session session not None):
        self.outbox, self.inbox = session.outbox, session.inbox

    def send(
        self, data: Sendable | list[Any] | tuple[Sendable, ...], *, imm: int | None = None
    ) -> Coroutine[Any, Any, None]:
        """Send one message of any size.

        This returns when the peer's device has received the message or, if the message is long,
        when the peer has read it. The peer's program can then receive it, even after its own
        `close`, but not after an `abort`. Only a reply tells you that the program has received it.
        Messages arrive in the order of the calls.

        The call waits while the peer has no room or the memory pool is exhausted. The buffers must
        not change until it returns. If you cancel it before the message has been posted, nothing is
        sent. If you cancel it later, the message is still sent, and the buffers must not change
        until the device has finished with them.

        Args:
            data: Any buffer or tensor (`verbs.bytes_of`), registered memory, a received Message, or
                a list or tuple of these. The elements of a list are sent as one message. Long
                elements are sent without a copy.
            imm: Immediate data: an unsigned 32-bit number that is sent with the message.

        Raises:
            MessageTooLongError: If the message is longer than `max_message`. Nothing is sent.
            BusyError: If `claim_messages`, `aiordma.rpc` or a stream owns the messages of this
                connection.
        """
        return new_send(self.outbox, None, data, imm)

    @cython.nonecheck(True)
    def send_nowait(
        self, data: Sendable | list[Any] | tuple[Sendable, ...], *, imm: int | None = None
    ) -> asyncio.Future[None]:
        """Send a message without awaiting. Its place in the order is determined by this call.

        There is no backpressure, so limit the number of futures that are not done.

        Args:
            data: The message, as for `send`. The buffers must not change until the future is done.
            imm: Immediate data, as for `send`.

        Returns:
            A future that gets the outcome of `send`. It is recognized by `asyncio.isfuture`, but
            has its own class. Cancelling it has the same effect as cancelling `send`.

        Raises:
            BusyError: If `claim_messages`, `aiordma.rpc` or a stream owns the messages of this
                connection.
        """
        if self.outbox.message_owner is not None:
            raise cannot_send_error(self.outbox, None)
        return self.outbox.start_message(data, imm)

    def recv(self) -> Coroutine[Any, Any, Message]:
        """Receive the next message as a view of the memory in which it arrived.

        The memory is yours until you release the message; see `Message`. If you cancel the call, no
        message is lost. If several tasks wait, they get messages in the order of their calls. A
        long message may also have to wait for memory if the pool is exhausted.

        Messages that arrived before the connection ended can still be received afterwards.

        Returns:
            The message.

        Raises:
            QuotaError: If the message is too long for the limit of the pool. It stays available for
                `recv_into`.
            BusyError: If `claim_messages`, `aiordma.rpc` or a stream owns the messages of this
                connection.
            ConnectionClosedError: If the connection was closed in order and no message is left.
            ConnectionBrokenError: If the connection ended in another way and no message is left.
            IntegrityError: If an encrypted message was modified on the way.
        """
        cdef RecvOperation operation = RecvOperation.__new__(RecvOperation)
        operation.inbox = self.inbox
        return operation

    def recv_into(self, memory: Local | AnyMemory) -> Coroutine[Any, Any, Received]:
        """Receive the next message into your own memory.

        A long message is read directly into this memory, so this also works for messages that are
        larger than the pool.

        Do not read or modify the memory until the call returns. If you cancel it, the message is
        not lost. However, a read that was already posted still writes to the memory, which stays
        pinned until then. The end of the connection is raised as in `recv`.

        Args:
            memory: Registered memory or any writable buffer, at least as long as the message.

        Returns:
            The length of the message and its immediate data.

        Raises:
            MessageTooLongError: If the message does not fit. It stays available for the next call.
        """
        cdef RecvOperation operation
        if memory is None:
            bytes_of(memory, True)  # raises an error that explains the problem
        operation = RecvOperation.__new__(RecvOperation)
        operation.inbox, operation.memory = self.inbox, memory
        return operation

    def recv_with(
        self, allocate: Callable[[int], Local | AnyMemory]
    ) -> Coroutine[Any, Any, ReceivedMemory]:
        """Receive the next message into memory that you allocate when its length is known.

        A long message is read directly into this memory. Cancellation and the end of the connection
        are as for `recv_into`.

        Args:
            allocate: A function that takes the number of bytes and returns memory, such as a numpy
                array, an Arrow buffer, or the result of `conn.alloc`. It is called once, when the
                message has been assigned to this call, perhaps before all of it has arrived. It
                must not await. If it raises, the exception is raised here, and the message stays
                available for the next call.

        Returns:
            The memory, the length of the message and its immediate data.
        """
        cdef RecvOperation operation
        if not callable(allocate):
            raise TypeError(f"allocate must be a function of the number of bytes, not "
            f"{type(allocate).__name__}")
        operation = RecvOperation.__new__(RecvOperation)
        operation.inbox, operation.allocate, operation.returns_memory = self.inbox, allocate, True
        return operation

    def write(
        self, source: Local | AnyMemory, target: Remote, *, imm: int | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Write local memory to memory of the peer with the same length.

        This returns when the bytes are in the peer's memory. The peer's program is not notified
        unless you pass immediate data. In that case, its `recv` returns an empty message with
        `imm`, in order with other messages. This message waits for room at the peer like any other,
        and the call also waits until the peer's device has received it.

        `source` must not change until the call returns or, if you cancel it, until the device has
        finished with it.

        Args:
            source: Registered memory or any buffer.
            target: The memory of the peer.
            imm: Immediate data: an unsigned 32-bit number.
            progress: A function to call with the number of bytes written so far. Long transfers are
                divided into pieces, several of which are in flight at a time.

        Raises:
            RemoteRangeError: If the peer has not granted the right. Nothing has been posted.
            LeaseEndedError: If the lease has expired. Nothing has been posted.
            ValueError: If the lengths differ. Nothing has been posted.
            BusyError: If `imm` is passed, and `claim_messages`, `aiordma.rpc` or a stream owns the
                messages.
        """
        if imm is not None and self.outbox is not None and self.outbox.message_owner is not None:
            raise cannot_send_error(self.outbox, None)
        if not isinstance(source, Local) or not isinstance(target, Remote):
            transfer = self._transfer(
                reads=False, data=source, remote=target, imm=imm, progress=progress
            )
            return set_qualname(KIND_WRITE, transfer)
        return new_transfer(self, KIND_WRITE, source, target, imm, progress)

    def read(
        self, source: Remote, target: Local | AnyMemory, *,
        progress: Callable[[int], object] | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Read memory of the peer into local memory with the same length.

        This returns when the bytes are in `target`. Do not read or modify `target` until then. If
        you cancel the call, a read that was already posted still writes to `target`.

        Args:
            source: The memory of the peer.
            target: Registered memory or any writable buffer.
            progress: A function to call with the number of bytes read so far. Long transfers are
                divided into pieces, several of which are in flight at a time.

        Raises:
            RemoteRangeError: If the peer has not granted the right. Nothing has been posted.
            LeaseEndedError: If the lease has expired. Nothing has been posted.
            ValueError: If the lengths differ. Nothing has been posted.
        """
        if not isinstance(target, Local) or not isinstance(source, Remote):
            transfer = self._transfer(
                reads=True, data=target, remote=source, imm=None, progress=progress
            )
            return set_qualname(KIND_READ, transfer)
        return new_transfer(self, KIND_READ, target, source, None, progress)

    def __aiter__(self) -> AsyncIterator[Message]:
        """Iterate over received messages until the connection is closed in order.

        Raises:
            ConnectionBrokenError: If the connection ends in another way.
        """
        return MessageIterator(self.inbox)

    @cython.nonecheck(True)
    def claim_messages(self, owner: str) -> MessageClaim:
        """Claim all messages in both directions, to run a protocol of your own over the connection.

        Until the claim is closed or dropped, other calls that send or receive messages raise
        BusyError. Operations on memory remain available, except for writes with immediate data.

        Args:
            owner: The name of the protocol, for the errors of other calls.

        Returns:
            The claim, which sends and receives the messages.

        Raises:
            BusyError: If the messages already have an owner, or a task is waiting for a message.
        """
        name = arguments.text("owner", owner)
        self.outbox.owner.check_loop()
        return MessageClaim(self.inbox, name)


@cython.no_gc_clear
@cython.final
cdef class MessageClaim:
    """The messages of a connection, in both directions, while one protocol owns them.

    Created by `Connection.claim_messages`. To receive messages, iterate with `async for`. As with a
    connection, the iteration ends when the connection is closed in order, and raises an error if
    the connection ends in another way.

    The claim ends when it is closed, when its `with` block ends, or when it is garbage-collected.
    It does not keep the connection alive.
    """

    cdef Inbox inbox
    cdef Outbox outbox                 # own reference, because the inbox may be cleared first
    cdef MessageOwner owner

    def __cinit__(self, Inbox inbox not None, str owner not None):
        self.owner = claim_messages(inbox, owner)
        self.inbox, self.outbox = inbox, inbox.outbox

    def send(
        self, data: Sendable | list[Any] | tuple[Sendable, ...], *, imm: int | None = None
    ) -> Coroutine[Any, Any, None]:
        """Send a message as `Connection.send` does.

        Args:
            data: The message, as for `Connection.send`.
            imm: Immediate data, as for `Connection.send`.

        Raises:
            MessageTooLongError: If the message is longer than `max_message`. Nothing is sent.
            BufferStateError: If the claim has been closed.
            BusyError: If the claim has been closed, and the messages have another owner.
        """
        return new_send(self.outbox, self.owner, data, imm)

    def send_nowait(
        self, data: Sendable | list[Any] | tuple[Sendable, ...], *, imm: int | None = None
    ) -> asyncio.Future[None]:
        """Send a message without awaiting, as `Connection.send_nowait` does.

        Args:
            data: The message, as for `Connection.send`. The buffers must not change until the
                future is done.
            imm: Immediate data, as for `Connection.send`.

        Returns:
            A future that gets the outcome of `send`.

        Raises:
            MessageTooLongError: If the message is longer than `max_message`. Nothing is sent.
            BufferStateError: If the claim has been closed.
            BusyError: If the claim has been closed, and the messages have another owner.
        """
        if self.outbox.message_owner is not self.owner:
            raise cannot_send_error(self.outbox, self.owner)
        return self.outbox.start_message(data, imm)

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Message]:
        return next_of_iteration(self.inbox, self.owner)

    def close(self) -> None:
        """Give up the messages, so that other calls can send and receive them.

        A task that is already waiting for a message still gets it. A second call has no effect.
        """
        if self.outbox.message_owner is self.owner:
            self.outbox.message_owner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __dealloc__(self):
        if self.outbox is not None and self.outbox.message_owner is self.owner:
            self.outbox.message_owner = None


cdef object set_qualname(uint8_t kind, object coroutine):
    coroutine.__qualname__ = f"Connection.{OperationKind(kind).text}"
    return coroutine


@cython.freelist(64)
@cython.final
cdef class Operation:  # type: Coroutine[Any, Any, None]
    """A `send`, `write` or `read`: an awaitable that asyncio treats as a coroutine.

    It is not a future, and an OpFuture is not a coroutine, because `asyncio.wait` rejects objects
    that could be both.
    """

    cdef object owner                  # kept alive until a transfer ends
    cdef Outbox outbox                 # None once it has begun
    cdef Counts counts
    cdef uint8_t kind
    cdef bint checks_message_owner     # it sends a message, so the outbox must have this owner:
    cdef MessageOwner message_owner    # the owner that started it, or None
    cdef object data, imm              # `data` of a transfer is a Local
    cdef object remote, progress       # of a transfer
    cdef OpFuture future

    def __await__(self) -> Generator[Any]:
        return self

    def __iter__(self) -> Self:
        return self

    def __bytes__(self) -> bytes:
        raise TypeError(f"{self.__qualname__} must be awaited before its result can be used")

    def __next__(self) -> OpFuture:
        cdef OpFuture future = self.future
        if future is None:
            outbox, data, remote, progress = self.outbox, self.data, self.remote, self.progress
            if outbox is None:
                raise RuntimeError(f"cannot reuse already awaited {self.__qualname__}")
            owner = self.owner
            self.clear_references()  # the frames of an error may refer to this object
            if self.checks_message_owner and outbox.message_owner is not self.message_owner:
                raise cannot_send_error(outbox, self.message_owner)
            if self.kind == KIND_SEND:
                future = outbox.start_message(data, self.imm)
            else:
                require_open(outbox)
                future = begin_transfer(
                    outbox.lead_rail, self.kind, outbox, data, remote, self.imm, progress
                )
            # The owner must stay alive until the transfer ends.
            self.owner, self.counts, self.future = owner, outbox.counts, future
            if future.state == PENDING:
                future.wakeups.poll_before_wait(future)
        if future.state == PENDING:
            future._asyncio_future_blocking = True
            return future
        counts = self.counts
        self.clear_references()
        if future.state != DONE:
            raise future.exception_to_raise()
        counts.reads += self.kind == KIND_READ
        counts.writes += self.kind == KIND_WRITE
        raise StopIteration

    def send(self, value: None) -> OpFuture:
        return self.__next__()

    def throw(
        self, kind: type[BaseException] | BaseException, value=None,
        traceback: TracebackType | None = None,
    ) -> OpFuture:
        if value is None:
            value = kind() if isinstance(kind, type) else kind
        self.close()
        raise value

    def close(self):
        """Drop the operation if it was not posted, because its task is gone."""
        cdef OpFuture future = self.future
        self.clear_references()
        if future is not None:
            future.cancel()

    cdef void clear_references(self) noexcept:
        self.owner = self.outbox = self.counts = None
        self.data = self.remote = self.progress = self.future = None

    @property
    def __qualname__(self) -> str:
        return f"Connection.{names_of_kinds[self.kind]}"

    def __dealloc__(self):
        if self.outbox is not None:
            warn_never_awaited(self.__qualname__)
        elif self.future is not None:
            self.future.cancel()  # dropped halfway, like a coroutine that is garbage collected


cdef Operation new_send(Outbox outbox, MessageOwner owner, object data, object imm):
    """Create the awaitable of a send, which starts when it is awaited."""
    cdef Operation operation = Operation.__new__(Operation)
    operation.outbox, operation.kind, operation.data, operation.imm = outbox, KIND_SEND, data, imm
    operation.checks_message_owner, operation.message_owner = True, owner
    return operation


cdef Operation new_transfer(
    MessageMethods methods, uint8_t kind, object data, object remote, object imm, object progress
):
    """Create the awaitable of a read or a write, which starts when it is awaited."""
    cdef Operation operation = Operation.__new__(Operation)
    operation.outbox, operation.kind, operation.data, operation.imm = methods.outbox, kind, data, imm
    operation.owner = methods  # a transfer keeps its connection alive until it ends
    operation.remote, operation.progress = remote, progress
    operation.checks_message_owner = imm is not None
    return operation


cdef enum:
    MIN_PEER_CREDITS = 8  # minimum credits of a peer with rails, if there are receives


@cython.no_gc_clear
@cython.final
cdef class Session(FrameHandler):
    """The protocol of one connection. All of its frames travel on one rail, the lead."""

    cdef object __weakref__
    cdef readonly Outbox outbox
    cdef readonly Controls controls
    cdef readonly Inbox inbox
    cdef ReceiveSizes sizes            # of this side's receives
    cdef readonly Receives receives    # of the lead
    cdef object owner, config
    cdef list early_frames, drain_waiters
    cdef public object failover  # type: Any
    cdef public bint peer_has_left     # by saying goodbye; later frames are ignored
    cdef public bint awaiting_auth     # the peer must not send messages before it authenticates
    cdef public bint awaiting_admission  # the application must accept the peer first

    def __init__(
        self, *, SendQueue queue not None, memory: Memory, config: Config,
        owner: Owner,
    ):
        self.config, self.owner = config, owner
        self.outbox = Outbox(queue, self, memory, owner)
        self.controls = Controls(self.outbox, self)
        self.early_frames, self.drain_waiters = [], []
        self.sizes = ReceiveSizes(config.eager_size, config.max_eager_size)
        self.receives = Receives(self.controls, queue, self.sizes, memory, config)
        self.inbox = Inbox(self.outbox, self.controls, self.receives, memory, config.fetch_ahead)

    # ---- bring-up ----

    def post_receives(self):
        """Post all receives. This must happen before the peer can send, during the handshake."""
        self.controls.take_spare_blocks(self.outbox.pool)
        self.receives.post_all()

    def start(self, peer: Room, *, rails: bool = False):
        """Start sending within the room that the peer has offered, and handle its early frames.

        `rails` means that both sides support rails, so frames may move to another one.
        """
        cdef uint32_t data_credits = peer.data_receives, min_credits
        cdef uint32_t threshold = 0    # the default of Credits
        self.outbox.peer_room = PeerRoom(
            peer.eager_size,
            max(self.config.eager_size, self.config.max_eager_size),
            0 if self.outbox.sealing is None else TAG,
            peer.max_message,
        )
        self.outbox.journal.is_enabled = rails
        if rails:
            self.controls.take_spare_blocks(self.outbox.pool, peer.control_receives)
            # Limit the frames in flight, and therefore the journal, to `Config.send_queue`.
            data_credits = min(data_credits, self.config.send_queue)
            # The peer may limit its own frames to MIN_PEER_CREDITS. It must get credits back before
            # it has used all of them, so return them after half. They are returned for receives that
            # have been posted again, so post these in even smaller batches.
            min_credits = min(MIN_PEER_CREDITS, self.config.data_receives)
            threshold = max(1, min_credits // 2)
            self.receives.repost_after = max(1, min_credits // 4)
        self.outbox.credits = Credits(
            self.config.data_receives,
            self.config.control_receives,
            data_credits,
            peer.control_receives,
            threshold,
        )
        self.outbox.flags &= ~NOT_STARTED
        early_frames, self.early_frames = self.early_frames, []
        for block, length, imm in early_frames:
            if imm is None:
                self.received(block, length)
            else:
                self.received_write(block, length, imm)

    def prepare_rail(self, SendQueue rail not None):
        """Post the receive for the peer's Resume on a rail whose queue pair is connected."""
        rail.frame_handler, rail.expects_resume = RailFrames(self, rail), True
        rail.post_receives([self.outbox.pool._block(protocol.MIN_RECEIVE)], protocol.MIN_RECEIVE)

    # ---- another lead ----

    @property
    def lead(self) -> SendQueue:
        """The lead, or the broken one until there is a new one."""
        return self.outbox.lead_rail

    @property
    def rails_up(self) -> list[SendQueue]:
        """The rails that are up: the lead, then the others in the order in which they came up."""
        return [lane.rail for lane in self.outbox.stripes.lanes]

    cdef bint begin_failover(
        self, WorkQueues rail, bint to_other_device=TO_ANY_DEVICE
    ) except -1:
        cdef Outbox outbox = self.outbox
        if (
            rail is not outbox.lead_rail
            or outbox.flags & (NOT_STARTED | ENDED)
            or self.peer_has_left
            or self.failover is None
            or not self.failover.can_fail_over(to_other_device)
        ):
            return False
        outbox.flags |= SWITCHING
        return True

    def send_resume(self, number: int):
        """Send the first frame on a new lead. It reports which frames have arrived."""
        cdef Outbox outbox = self.outbox
        cdef SendQueue lead = outbox.lead_rail
        cdef list spare_blocks = self.controls.spare_blocks
        cdef PoolBlock block = spare_blocks.pop()
        cdef bytes content = RESUME_HEADER + protocol.encode(
            protocol.Resume(number, lead.number, outbox.journal.received)
        )
        cdef Frame frame
        if outbox.sealing is not None:
            content = outbox.sealing.seal_resume(lead.number, content)
        frame = new_frame(block, <uint32_t> len(content))
        memcpy(block.bytes(), PyBytes_AS_STRING(content), len(content))
        frame.spare_blocks = spare_blocks
        try:
            frame.lkey = lead.keys.local_key(block)
        except BaseException:
            frame.release_block()
            raise
        lead.post_checked(frame)

    def continue_on_lead(self, frames: int) -> int:
        """Continue on the lead after the peer's Resume.

        `frames` is the number of frames that have arrived at the peer, which the Resume reports.
        Returns the number of frames and requests that are posted again.

        Raises:
            ProtocolError: If the number is impossible.
        """
        cdef int reposted
        cdef Outbox outbox = self.outbox
        outbox.lead_rail.frame_handler = self
        reposted = outbox.repost_missing(frames)
        self.inbox.fetcher.fetch_ahead()
        return reposted

    # ---- sending ----

    cdef int flush(self) except -1:
        """Send all control messages, memory keys, messages and credits that can be sent now."""
        cdef Outbox outbox = self.outbox
        if outbox.flags & (NOT_STARTED | ENDED | SWITCHING):
            return 0 if outbox.flags & ENDED else outbox.post_again()
        if self.controls.waiting.size():
            if outbox.credits.may_send_control():
                # Announce a new receive size before sending responses, which could use up all
                # control credits.
                self.receives.update_size()
            self.controls.flush()
        if outbox.offers.to_reopen is not None:
            outbox.offers.reopen_messages(<Lane> outbox.stripes.lanes[0])
        # Send memory keys only when no control message is waiting. A waiting message may be a
        # RailReady, which the peer must receive before the keys for that rail.
        if outbox.offers.unannounced and not self.controls.waiting.size():
            self.send_keys()
        outbox.flush()
        if outbox.credits.credit_frame_due() and outbox.lead_rail.free and not outbox.flags & ENDED:
            self.controls.send_frame(CREDIT, b"", None)
        if self.drain_waiters:
            self.wake_if_drained()
        return 0

    cdef int send_keys(self) except -1:
        """Send the peer the keys with which other rails can read messages that were offered."""
        cdef Outbox outbox = self.outbox
        cdef Opening opening
        cdef uint32_t most = (
            outbox.peer_room.size - HEADER - <uint32_t> sizeof(RendezvousKeys)
        ) // <uint32_t> sizeof(RendezvousKey)
        while (
            outbox.offers.unannounced
            and outbox.credits.may_send_control()
            and outbox.lead_rail.free
        ):
            opening = <Opening> outbox.offers.unannounced[0]
            if not self.controls.send_frame(RNDV_KEYS, opening.next_keys(most), None):
                break
            opening.mark_announced(most)
        return 0

    # ---- receiving ----

    cdef bint accept_frame(self, PoolBlock block, uint32_t length, object imm) except -1:
        """Return whether a frame may be handled now. Early frames are kept for `start`.

        Late frames are dropped.
        """
        if self.outbox.flags & NOT_STARTED:
            self.early_frames.append((block, length, imm))  # the handshake here has not finished
            self.owner.early()
            return False
        if self.outbox.flags & ENDED or self.peer_has_left:
            block.end_lease()
            return False
        return True

    cdef int received(self, PoolBlock block, uint32_t length) except -1:
        """Handle a frame that has arrived in `block`, taking over the lease of the block."""
        if not self.accept_frame(block, length, None):
            return 0
        self.outbox.journal.received += 1
        try:
            self.take_frame(block, length)
        except ProtocolError as error:
            self.owner.violated(error)
        return self.flush()

    cdef int take_frame(self, PoolBlock block, uint32_t length) except -1:
        cdef const FrameHeader *header = <const FrameHeader *> block.bytes()
        cdef int kind
        cdef bint has_imm
        cdef uint32_t imm, count = 1, received_length = length
        cdef Message message
        try:
            if self.outbox.sealing is not None:
                length = self.outbox.sealing.open(block.bytes(), length)
            kind, has_imm = header.kind & ~HAS_IMM, header.kind & HAS_IMM
            imm = le32toh(header.imm)
            if length < HEADER:
                raise ProtocolError(
                    "the peer sent a frame shorter than its header of 8 bytes"
                )
            # RNDV_KEYS and WRITTEN frames occur only on a connection that can have several rails.
            if (
                not DATA <= kind <= (WRITTEN if self.outbox.journal.is_enabled else RNDV_ACK)
                or (has_imm and kind != DATA and kind != RNDV_RTS and kind != WRITTEN)
            ):
                raise ProtocolError(f"the peer sent a frame of unknown kind {header.kind:#04x}")
            if imm and not has_imm:
                raise ProtocolError(
                    f"the peer sent a {frame_name(kind)} frame with unexpected immediate data"
                )
            self.outbox.credits.received(kind, header.control, le16toh(header.data))
            self.outbox.journal.release_credited(header.control, le16toh(header.data))
            if (self.awaiting_auth or self.awaiting_admission) and (
                carries_message(kind) or kind >= RNDV_ACK
            ):
                raise ProtocolError(self.too_early_message())
            if kind == BUNDLE:
                count = validate_bundle(block.bytes(), length)
        except ProtocolError:
            block.end_lease()
            raise
        if kind == RNDV_RTS:
            return self.take_rendezvous(block, length)
        self.sizes.count_frame(received_length)
        if kind == DATA or kind == WRITTEN:
            message = new_message(block, HEADER, length - HEADER)
            message.imm_value, message.has_imm = imm, has_imm
        if kind == DATA:
            return self.inbox.add_message(message)
        if kind == BUNDLE:
            return self.take_bundle(block, count)
        if kind == WRITTEN:
            return self.take_written(message)
        return self.take_control(block, kind, length)

    cdef int take_bundle(self, PoolBlock block, uint32_t count) except -1:
        """Split a BUNDLE frame into its messages, each of which holds a lease of the block."""
        cdef const BundleEntry *entry
        cdef uint32_t offset = HEADER, i, size
        cdef Message message
        block.leases += count - 1
        for i in range(count):
            entry = <const BundleEntry *> (block.bytes() + offset)
            size = le32toh(entry.length) & ~ENTRY_HAS_IMM
            message = new_message(block, offset + sizeof(BundleEntry), size)
            message.has_imm = le32toh(entry.length) & ENTRY_HAS_IMM != 0
            message.imm_value = le32toh(entry.imm)
            message.is_last_in_frame = i + 1 == count
            self.inbox.add_message(message)
            offset += <uint32_t> bundled_size(size)
        return 0

    cdef int take_rendezvous(self, PoolBlock block, uint32_t length) except -1:
        cdef PendingRendezvous pending
        try:
            pending = parse_rendezvous(
                block.bytes(), length, self.config.max_message, self.outbox.sealing is not None,
                self.outbox.journal.is_enabled,
            )
        finally:
            block.end_lease()
        self.sizes.count_frame(HEADER + pending.length + self.outbox.peer_room.tag_size)
        return self.inbox.add_rendezvous(pending)

    cdef int take_control(self, PoolBlock block, int kind, uint32_t length) except -1:
        cdef bytes content = PyBytes_FromStringAndSize(
            <const char *> block.bytes() + HEADER, length - HEADER
        )
        cdef const RendezvousAck *ack
        self.receives.repost_block(block)
        self.outbox.credits.reposted_control()
        if kind == CONTROL:
            message = protocol.decode(content)
            if self.awaiting_auth and type(message) not in protocol.BEFORE_PROOF:
                raise ProtocolError(
                    f"the peer sent a {type(message).__name__} before it has authenticated "
                    f"with the key"
                )
            if isinstance(message, protocol.ReceiveSize):
                self.outbox.peer_room.announced(message.first, message.size)
            else:
                self.owner.control(message)
        elif kind == RNDV_ACK:
            if len(content) != sizeof(RendezvousAck):
                raise ProtocolError(f"the peer sent an acknowledgement of invalid size: {length} bytes")
            ack = <const RendezvousAck *> PyBytes_AS_STRING(content)
            self.outbox.on_rendezvous_ack(
                le32toh(ack.request_id), le32toh(ack.status), self.invalidated_key
            )
        elif kind == RNDV_KEYS:
            self.inbox.fetcher.take_keys(content)
        return 0

    cdef int received_write(self, PoolBlock block, uint32_t length, uint32_t imm) except -1:
        """Handle a write to this side's memory that the peer reports with immediate data."""
        cdef Message message
        if not self.accept_frame(block, length, imm):
            return 0
        message = new_message(block, 0, 0)
        message.imm_value, message.has_imm = imm, True
        try:
            if self.outbox.journal.is_enabled:
                raise ProtocolError("the peer wrote with immediate data, but must send a WRITTEN "
                "frame on a connection with rails")
            self.outbox.credits.received(DATA, 0, 0)
            if self.awaiting_auth or self.awaiting_admission:
                raise ProtocolError(self.too_early_message())
            self.sizes.count_frame(0)
            self.report_write(message, length)
        except ProtocolError as error:
            self.owner.violated(error)
            return 0
        return self.flush()

    cdef int take_written(self, Message message) except -1:
        """Handle a WRITTEN frame, which reports a write with immediate data and its length."""
        cdef uint32_t bytes_written
        if message.length != sizeof(bytes_written) or not message.has_imm:
            raise ProtocolError(
                f"the peer announced a write in a frame of invalid size: {HEADER + message.length} bytes"
            )
        bytes_written = le32toh((<const uint32_t *> (message.block.bytes() + HEADER))[0])
        message.length = 0
        return self.report_write(message, bytes_written)

    cdef int report_write(self, Message message, uint32_t length) except -1:
        if self.outbox.sealing is not None and not self.outbox.sealing.memory_in_clear:
            raise ProtocolError(WRITTEN_IN_CLEAR)
        message.bytes_written, message.has_written = length, True
        return self.inbox.add_message(message)

    cdef str too_early_message(self):
        return BEFORE_THE_KEY if self.awaiting_auth else BEFORE_ADMISSION

    # ---- statistics ----

    def figures(self) -> dict[str, int]:
        """Return the numbers of queued items and items in progress, for diagnosis. Thread-safe."""
        cdef Inbox inbox = self.inbox      # copied, because `close` clears these
        cdef Receives receives = self.receives
        cdef Outbox outbox = self.outbox
        cdef Lane lane
        outbox.wait.settle()
        for lane in outbox.stripes.lanes:
            (<SendQueue> lane.rail).backlog.wait.settle()
        figures = {
            "messages_waiting": outbox.waiting.size(),
            "controls_waiting": self.controls.waiting.size(),
            "credits": outbox.credits.data,
            "frames_in_flight": outbox.frames_in_flight,
            "rendezvous": len(outbox.offers.messages),
        }
        if inbox is not None:  # None once it is closed
            figures["arrived"] = inbox.incoming.size()
            figures["unread"] = inbox.fetcher.unread.size()
            figures["read_ahead"] = inbox.fetcher.bytes_ahead
            figures["receivers"] = inbox.receivers.size()
            figures["receive_size"] = self.sizes.size
            figures["receives"] = receives.posted - self.sizes.used_up
            figures["larger_blocks"] = len(receives.larger_blocks)
            figures["spare_blocks"] = len(self.controls.spare_blocks)
        return figures

    def end_iteration(self):
        """End each `async for` over the messages. Other work continues."""
        if self.inbox is not None:  # None once it is closed
            self.inbox.end_iteration()

    # ---- the end ----

    @property
    def ended(self) -> bool:
        return self.outbox.flags & ENDED != 0

    def drained(self) -> asyncio.Future[None]:
        """Return a future that is done when no message waits to be sent or to be read by the peer.

        It is also done, without an error, when the session ends.
        """
        future = self.outbox.lead_rail.table.wakeups.loop.create_future()
        self.drain_waiters.append(future)
        self.wake_if_drained()
        return future

    cdef int wake_if_drained(self) except -1:
        """Complete the futures of `drained` if nothing remains to be sent or read, or after `end`."""
        cdef Lane lane
        if not self.outbox.flags & ENDED:
            if (
                self.outbox.waiting.size()
                or self.controls.waiting.size()
                or self.outbox.offers.messages
                or self.outbox.offers.ending
                or self.outbox.flags & SWITCHING
            ):
                return 0
            for lane in self.outbox.stripes.lanes:
                if lane.rail.outstanding:
                    return 0
        waiters, self.drain_waiters = self.drain_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        return 0

    def end(self, error: BaseException):
        """End all waiting operations because of `error`. Arrived messages can still be received.

        The operations fail, except that the futures of `drained` complete without an error.
        """
        if self.outbox.flags & ENDED:
            return
        self.outbox.end(error)
        self.receives.end()
        self.controls.end(error)
        self.inbox.end(error)
        self.wake_if_drained()

    def close(self):
        """Release the memory after the queue pairs have been destroyed."""
        cdef int code
        if not self.outbox.flags & ENDED:  # the loop was closed, and its waiters with it
            self.outbox.end_error = self.inbox.end_error = ConnectionClosedError(
                "the event loop of the connection was closed"
            )
            self.outbox.flags |= ENDED
            self.receives.end()
        release_all(self.outbox.lead_rail.take_receives())
        code = self.outbox.close()
        for block, _, _ in self.early_frames:
            (<PoolBlock> block).end_lease()
        self.early_frames.clear()
        self.controls.release_spare_blocks()
        # Break the reference cycles between the parts, so that reference counting frees them.
        self.owner.on_early = self.failover = None
        self.receives.block_source = self.receives.controls = None
        self.inbox.fetcher.block_source = self.inbox.fetcher.inbox = None
        self.receives = self.inbox = self.controls.session = None
        if code:
            raise failure("ibv_dereg_mr", code)


@cython.no_gc_clear
cdef class RailFrames(FrameHandler):
    """The frame handler of a rail that is not the lead. It accepts only the peer's Resume.

    `Session.prepare_rail` installs it, and `Session.continue_on_lead` replaces it.
    """

    cdef Session session
    cdef SendQueue rail

    def __init__(self, Session session not None, SendQueue rail not None):
        self.session, self.rail = session, rail

    cdef int received(self, PoolBlock block, uint32_t length) except -1:
        cdef Session session = self.session
        cdef bytes frame = PyBytes_FromStringAndSize(<const char *> block.bytes(), length)
        cdef bint expected = self.rail.expects_resume
        block.end_lease()
        self.rail.expects_resume = False
        if session.outbox.flags & ENDED or session.peer_has_left:
            return 0
        try:
            if session.outbox.sealing is not None:
                frame = session.outbox.sealing.open_resume(self.rail.number, frame)
            if not expected or frame[:HEADER] != RESUME_HEADER:
                raise ProtocolError(f"the peer sent a frame on rail {self.rail.number}, which is not the lead")
            message = protocol.decode(frame[HEADER:])
            if not isinstance(message, protocol.Resume) or message.rail != self.rail.number:
                raise ProtocolError(f"the peer sent a {type(message).__name__} instead of a Resume on a rail")
            # A Resume's `request_id` is its number.
            session.failover.on_peer_resume(self.rail, message.request_id, message.frames)
        except ProtocolError as error:
            session.owner.violated(error)
        return 0

    cdef int received_write(self, PoolBlock block, uint32_t length, uint32_t imm) except -1:
        block.end_lease()
        self.session.owner.violated(ProtocolError("the peer wrote with immediate data on a rail"))
        return 0

    cdef int flush(self) except -1:
        return self.session.flush()

    cdef bint begin_failover(
        self, WorkQueues rail, bint to_other_device=TO_ANY_DEVICE
    ) except -1:
        return self.session.begin_failover(rail, to_other_device)


RESUME_HEADER = bytes([CONTROL]) + bytes(HEADER - 1)
BEFORE_THE_KEY = "the peer sent a message before it has authenticated with the key"
BEFORE_ADMISSION = "the peer sent a message before its connection was accepted"
WRITTEN_IN_CLEAR = "the peer wrote to memory, which is not allowed on an encrypted connection"
