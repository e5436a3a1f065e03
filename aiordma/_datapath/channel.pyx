# The two-sided messages of one connection: any size, in order, within what both ends have room for.
#
# - A send needs a receive that the peer has posted: `Credits` counts them.  What has no credit waits here,
#   first come first served.
# - A message that fits the peer's next receive is *eager*: copied into a frame, or sent from where it
#   lies.  A longer one is a *rendezvous*: the peer reads it with RDMA when it has room, and acknowledges.
# - A frame costs both ends the same whatever is in it.  So a short message that is sent while a frame
#   with messages is under way waits until all tasks of this iteration of the loop have run, and goes in
#   a *bundle*; a message with nothing before it goes at once.
# - Memory under a posted request must stay: an eager frame in its block until its completion, a
#   rendezvous registered (read-only for the peer) until the acknowledgement.

from asyncio import _get_running_loop as get_running_loop

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint16_t, uintptr_t
from libc.string cimport memcpy, memset

cimport cython

from .controls cimport Controls
from .frames cimport (
    BUNDLE,
    CONTROL,
    CREDIT,
    DATA,
    ENTRY_HAS_IMM,
    HAS_IMM,
    HEADER,
    MAX_BUNDLE,
    PeerRoom,
    RNDV_ACK,
    RNDV_KEYS,
    RNDV_RTS,
    BundleEntry,
    FrameHeader,
    RendezvousAck,
    RendezvousPiece,
    RendezvousRequest,
    bundled_size,
    carries_message,
    frame_name,
    validate_bundle,
    write_header,
)
from .futures cimport DONE, FAILED, PENDING, complete_waiter
from .inbox cimport MessageIterator, PendingRendezvous, RecvOperation, pending_rendezvous
from .message cimport Message, new_message
from .one_sided cimport WRChain
from .rail cimport CONTROL_ENTRIES
from .rendezvous cimport Offers, close_message, open_message, rendezvous_size, write_request
from .sealing cimport PAYLOAD_SEAL, TAG
from .sends cimport (
    COPIED_BELOW,
    MAX_PIECES,
    Piece,
    SendOperation,
    new_frame,
    new_rendezvous_frame,
)
from .stripes cimport Stripes, order
from .work_queue cimport FOR_CREDITS, FOR_NOTHING, FOR_SEND_QUEUE

from aiordma._core import arguments, protocol
from aiordma._native import failure
from aiordma.verbs._memory.buffers import bytes_of
from aiordma.errors import (
    ConnectionClosedError,
    MessageTooLongError,
    ProtocolError,
    RDMAError,
)

cdef extern from "<endian.h>" nogil:
    uint32_t htole32(uint32_t)
    uint16_t le16toh(uint16_t)
    uint32_t le32toh(uint32_t)


cdef enum:
    BUNDLED_BELOW = 16 << 10  # bytes: a longer message gains nothing by sharing a frame


cdef class Counts:
    """The counters of a connection: messages, bytes and transfers."""


cdef class MessageMethods:
    """The methods of a Connection that send and receive messages."""

    cdef MessageChannel channel
    cdef Inbox inbox

    def _set_channel(self, MessageChannel channel not None):
        self.channel, self.inbox = channel, channel.inbox

    def send(
        self, data: Sendable | list[Any] | tuple[Sendable, ...], *, imm: int | None = None
    ) -> Coroutine[Any, Any, None]:
        """Sends one message of any size.

        `data` is any buffer or tensor (`verbs.bytes_of`), registered memory, a received Message, or
        a list or tuple of these: one message with their bytes one behind another, in which long
        buffers are not joined, but sent from where they lie.  `imm` is an unsigned 32-bit number
        that travels beside the data.

        Returns when the peer's device has the message, or, if it is long, when the peer has read
        it.  From then on the peer's program can receive it, also after its own `close`, though not
        after an `abort`; whether it has received it, only a reply of the program tells.  Messages
        arrive in the order of the calls.  Waits while the peer has no room, and while the memory
        pool has none.

        The buffers must not change until the device has finished with them: until it returns, or
        longer if it was cancelled.  Cancelled before the message was posted, nothing is sent;
        after that the message is sent.  MessageTooLongError, before anything is sent, for more
        than `max_message` bytes.
        """
        cdef SendOperation operation = SendOperation.__new__(SendOperation)
        operation.channel, operation.data, operation.imm = self.channel, data, imm
        return operation

    def send_nowait(
        self, data: Sendable | list[Any] | tuple[Sendable, ...], *, imm: int | None = None
    ) -> asyncio.Future[None]:
        """As `send`, for code that cannot await: the message has its place in the order now.

        The future (one for `asyncio.isfuture`, of a class of its own) ends as `send` would; until
        then the buffers must not change.  To cancel it has the effect of cancelling `send`.  It
        gives no backpressure: limit the number of futures that are not done.
        """
        return self.channel.start_message(data, imm)

    def recv(self) -> Coroutine[Any, Any, Message]:
        """The next message, as a view of the memory it arrived in; see `Message`.

        The memory is the caller's until the message is released.  Waits for a message, and for
        memory too where a long message comes and the pool is exhausted; QuotaError for one that
        the pool can never hold, which stays for `recv_into`.  Cancelling loses nothing.

        Messages that arrived before the end of the connection can still be received after it.
        Then it raises ConnectionClosedError, ConnectionBrokenError, or IntegrityError where an
        encrypted message was changed on the way.
        """
        cdef RecvOperation operation = RecvOperation.__new__(RecvOperation)
        operation.inbox = self.inbox
        return operation

    def recv_into(self, memory: Local | AnyMemory) -> Coroutine[Any, Any, Received]:
        """The next message, into memory of the caller's: its length and its immediate data
        (`Received`).

        `memory` is registered memory, or any writable buffer, at least as long as the message.  A
        long message is read straight into it, so this is how a message that is larger than the
        pool is received.  MessageTooLongError for a message that does not fit: it stays for the
        next call.

        Neither read nor change the memory until it returns.  Cancelling does not lose the message,
        but a read that was posted before still writes to the memory, which stays pinned until
        then.  The end of the connection as with `recv`.
        """
        cdef RecvOperation operation
        if memory is None:
            bytes_of(memory)  # it says what is wrong
        operation = RecvOperation.__new__(RecvOperation)
        operation.inbox, operation.memory = self.inbox, memory
        return operation

    def recv_with(
        self, allocate: Callable[[int], Local | AnyMemory]
    ) -> Coroutine[Any, Any, ReceivedMemory]:
        """The next message, into memory that `allocate(length)` returns (`ReceivedMemory`): a numpy
        array, an Arrow buffer, `conn.alloc`...

        `allocate` is called once, with the number of bytes, when the message is this receiver's,
        perhaps before it has arrived.  It must not await.  What it raises is raised here, and the
        message stays for the next call.  A long message is read straight into the memory.  All
        else as with `recv_into`.
        """
        cdef RecvOperation operation
        if not callable(allocate):
            raise TypeError(f"allocate must be callable, not {type(allocate).__name__}")
        operation = RecvOperation.__new__(RecvOperation)
        operation.inbox, operation.allocate, operation.returns_memory = self.inbox, allocate, True
        return operation

    def __aiter__(self) -> AsyncIterator[Message]:
        """Messages as from `recv`, until the connection is closed in order.

        Raises ConnectionBrokenError when the connection ends in another way.
        """
        return MessageIterator(self.inbox)


@cython.no_gc_clear
cdef class MessageChannel(FrameHandler):
    """Sends and receives the messages of one connection."""

    def __init__(
        self, *, SendQueue queue not None, memory: Memory, config: Config,
        owner: Owner,
    ):
        self.queue, self.table = queue, queue.table
        self.config, self.owner = config, owner
        self.pool = memory.pool
        self.source = memory.block_source(self.on_memory, internal=True)
        self.counts = Counts()
        self.max_received = config.max_message
        self.waiting, self.controls = Fifo(), Controls(self, owner)
        self.wait = Wait.__new__(Wait)
        self.offers = Offers(
            self, protocol.MAX_UNANSWERED, min(MAX_PIECES, queue.capacity - CONTROL_ENTRIES - 1)
        )
        self.early_frames, self.drain_waiters = [], []
        self.sizes = ReceiveSizes(config.eager_size, config.max_eager_size)
        self.receives = Receives(queue, self.sizes, memory, config)
        self.inbox = Inbox(self, memory, config.fetch_ahead)

    # ---- bring-up ----

    def seal_with(self, Sealing sealing not None):
        self.sealing = sealing

    def post_receives(self):
        """Posts every receive; before the peer can send, and so before the handshake ends."""
        self.controls.take_spare_blocks(self.pool)
        self.receives.post_all()

    def start(self, peer: Room):
        self.max_message = peer.max_message
        self.room = PeerRoom(
            peer.eager_size,
            max(self.config.eager_size, self.config.max_eager_size),
            0 if self.sealing is None else TAG,
        )
        self.credits = Credits(
            self.config.data_receives,
            self.config.control_receives,
            peer.data_receives,
            peer.control_receives,
        )
        self.started = True
        early_frames, self.early_frames = self.early_frames, []
        for block, length, imm in early_frames:
            if imm is None:
                self.received(block, length)
            else:
                self.received_write(block, length, imm)

    def add_rail(self, SendQueue rail not None):
        """Another rail is up, beside the lead: long messages are striped from now on."""
        if self.stripes is None:
            self.stripes = self.inbox.stripes = Stripes()
            self.stripes.add(self.queue)
        self.stripes.add(rail)

    def remove_rail(self, SendQueue rail not None):
        """A rail is gone, and its queue pair goes after this: others read what it has not."""
        self.stripes.remove(rail)
        self.offers.rail_gone(rail)

    # ---- sending ----

    cdef int check_affinity(self) except -1:
        if not self.table.called_back_here() and get_running_loop() is not self.table.loop:
            self.owner.check_loop()
        return 0

    cdef SendFuture start_message(self, object data, object imm):
        cdef SendFuture message
        if (
            self.closing
            or self.ended_by is not None
            or not self.started
            or not self.table.called_back_here() and get_running_loop() is not self.table.loop
        ):
            self.owner.check()  # says what is wrong
        message = SendFuture.__new__(SendFuture, self.table)
        message.open(data)
        if message.length > self.max_message:
            raise MessageTooLongError(message.length, self.max_message)
        if imm is not None:
            message.imm = imm_of(imm)
            message.has_imm = True
        if self.ended_by is not None:  # `check` does not know: the Connection is gone
            raise self.owner.error_for(self.ended_by)
        message.channel = self
        self.enqueue(message)
        return message

    cdef int enqueue(self, SendFuture message) except -1:
        cdef bint shares, sent
        if self.waiting.size() or self.queue.backlogged or not self.begin_sending():
            return self.append(message)
        try:
            shares = self.frames_under_way and message.length < BUNDLED_BELOW and self.room.fits(message.length)
            sent = not shares and self.send_alone(message)
        finally:
            self.sending = False
        if not sent:
            message.behind = self.queue.latest_backlogged
            self.waiting.appendleft(message)  # what was sent meanwhile goes after it
        if self.waiting.size():
            self.collect_soon()
        return 0

    cdef int write(self, WRChain chain) except -1:
        """Posts a write with immediate data when its turn among the messages comes."""
        if self.ended_by is not None:
            return chain.refused(self.owner.error_for(self.ended_by))
        self.append(chain)
        return self.flush() if self.waiting.size() == 1 else 0

    cdef int append(self, object item) except -1:
        if type(item) is SendFuture:
            (<SendFuture> item).behind = self.queue.latest_backlogged
        else:
            (<WRChain> item).behind = self.queue.latest_backlogged
        self.waiting.append(item)
        return self.note_wait()

    cdef int note_wait(self) except -1:
        """What the first of those that wait waits for; the pool and the backlog count their own."""
        cdef int what = FOR_NOTHING
        if self.started and self.ended_by is None and self.waiting.size():
            if self.credits.data == 0 or self.offers.full():
                what = FOR_CREDITS
            elif not (self.awaits_memory or self.queue.backlogged or self.queue.has_room()):
                what = FOR_SEND_QUEUE
        self.wait.note(what)
        return 0

    cdef int collect_soon(self) except -1:
        if not self.collecting:
            self.table.loop.call_soon(self.collect)
            self.collecting = True
        return 0

    def collect(self):
        self.collecting = False
        self.flush()

    cdef bint withdraw(self, object item) except -1:
        """Drops a message or write that waits for its turn; False: it has been posted."""
        if not self.waiting.remove(item):
            return False
        if type(item) is SendFuture:
            (<SendFuture> item).close_payload()
        else:
            (<WRChain> item).free_memory()
        self.note_wait()
        self.check_drained()
        return True

    # One step, also where every line is traced: nothing else is sent between the look and the mark.
    @cython.profile(False)
    @cython.linetrace(False)
    cdef bint begin_sending(self) noexcept:
        """Whether something may be sent now; then it is being sent, until the caller says otherwise."""
        if (
            not self.started
            or self.ended_by is not None
            or self.credits.data == 0
            or self.offers.full()
            or self.sending
            or self.awaits_memory
            or not self.queue.has_room()
            or self.queue.failed
        ):
            return False
        self.sending = True
        return True

    cdef PoolBlock frame_block(self, uint64_t size):
        """A block for a frame; None: the pool is exhausted, and `on_memory` will be called."""
        cdef PoolBlock block = self.pool.take_fast(size)
        if block is None:
            block = self.source.block(size)
            if block is None:
                self.awaits_memory = True
        return block

    def on_memory(self):
        self.awaits_memory = False
        self.flush()

    cdef bint send_alone(self, SendFuture message) except -1:
        """Sends one message in a frame of its own; False when there is no memory for it now."""
        try:
            if self.room.fits(message.length):
                return self.send_eager(message)
            return self.send_rendezvous(message)
        except (RDMAError, OSError, ValueError, BufferError, MemoryError) as error:
            message.close_payload()  # nothing of it was posted
            message.settle(FAILED, error)
        return True

    cdef bint send_eager(self, SendFuture message) except -1:
        # Its last piece is sent from where it lies if that is quicker than a copy.
        cdef Piece in_place = message.last()
        if not self.pool.local_dma_lkey or in_place.length < COPIED_BELOW or self.room.tag_size:
            in_place = None
        cdef uint64_t length = HEADER + message.length - (
            0 if in_place is None else in_place.length
        )
        cdef PoolBlock block = self.frame_block(length + self.room.tag_size)
        cdef Frame frame
        if block is None:
            return False
        frame = new_frame(block, <uint32_t> length)
        frame.channel, frame.message = self, message
        message.copy_to(block.bytes() + HEADER, in_place)
        if in_place is not None:
            frame.second.addr = <uintptr_t> in_place.bytes
            frame.second.length = <uint32_t> in_place.length
            frame.second.lkey = self.pool.local_dma_lkey
        self.frames_under_way += 1
        self.post_frame(frame, DATA, message.has_imm, message.imm)
        if in_place is None:
            message.close_payload()  # not before: the end of a buffer may call what sends the next one
        return True

    cdef bint send_bundle(self, list messages, uint64_t size) except -1:
        cdef PoolBlock block
        cdef SendFuture message
        cdef BundleEntry *entry
        cdef unsigned char *bytes
        cdef uint64_t whole
        cdef Frame frame
        try:
            block = self.frame_block(size + self.room.tag_size)
        except (RDMAError, OSError, MemoryError) as error:
            for message in messages:
                message.close_payload()
                message.settle(FAILED, error)
            return True
        if block is None:
            return False
        bytes = block.bytes() + HEADER
        for message in messages:
            whole = bundled_size(message.length)
            entry = <BundleEntry *> bytes
            entry.length = htole32(
                <uint32_t> message.length | (ENTRY_HAS_IMM if message.has_imm else 0)
            )
            entry.imm = htole32(message.imm)
            bytes += sizeof(BundleEntry)
            message.copy_to(bytes, None)
            memset(bytes + message.length, 0, whole - sizeof(BundleEntry) - message.length)
            bytes += whole - sizeof(BundleEntry)
        frame = new_frame(block, <uint32_t> size)
        frame.channel, frame.messages = self, messages
        self.frames_under_way += 1
        self.post_frame(frame, BUNDLE, False, 0)
        for message in messages:
            message.close_payload()
        return True

    cdef bint send_rendezvous(self, SendFuture message) except -1:
        cdef PoolBlock block
        cdef uint32_t length
        cdef Frame frame
        cdef bytes seal = b""
        if message.first.next is not None and self.sealing is None:
            self.offers.join_pieces(message, self.room.size)
        # A bind for each piece; sealed they are one.
        cdef uint32_t entries = 1 + (message.count() if self.sealing is None else 1)
        if not self.queue.has_room_for(entries):
            return False
        if self.sealing is None:
            length = rendezvous_size(message)
        else:
            length = HEADER + sizeof(RendezvousRequest) + sizeof(RendezvousPiece) + PAYLOAD_SEAL
        block = self.frame_block(length + self.room.tag_size)
        if block is None:
            return False
        try:
            if self.sealing is not None:
                seal = self.seal_message(message)
            open_message(message, self.queue.keys)
            if not self.queue.has_room_for(entries) and not self.queue.failed:
                close_message(message, 0)
                raise RDMAError(
                    "a finalizer that ran while this message was prepared filled the send queue, and "
                    "the message was not sent: send it again"
                )
        except BaseException:
            block.end_lease()
            raise
        message.request_id = self.controls.new_request_id()
        self.offers.messages[message.request_id] = message
        if self.ended_by is not None:  # by the cycle collector, above: `end` has not seen the message
            message.settle(FAILED, self.send_error(message))
        write_request(block.bytes() + HEADER, message, seal)
        frame = new_rendezvous_frame(block, length, message)
        frame.channel = self
        self.frames_under_way += 1
        self.post_frame(frame, RNDV_RTS, message.has_imm, message.imm)
        if self.stripes is not None:
            self.offers.open_elsewhere(message, order(self.stripes.lanes, message.length)[1:])
        return True

    cdef object seal_message(self, SendFuture message):
        """Puts a sealed copy in the place of the message's bytes, and returns its key and tag.

        The copy is in the pool where that has some to spare.  Were it to wait for the pool, the
        sealed messages of two sides could keep each other from being read.
        """
        cdef Piece copy = Piece.__new__(Piece)
        cdef PoolBlock block
        try:
            (<object> self.pool)._require_spare(message.length)
            block = (<object> self.pool)._block(message.length)
        except (RDMAError, OSError):
            copy.open(bytearray(message.length))
        else:
            block.pins += 1
            block.end_lease()
            copy.source, copy.bytes, copy.length = block, block.bytes(), message.length
        seal = self.sealing.seal_payload(message, <unsigned char *> copy.bytes)
        message.close_payload()
        message.first = copy
        return seal

    cdef int rendezvous_over(self, uint32_t request_id, uint32_t status) except -1:
        cdef SendFuture message = self.offers.messages.pop(request_id, None)
        if message is None:
            raise ProtocolError("the peer says it has read a message that was not offered")
        if message.openings and self.offers.end_elsewhere(message, status, self.invalidated_key):
            return 0
        return self.finish_rendezvous(message, status, self.invalidated_key)

    cdef int finish_rendezvous(
        self, SendFuture message, uint32_t status, uint32_t invalidated_key
    ) except -1:
        """No rail of the peer can read the message any more."""
        cdef int code = close_message(message, invalidated_key)
        if status:
            text = f"send of {message.length} bytes to {self.queue.peer}"
            message.settle(
                FAILED, RDMAError(f"{text}: the peer could not take the message (code {status})")
            )
        else:
            self.count_delivered(message)
            message.settle(DONE, None)
        if code:
            raise failure("ibv_dereg_mr", code)
        return 0

    cdef bint send_first(self) except -1:
        """Sends the first waiting item, with as many messages as fit into one frame; False: no more
        can be sent now."""
        cdef list messages = []
        cdef SendFuture message
        cdef WRChain write
        cdef uint64_t size = HEADER, longer
        cdef object item
        while len(messages) < MAX_BUNDLE and self.waiting.size():
            item = self.waiting.first()
            if type(item) is not SendFuture:
                if messages:
                    break
                write = <WRChain> item
                if not self.queue.has_posted(write.behind):
                    return False
                self.waiting.popleft()
                error = write.refusal()
                if write.waiter.state != PENDING:  # an earlier part has failed
                    write.waiter = None  # which refers to this
                    write.free_memory()
                elif error is not None:
                    write.refused(error)
                else:
                    self.credits.data -= 1
                    self.room.count_sent()
                    self.queue.post_checked(write)
                return True
            message = <SendFuture> item
            if not self.queue.has_posted(message.behind):
                break
            if message.state == PENDING:
                longer = size + bundled_size(message.length)
                if messages and longer > self.room.size:
                    break
                size = longer
                messages.append(message)
            self.waiting.popleft()
        if not messages:
            return False
        message = <SendFuture> messages[0]
        if self.send_alone(message) if len(messages) == 1 else self.send_bundle(messages, size):
            return True
        for message in reversed(messages):
            self.waiting.appendleft(message)
        return False

    cdef int flush(self) except -1:
        cdef bint sent = True
        if not self.started or self.ended_by is not None:
            return 0
        if self.controls.waiting.size():
            if self.credits.may_send_control():
                # Before the answers, which else would take every credit that comes.
                self.receives.change_if_due()
            self.controls.flush()
        if self.offers.unsent:
            self.offers.send_keys()
        while sent and self.waiting.size() and self.begin_sending():
            try:
                sent = self.send_first()
            finally:
                self.sending = False
        if self.waiting.size() or self.wait.what:
            self.note_wait()
        if self.credits.credit_frame_due() and self.queue.free and self.ended_by is None:
            self.controls.send_frame(CREDIT, b"", None)
        if self.drain_waiters:
            self.check_drained()
        return 0

    cdef int post_frame(self, Frame frame, int kind, bint has_imm, uint32_t imm) except -1:
        write_header(<FrameHeader *> frame.block.bytes(), self.credits, kind, has_imm, imm)
        if self.sealing is not None:
            frame.length = self.sealing.seal(frame.block.bytes(), frame.length)
            if not frame.length:
                return frame.free_memory()
        self.room.count_sent()
        return self.queue.post_checked(frame)

    cdef int acknowledge(self, PendingRendezvous pending) except -1:
        if self.ended_by is not None:
            return 0
        return self.controls.acknowledge(
            pending.request_id, pending.window_key if self.pool.has_windows else 0
        )

    cdef bint tell_size(self, uint64_t first, uint32_t size) except -1:
        return self.controls.send_now(protocol.ReceiveSize(0, first, size))

    # ---- receiving ----

    cdef int reposted(self, uint32_t count) except -1:
        self.credits.reposted_data(count)
        return self.flush()

    cdef bint takes_now(self, PoolBlock block, uint32_t length, object imm) except -1:
        """Whether an arrived frame is handled now; else it is kept for `start`, or dropped."""
        if not self.started:
            self.early_frames.append((block, length, imm))  # the peer was quicker than our handshake
            self.owner.early()
            return False
        if self.ended_by is not None or self.peer_has_left:
            block.end_lease()
            return False
        return True

    cdef int received(self, PoolBlock block, uint32_t length) except -1:
        """A frame has arrived in `block`, of which this takes over the lease."""
        if not self.takes_now(block, length, None):
            return 0
        try:
            self.take_frame(block, length)
        except ProtocolError as error:
            self.owner.violated(error)
        return self.flush()

    cdef int take_frame(self, PoolBlock block, uint32_t length) except -1:
        cdef const FrameHeader *header = <const FrameHeader *> block.bytes()
        cdef int kind
        cdef bint has_imm
        cdef uint32_t imm, count = 1, arrived = length
        cdef Message message
        try:
            if self.sealing is not None:
                length = self.sealing.open(block.bytes(), length)
            kind, has_imm = header.kind & ~HAS_IMM, header.kind & HAS_IMM
            imm = le32toh(header.imm)
            if length < HEADER:
                raise ProtocolError(
                    "the peer sent a message shorter than its header of 8 bytes"
                )
            if not DATA <= kind <= RNDV_KEYS or (has_imm and kind != DATA and kind != RNDV_RTS):
                raise ProtocolError(f"the peer sent a frame of unknown kind {header.kind:#04x}")
            if imm and not has_imm:
                raise ProtocolError(
                    f"the peer sent a {frame_name(kind)} frame with stray immediate data"
                )
            self.credits.received(kind, header.control, le16toh(header.data))
            if (self.awaiting_auth or self.awaiting_admission) and (
                carries_message(kind) or kind >= RNDV_ACK
            ):
                raise ProtocolError(self.too_early())
            if kind == BUNDLE:
                count = validate_bundle(block.bytes(), length)
        except ProtocolError:
            block.end_lease()
            raise
        if kind == RNDV_RTS:
            return self.take_rendezvous(block, length)
        self.sizes.used(arrived)
        if kind == DATA:
            message = new_message(block, HEADER, length - HEADER)
            message.number, message.has_imm = imm, has_imm
            return self.inbox.arrived(message)
        if kind == BUNDLE:
            return self.take_bundle(block, count)
        return self.take_control(block, kind, length)

    cdef int take_bundle(self, PoolBlock block, uint32_t count) except -1:
        cdef const BundleEntry *entry
        cdef uint32_t offset = HEADER, i, size
        cdef Message message
        block.leases += count - 1
        for i in range(count):
            entry = <const BundleEntry *> (block.bytes() + offset)
            size = le32toh(entry.length) & ~ENTRY_HAS_IMM
            message = new_message(block, offset + sizeof(BundleEntry), size)
            message.has_imm = le32toh(entry.length) & ENTRY_HAS_IMM != 0
            message.number = le32toh(entry.imm)
            message.last = i + 1 == count
            self.inbox.arrived(message)
            offset += <uint32_t> bundled_size(size)
        return 0

    cdef int take_rendezvous(self, PoolBlock block, uint32_t length) except -1:
        cdef PendingRendezvous pending
        try:
            pending = pending_rendezvous(
                block.bytes(), length, self.max_received, self.sealing is not None
            )
        finally:
            block.end_lease()
        self.sizes.used(HEADER + pending.length + self.room.tag_size)
        self.inbox.rendezvous += 1
        self.inbox.unread.append(pending)
        self.inbox.incoming.append(pending)
        return self.inbox.fetch_ahead()

    cdef int take_control(self, PoolBlock block, int kind, uint32_t length) except -1:
        cdef bytes content = PyBytes_FromStringAndSize(
            <const char *> block.bytes() + HEADER, length - HEADER
        )
        cdef const RendezvousAck *ack
        self.receives.repeat(block)
        self.credits.reposted_control()
        if kind == CONTROL:
            message = protocol.decode(content)
            if self.awaiting_auth and type(message) not in protocol.BEFORE_PROOF:
                raise ProtocolError(
                    f"the peer sent a {type(message).__name__} before it has proved that it has "
                    f"the key"
                )
            if isinstance(message, protocol.ReceiveSize):
                self.room.announced(message.first, message.size)
            else:
                self.owner.control(message)
        elif kind == RNDV_ACK:
            if len(content) != sizeof(RendezvousAck):
                raise ProtocolError(f"the peer sent an acknowledgement of {length} bytes")
            ack = <const RendezvousAck *> PyBytes_AS_STRING(content)
            self.rendezvous_over(le32toh(ack.request_id), le32toh(ack.status))
        elif kind == RNDV_KEYS:
            if self.stripes is None:
                raise ProtocolError("the peer sent keys of a rail, and this side has one rail alone")
            self.inbox.take_keys(content)
        return 0

    cdef int received_write(self, PoolBlock block, uint32_t length, uint32_t imm) except -1:
        """The peer has written to memory of this side, and says so with immediate data."""
        cdef Message message
        if not self.takes_now(block, length, imm):
            return 0
        try:
            if self.sealing is not None and not self.sealing.memory_in_clear:
                raise ProtocolError(WRITTEN_IN_CLEAR)
            self.credits.received(DATA, 0, 0)
            if self.awaiting_auth or self.awaiting_admission:
                raise ProtocolError(self.too_early())
        except ProtocolError as error:
            block.end_lease()
            self.owner.violated(error)
            return 0
        self.sizes.used(0)
        message = new_message(block, 0, 0)
        message.number, message.has_imm = imm, True
        message.bytes_written, message.has_written = length, True
        self.inbox.arrived(message)
        return self.flush()

    cdef str too_early(self):
        return BEFORE_THE_KEY if self.awaiting_auth else BEFORE_ADMISSION

    # ---- statistics ----

    def figures(self) -> dict[str, int]:
        """Counts of what is queued and under way, for diagnosis.  Any thread may ask."""
        cdef Inbox inbox = self.inbox      # `close` lets go of them
        cdef Receives receives = self.receives
        self.wait.settle()
        self.queue.wait.settle()
        figures = {
            "messages_waiting": self.waiting.size(),
            "controls_waiting": self.controls.waiting.size(),
            "credits": self.credits.data,
            "frames_under_way": self.frames_under_way,
            "rendezvous": len(self.offers.messages),
        }
        if inbox is not None:  # it is not closed
            figures["arrived"] = inbox.incoming.size()
            figures["unread"] = inbox.unread.size()
            figures["read_ahead"] = inbox.bytes_ahead
            figures["receivers"] = inbox.receivers.size()
            figures["receive_size"] = self.sizes.size
            figures["receives"] = receives.posted - self.sizes.used_up
            figures["larger_blocks"] = len(receives.larger)
            figures["spare_blocks"] = len(self.controls.spare_blocks)
        return figures

    def end_iteration(self):
        """Ends each `async for` over the messages; nothing else, so that the work under way goes on."""
        if self.inbox is not None:  # it is not closed
            self.inbox.end_iteration()

    def count_in(self, Counts counts not None):
        self.counts = counts

    cdef void count_delivered(self, SendFuture message) noexcept:
        self.counts.messages_sent += 1
        self.counts.bytes_sent += message.length

    cdef void count_received(self, uint64_t length) noexcept:
        self.counts.messages_received += 1
        self.counts.bytes_received += length

    # ---- the end ----

    @property
    def ended(self) -> bool:
        return self.ended_by is not None

    def drained(self) -> asyncio.Future[None]:
        """A future for the moment when nothing waits to be sent or to be read by the peer."""
        future = self.table.loop.create_future()
        self.drain_waiters.append(future)
        self.check_drained()
        return future

    cdef int check_drained(self) except -1:
        if self.ended_by is None and (
            self.waiting.size()
            or self.controls.waiting.size()
            or self.offers.messages
            or self.offers.ending
            or self.queue.outstanding
        ):
            return 0
        waiters, self.drain_waiters = self.drain_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        return 0

    def end(self, error: BaseException):
        """Ends the messages: those that are here can still be taken, every waiter gets `error`."""
        cdef SendFuture message
        if self.ended_by is not None:
            return
        self.ended_by = error
        self.note_wait()
        self.receives.end()
        waiting, controls = self.waiting.take_all(), self.controls.waiting.take_all()
        for item in waiting:
            if type(item) is SendFuture:
                (<SendFuture> item).close_payload()
                (<SendFuture> item).settle(FAILED, self.send_error(<SendFuture> item))
            else:
                text = (<WRChain> item).text(self.queue.peer)
                (<WRChain> item).refused(self.owner.error_for(error, text))
        for _, _, future, _, _ in controls:
            if future is not None:
                complete_waiter(future, self.owner.error_for(error))
        for message in self.offers.messages.values():
            message.settle(FAILED, self.send_error(message))
        for message in self.offers.ending:  # the peer has had its say of them
            message.settle(DONE, None)
        self.inbox.end(error)
        self.check_drained()

    cdef object send_error(self, SendFuture message):
        return self.owner.error_for(
            self.ended_by, f"send of {message.length} bytes to {self.queue.peer}"
        )

    def close(self):
        """The queue pair is destroyed: nothing touches the memory any more."""
        cdef int code = self.offers.close()
        for item in self.waiting.take_all():  # without `end`, as below
            if type(item) is not SendFuture:
                (<WRChain> item).waiter = None  # which refers to it
                (<WRChain> item).free_memory()
        if self.ended_by is None:  # without `end`: the loop was closed, and its waiters with it
            self.ended_by = self.inbox.ended = ConnectionClosedError("its event loop was closed")
            self.receives.end()
        for block, _, _ in self.early_frames:
            (<PoolBlock> block).end_lease()
        self.early_frames.clear()
        self.controls.release_spare_blocks()
        # The parts let go of each other, so that they need no cycle collector.
        self.owner.on_early = None
        self.receives.source = self.source = self.inbox.source = None
        self.receives = self.inbox = self.controls.channel = None
        if code:
            raise failure("ibv_dereg_mr", code)


cdef uint32_t imm_of(object imm) except? 0xFFFFFFFF:
    return arguments.integer("imm", imm, 0, arguments.U32_MAX)


BEFORE_THE_KEY = "the peer sent a message before it has proved that it has the key"
BEFORE_ADMISSION = "the peer sent a message before its connection was accepted"
WRITTEN_IN_CLEAR = "the peer wrote to memory, which an encrypted connection does not allow"
