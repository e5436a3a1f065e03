# Sends the messages of a session in order, as flow control permits.
#
# - Each send consumes a receive that the peer has posted. `Credits` counts these receives. Messages
#   without a credit wait here in call order.
# - A message that fits into the peer's next receive is *eager*. It is copied into a frame or sent
#   directly from the caller's memory. A longer message is a *rendezvous*: the peer reads it with
#   RDMA once it has room, and then acknowledges it.
# - A frame costs the same for one message as for many. While a frame with messages is in flight, a
#   short message therefore waits until all tasks of the current loop iteration have run. The
#   messages collected by then are sent as a *bundle*. Otherwise, a message is sent immediately.
# - Memory must stay valid while a posted request uses it. The memory of an eager frame is released
#   at its completion. The peer has read-only access to the memory of a rendezvous message until it
#   acknowledges the message.

from libc.stdint cimport uintptr_t
from libc.string cimport memset

cimport cython

from .frames cimport (
    BUNDLE,
    DATA,
    ENTRY_HAS_IMM,
    HEADER,
    MAX_BUNDLE,
    RNDV_RTS,
    WRITTEN,
    BundleEntry,
    FrameHeader,
    RendezvousPiece,
    RendezvousRequest,
    bundled_size,
    carries_message,
    htole32,
    write_header,
)
from .futures cimport DONE, FAILED, PENDING
from .keys cimport NOT_INVALIDATED
from .message cimport Counts
from .one_sided cimport TransferFuture
from .rail cimport CONTROL_ENTRIES
from .rendezvous cimport close_message, open_keys, rendezvous_size, write_request
from .sealing cimport PAYLOAD_SEAL
from .sends cimport (
    COPIED_BELOW,
    MAX_PIECES,
    MessageOwner,
    Piece,
    init_frame,
    imm_of,
    new_frame,
    new_rendezvous_frame,
)
from .stripes cimport select_lanes
from .work_queue cimport (
    WAIT_CREDITS,
    WAIT_NONE,
    WAIT_SEND_QUEUE,
    IBV_WR_RDMA_WRITE,
    WorkRequest,
)

from aiordma._core import protocol
from aiordma._native import failure
from aiordma.errors import BufferStateError, BusyError, MessageTooLongError, ProtocolError, RDMAError


cdef enum:
    BUNDLED_BELOW = 16 << 10  # bytes; sharing a frame does not help longer messages


@cython.no_gc_clear
@cython.final
cdef class WrittenFrame(Frame):
    """The frame that reports a write with immediate data, and completes the write's `waiter`."""

    cdef int mark_arrived(self) except -1:
        write, self.waiter = self.waiter, None
        return 0 if write is None else (<TransferFuture> write).on_part_over()

    cdef bint reports_undone_write(self) noexcept:
        """Return whether the write was not executed, so that the peer must not get this frame."""
        return self.waiter is not None and (<TransferFuture> self.waiter).has_undone_part

    cdef str text(self, str peer):
        return f"message of a write to {peer}"


@cython.no_gc_clear
@cython.final
cdef class Outbox(Sender):
    """The sender of a connection's messages, which uses the lead."""

    def __init__(self, SendQueue lead not None, FrameHandler session not None, memory: Memory,
                 owner: Owner):
        self.lead_rail, self.session, self.owner = lead, session, owner
        self.counts = Counts()
        self.pool = memory.pool
        self.block_source = memory.block_source(self.on_memory, internal=True)
        self.waiting, self.wait = Fifo(), Wait.__new__(Wait, lead.table.clock)
        self.offers = Offers(
            session, protocol.MAX_UNANSWERED, min(MAX_PIECES, lead.capacity - CONTROL_ENTRIES - 1)
        )
        self.flags, self.unfinished_work, self.journal = NOT_STARTED, [], Journal()
        self.batches = set()
        self.stripes = lead.stripes = Stripes()
        self.stripes.lead_changed(lead)
        self.stripes.rail_up(lead)

    cdef object ownership_error(self, MessageOwner owner, str attempt):
        attempt = f"{attempt} the connection with {self.owner.peer_name}"
        if self.message_owner is not None:
            user = self.message_owner.name
        elif owner is None:
            user = "a task that waits in recv()"
        else:
            return BufferStateError(f"{attempt}: {owner.name} has closed its claim on the messages")
        return BusyError(f"{attempt}: it is in use by {user}; use another connection")

    cdef SendFuture start_message(self, object data, object imm):
        cdef SendFuture message
        require_open(self)
        message = SendFuture.__new__(SendFuture, self.lead_rail.table.wakeups)
        message.open(data)
        if message.length > self.peer_room.max_message:
            raise MessageTooLongError(message.length, self.peer_room.max_message)
        if imm is not None:
            message.imm = imm_of(imm)
            message.has_imm = True
        if self.end_error is not None:  # the owner may be gone, so that `require_open` misses it
            raise self.owner.error_for(self.end_error)
        message.sender = self
        enqueue(self, message)
        return message

    cdef int write(self, WorkRequest chain) except -1:
        if self.end_error is not None:
            return chain.end_unposted(self.owner.error_for(self.end_error))
        (<WRChain> chain).backlog_position = self.lead_rail.backlog.latest
        self.waiting.append(chain)
        note_wait(self)
        # Behind other items, the chain has to wait for them anyway.
        return self.session.flush() if self.waiting.size() == 1 else 0

    def collect(self):
        """Send the short messages that the tasks of this loop iteration have queued, as bundles."""
        continue_sending(self, COLLECTING)

    def on_memory(self):
        """Continue to send when the pool has a block for the next frame."""
        continue_sending(self, AWAITS_MEMORY)

    cdef bint withdraw(self, object item) except -1:
        if not self.waiting.remove(item):
            return False
        if type(item) is SendFuture:
            (<SendFuture> item).close_payload()
        else:
            (<WRChain> item).free_memory()
        note_wait(self)
        self.session.flush()
        return True

    # Disable tracing. Otherwise, a trace function could send something after the check, but before
    # the flag is set.
    @cython.profile(False)
    @cython.linetrace(False)
    cdef bint begin_sending(self) noexcept:
        """Set SENDING and return True if something may be sent now. The caller clears SENDING."""
        if (
            self.flags & BLOCKED
            or self.credits.data == 0
            or self.offers.is_full()
            or not self.lead_rail.has_room()
            or self.lead_rail.failed
        ):
            return False
        self.flags |= SENDING
        return True

    cdef int on_rendezvous_ack(
        self, uint32_t request_id, uint32_t status, uint32_t invalidated_key
    ) except -1:
        cdef SendFuture message = self.offers.messages.pop(request_id, None)
        if message is None:
            raise ProtocolError("the peer acknowledged a message that was not offered")
        if message.openings and self.offers.end_elsewhere(message, status, invalidated_key):
            return 0
        return self.finish(message, status, invalidated_key)

    cdef int finish(self, SendFuture message, uint32_t status, uint32_t invalidated_key) except -1:
        """Complete a rendezvous message after its acknowledgement, and end the peer's access."""
        cdef int code = close_message(message, invalidated_key)
        if status:
            text = f"send of {message.length} bytes to {self.lead_rail.peer}"
            message.settle(
                FAILED, RDMAError(f"{text}: the peer could not receive the message (code {status})")
            )
        else:
            self.delivered(message)
            message.settle(DONE, None)
        if code:
            raise failure("ibv_dereg_mr", code)
        return 0

    # ---- another lead ----

    def lead_changed(self, SendQueue lead not None) -> None:
        """Move all work to the new lead.

        Unfinished work of the previous lead waits for the peer's Resume.
        """
        cdef SendQueue previous_lead = self.lead_rail
        cdef WRChain chain
        cdef bint was_waiting
        cdef list works = take_unfinished_work(self)
        self.lead_rail, self.pool, lead.stripes = lead, lead.driver.pool, self.stripes
        for work in (*works, *previous_lead.backlog.works):
            if isinstance(work, WRChain) and not (<WRChain> work).move(lead):
                chain = <WRChain> work
                chain.kept = False
                was_waiting = previous_lead.backlog.remove(chain)
                # The outcome is known if the whole operation was still in the backlog.
                if was_waiting and (chain.waiter is None or chain.waiter.parts is None):
                    chain.end_unposted(not_executed_error(self, chain))
                else:
                    chain.end_unposted(previous_lead.error_of(chain))
            elif work not in previous_lead.backlog.works:
                self.unfinished_work.append(work)
        lead.backlog.held = True
        lead.backlog.take_over(previous_lead.backlog)
        for item in self.waiting.all():
            if type(item) is not SendFuture and not (<WRChain> item).move(lead):
                self.waiting.remove(item)
                (<WRChain> item).end_unposted(not_executed_error(self, <WRChain> item))
        for batch in tuple(self.batches):
            if not (<WRChain> batch).move(lead):
                self.batches.remove(batch)

    def remove_batch(self, WRChain batch not None) -> Exception | None:
        """Stop moving a batch to each new lead, because all its operations are collected.

        Returns the error if the batch could not be moved to the current lead, or None.
        """
        if batch in self.batches:
            self.batches.remove(batch)
            return None
        return BufferStateError(
            "the batch was not executed: the connection has moved to a rail that does not have a key for "
            "the peer's memory yet, or cannot register local memory; try again"
        )

    cdef int repost_missing(self, uint64_t frames) except -1:
        """Complete the work that has arrived at the peer, and post the rest again.

        `frames` is the number of frames that the peer has received. Writes posted before one of
        these frames have arrived too. Returns the number of frames and requests posted again.
        """
        cdef WRChain chain
        cdef Frame frame
        cdef list works = self.unfinished_work, missing = self.journal.missing_frames(frames)
        cdef Py_ssize_t i, count, last_arrived = -1
        for i, work in enumerate(works):
            if isinstance(work, Frame) and (<Frame> work).number < frames:
                last_arrived = i
        # The device completed these frames, but the peer did not receive them. They were posted
        # before all other work.
        self.unfinished_work = [frame for frame in missing if frame not in works]
        self.flags |= RESUMED
        for i, work in enumerate(works):
            if isinstance(work, Frame):
                if (<Frame> work).number >= frames:
                    self.unfinished_work.append(work)
                continue
            chain = <WRChain> work
            if i > last_arrived or not chain.count_of(IBV_WR_RDMA_WRITE):
                self.unfinished_work.append(chain)
                continue
            if chain.count_of(IBV_WR_RDMA_WRITE) == chain.request_count:
                chain.kept = False
                chain.on_completion(0)
            else:  # its writes must not be repeated
                chain.drop_writes()
                self.unfinished_work.append(chain)
        count = len(self.unfinished_work)
        self.post_again()
        return count

    cdef int post_again(self) except -1:
        """Post missing work again while the rail has room. New work waits until this is done."""
        cdef WRChain chain
        cdef Frame frame
        if not self.flags & RESUMED:
            return 0
        while self.unfinished_work and self.lead_rail.free and not self.lead_rail.failed:
            if isinstance(self.unfinished_work[0], Frame):
                frame = <Frame> self.unfinished_work[0]
                if (
                    isinstance(frame, WrittenFrame)
                    and (<WrittenFrame> frame).reports_undone_write()
                ):
                    self.lead_rail.connection_broke(RDMAError(UNDONE))
                elif set_local_key(self, frame):
                    frame.prepare_again()
                    self.lead_rail.post_checked(frame)
                    del self.unfinished_work[0]
                continue
            chain = <WRChain> self.unfinished_work[0]
            error = chain.reason_not_to_post()
            if error is None and not self.lead_rail.has_room():
                break
            if error is None and not self.lead_rail.has_room_for(chain.request_count):
                self.lead_rail.post_checked(chain.part(self.lead_rail.free - CONTROL_ENTRIES))
                continue
            del self.unfinished_work[0]
            chain.kept = False
            if error is None:
                self.lead_rail.post_checked(chain)
            else:
                chain.end_unposted(error)
        if not self.unfinished_work and not self.lead_rail.failed:
            self.flags &= ~(SWITCHING | RESUMED)
            self.stripes.last_repeated = self.lead_rail.latest_posted()
            self.lead_rail.backlog.held = False
            self.lead_rail.post_backlog()
            return self.session.flush()
        return 0

    cdef int flush(self) except -1:
        """Send everything that is waiting and can be sent now."""
        cdef bint sent = True
        while sent and self.waiting.size() and self.begin_sending():
            try:
                sent = send_first(self)
            finally:
                self.flags &= ~SENDING
        if self.waiting.size() or self.wait.reason:
            note_wait(self)
        return 0

    cdef int post_frame(self, Frame frame, int kind, bint has_imm, uint32_t imm) except -1:
        """Write the header of a frame, encrypt the frame if necessary, and post it."""
        # The block has the key for the first rail's device already.
        if self.lead_rail.number and not set_local_key(self, frame):
            frame.on_error(self.lead_rail.error_of(frame))
            return frame.free_memory()
        write_header(<FrameHeader *> frame.block.bytes(), self.credits, kind, has_imm, imm)
        if self.sealing is not None:
            frame.length = self.sealing.seal(frame.block.bytes(), frame.length)
            if not frame.length:  # dropped, because there is no key for encryption yet
                return frame.free_memory()
        self.peer_room.count_sent()
        self.journal.add(frame, carries_message(kind))
        return self.lead_rail.post_checked(frame)

    # ---- the end ----

    def end(self, error: BaseException):
        """Fail all waiters with `error`. Nothing more is sent."""
        cdef SendFuture message
        self.end_error = error
        self.flags |= ENDED
        note_wait(self)
        for item in self.waiting.take_all():
            if type(item) is SendFuture:
                (<SendFuture> item).close_payload()
                (<SendFuture> item).settle(FAILED, send_error(self, <SendFuture> item))
            else:
                text = (<WRChain> item).text(self.lead_rail.peer)
                (<WRChain> item).end_unposted(self.owner.error_for(error, text))
        self.unfinished_work = [*take_unfinished_work(self), *self.lead_rail.backlog.take_all()]
        works = [work for work in self.unfinished_work if isinstance(work, WRChain)]
        for work in (*works, *self.journal.all()):  # including frames only in the journal
            text = (<WorkRequest> work).text(self.lead_rail.peer)
            (<WorkRequest> work).on_error(self.owner.error_for(error, text))
        for message in self.offers.messages.values():
            message.settle(FAILED, send_error(self, message))
        # `Offers.close` completes the acknowledged messages after the queue pairs have been
        # destroyed.

    cdef int close(self) except -1:
        """Release the memory after the queue pair has been destroyed."""
        cdef int code = self.offers.close(self.flags & ENDED != 0)
        for item in self.waiting.take_all():  # not empty if the loop was closed without `end`
            if type(item) is not SendFuture:
                (<WRChain> item).waiter = None  # breaks a reference cycle
                (<WRChain> item).free_memory()
        for chain in (*take_unfinished_work(self), *self.lead_rail.backlog.take_all()):
            if isinstance(chain, WRChain):
                (<WRChain> chain).kept = False  # no other rail will post it again
                (<WRChain> chain).free_memory()
        self.journal.close()
        self.session = self.block_source = None
        return code


cdef int require_open(Outbox outbox) except -1:
    """Raise an error unless the connection is open and the caller runs in its loop."""
    if (
        outbox.flags & (NOT_STARTED | ENDED)
        or outbox.closing
        or not outbox.lead_rail.table.wakeups.is_in_loop()
    ):
        outbox.owner.check()  # raises the error
    return 0


cdef int enqueue(Outbox outbox, SendFuture message) except -1:
    """Send the message now, or queue it until it can be sent or bundled with others."""
    cdef bint joins_bundle, sent
    message.backlog_position = outbox.lead_rail.backlog.latest
    if outbox.waiting.size() or outbox.lead_rail.backlog.is_waiting or not outbox.begin_sending():
        outbox.waiting.append(message)
        return note_wait(outbox)
    try:
        joins_bundle = (
            outbox.frames_in_flight
            and message.length < BUNDLED_BELOW
            and outbox.peer_room.fits(message.length)
        )
        sent = not joins_bundle and send_alone(outbox, message)
    finally:
        outbox.flags &= ~SENDING
    if not sent:
        message.backlog_position = outbox.lead_rail.backlog.latest
        outbox.waiting.appendleft(message)  # messages queued in the meantime follow it
    if outbox.waiting.size() and not outbox.flags & COLLECTING:
        outbox.lead_rail.table.wakeups.loop.call_soon(outbox.collect)
        outbox.flags |= COLLECTING
    return 0


cdef int note_wait(Outbox outbox) except -1:
    """Record why the first waiting item waits. The pool and the backlog count their own waits."""
    cdef int reason = WAIT_NONE
    if not outbox.flags & (NOT_STARTED | ENDED) and outbox.waiting.size():
        # A wait for acknowledgements of offered messages counts as a wait for credits.
        if outbox.credits.data == 0 or outbox.offers.is_full():
            reason = WAIT_CREDITS
        elif not (
            outbox.flags & AWAITS_MEMORY
            or outbox.lead_rail.backlog.is_waiting
            or outbox.lead_rail.has_room()
        ):
            reason = WAIT_SEND_QUEUE
    outbox.wait.set_reason(reason)
    return 0


cdef int continue_sending(Outbox outbox, uint32_t awaited_flag) except -1:
    outbox.flags &= ~awaited_flag
    return 0 if outbox.flags & ENDED else outbox.session.flush()


cdef PoolBlock frame_block(Outbox outbox, uint64_t size):
    """Return a block for a frame.

    Returns None if the pool is exhausted. `on_memory` is called later.
    """
    cdef PoolBlock block = outbox.pool.take_fast(size)
    if block is None:
        block = outbox.block_source.block(size)
        if block is None:
            outbox.flags |= AWAITS_MEMORY
    return block


cdef bint send_alone(Outbox outbox, SendFuture message) except -1:
    """Send one message in its own frame. Returns False if there is no memory for it."""
    try:
        if outbox.peer_room.fits(message.length):
            return send_eager(outbox, message)
        return send_rendezvous(outbox, message)
    except (RDMAError, OSError, ValueError, BufferError, MemoryError) as error:
        message.close_payload()  # no part of it was posted
        message.settle(FAILED, error)
    return True


cdef bint send_eager(Outbox outbox, SendFuture message) except -1:
    """Send a message that fits into the peer's next receive, copying all but a long last piece.

    Returns False if there is no memory for the frame.
    """
    # Copy the last piece if it is short, because a copy is then faster than sending it in place.
    # Encryption and the journal need a copy of every piece.
    cdef Piece in_place = message.last()
    if (
        not outbox.pool.local_dma_lkey
        or in_place.length < COPIED_BELOW
        or outbox.peer_room.tag_size
        or outbox.journal.is_enabled
    ):
        in_place = None
    cdef uint64_t length = HEADER + message.length - (
        0 if in_place is None else in_place.length
    )
    cdef PoolBlock block = frame_block(outbox, length + outbox.peer_room.tag_size)
    cdef Frame frame
    if block is None:
        return False
    frame = new_frame(block, <uint32_t> length)
    frame.sender, frame.message = outbox, message
    message.copy_to(block.bytes() + HEADER, in_place)
    if in_place is not None:
        frame.second.addr = <uintptr_t> in_place.bytes
        frame.second.length = <uint32_t> in_place.length
        frame.second.lkey = outbox.pool.local_dma_lkey
    outbox.frames_in_flight += 1
    outbox.post_frame(frame, DATA, message.has_imm, message.imm)
    if in_place is None:
        message.close_payload()  # not earlier, because it may run code that sends the next message
    return True


cdef bint send_bundle(Outbox outbox, list messages, uint64_t size) except -1:
    """Send several messages in one frame. Returns False if there is no memory for the frame."""
    cdef PoolBlock block
    cdef SendFuture message
    cdef BundleEntry *entry
    cdef unsigned char *bytes
    cdef uint64_t entry_size
    cdef Frame frame
    try:
        block = frame_block(outbox, size + outbox.peer_room.tag_size)
    except (RDMAError, OSError, MemoryError) as error:
        for message in messages:
            message.close_payload()
            message.settle(FAILED, error)
        return True
    if block is None:
        return False
    bytes = block.bytes() + HEADER
    for message in messages:
        entry_size = bundled_size(message.length)
        entry = <BundleEntry *> bytes
        entry.length = htole32(
            <uint32_t> message.length | (ENTRY_HAS_IMM if message.has_imm else 0)
        )
        entry.imm = htole32(message.imm)
        bytes += sizeof(BundleEntry)
        message.copy_to(bytes, None)
        memset(bytes + message.length, 0, entry_size - sizeof(BundleEntry) - message.length)
        bytes += entry_size - sizeof(BundleEntry)
    frame = new_frame(block, <uint32_t> size)
    frame.sender, frame.messages = outbox, messages
    outbox.frames_in_flight += 1
    outbox.post_frame(frame, BUNDLE, False, 0)
    for message in messages:
        message.close_payload()
    return True


cdef bint send_rendezvous(Outbox outbox, SendFuture message) except -1:
    """Offer a long message, which the peer reads with RDMA.

    Returns False if there is no memory for the frame, or no room in the send queue.
    """
    cdef PoolBlock block
    cdef uint32_t length
    cdef Frame frame
    cdef bytes seal = b""
    if message.first.next is not None and outbox.sealing is None:
        outbox.offers.join_pieces(message, outbox.peer_room.size)
    # The frame needs one send queue entry. Each piece needs another one to bind its memory window.
    # Encryption joins all pieces into one.
    cdef uint32_t entries = 1 + (message.count() if outbox.sealing is None else 1)
    if not outbox.lead_rail.has_room_for(entries):
        return False
    if outbox.sealing is None:
        length = rendezvous_size(message)
    else:
        length = HEADER + sizeof(RendezvousRequest) + sizeof(RendezvousPiece) + PAYLOAD_SEAL
    block = frame_block(outbox, length + outbox.peer_room.tag_size)
    if block is None:
        return False
    try:
        if outbox.sealing is not None:
            seal = outbox.sealing.seal_message(message, outbox.pool)
        open_keys(message, outbox.lead_rail.keys)
        message.rail = outbox.lead_rail.number
        if not outbox.lead_rail.has_room_for(entries) and not outbox.lead_rail.failed:
            close_message(message, NOT_INVALIDATED)
            raise RDMAError(
                "the message was not sent, because a finalizer filled the send queue in the "
                "meantime; send the message again"
            )
    except BaseException:
        block.end_lease()
        raise
    outbox.offers.add(message)
    if outbox.end_error is not None:  # by the cycle collector, so `end` has not seen the message
        message.settle(FAILED, send_error(outbox, message))
    write_request(block.bytes() + HEADER, message, seal)
    frame = new_rendezvous_frame(block, length, message)
    frame.sender = outbox
    outbox.frames_in_flight += 1
    outbox.post_frame(frame, RNDV_RTS, message.has_imm, message.imm)
    if outbox.end_error is None:
        lanes = select_lanes(outbox.stripes.lanes, message.length)
        outbox.offers.open_elsewhere(message, lanes[1:])  # the first one is the lead
    return True


cdef bint send_first(Outbox outbox) except -1:
    """Send the first waiting item, with as many messages as fit into one frame.

    Returns False if nothing more can be sent now.
    """
    cdef list messages = []
    cdef SendFuture message
    cdef WRChain write
    cdef uint64_t size = HEADER, new_size
    cdef object item
    while len(messages) < MAX_BUNDLE and outbox.waiting.size():
        item = outbox.waiting.first()
        if type(item) is not SendFuture:
            if messages:
                break
            write = <WRChain> item
            if not outbox.lead_rail.backlog.has_posted(write.backlog_position):
                return False
            outbox.waiting.popleft()
            error = write.reason_not_to_post()
            if write.waiter.state != PENDING:  # an earlier part has failed
                write.waiter = None  # breaks a reference cycle
                write.free_memory()
            elif error is not None:
                write.end_unposted(error)
            elif outbox.journal.is_enabled:
                return send_written(outbox, write)
            else:
                outbox.credits.data -= 1
                outbox.peer_room.count_sent()
                outbox.lead_rail.post_checked(write)
            return True
        message = <SendFuture> item
        if not outbox.lead_rail.backlog.has_posted(message.backlog_position):
            break
        if message.state == PENDING:
            new_size = size + bundled_size(message.length)
            if messages and new_size > outbox.peer_room.size:
                break
            size = new_size
            messages.append(message)
        outbox.waiting.popleft()
    if not messages:
        return False
    message = <SendFuture> messages[0]
    if send_alone(outbox, message) if len(messages) == 1 else send_bundle(outbox, messages, size):
        return True
    for message in reversed(messages):
        outbox.waiting.appendleft(message)
    return False


cdef bint send_written(Outbox outbox, WRChain write) except -1:
    """Post a write with immediate data as a plain write and a frame, which the journal can keep.

    The write is complete when both have completed, because the lead may change between them.
    """
    cdef PoolBlock block = None
    cdef TransferFuture waiter = write.waiter
    cdef Frame frame
    cdef uint32_t length = write.sges[0].length, imm = write.sends[0].imm_data
    if outbox.lead_rail.has_room_for(2):
        try:
            block = frame_block(outbox, HEADER + sizeof(length) + outbox.peer_room.tag_size)
        except (RDMAError, OSError, MemoryError) as error:
            write.end_unposted(error)
            return True
    if block is None:
        outbox.waiting.appendleft(write)
        return False
    write.sends[0].opcode = IBV_WR_RDMA_WRITE
    waiter.parts_remaining += 1
    outbox.lead_rail.post_checked(write)
    (<uint32_t *> (block.bytes() + HEADER))[0] = htole32(length)
    frame = init_frame(WrittenFrame.__new__(WrittenFrame), block, HEADER + sizeof(length))
    frame.waiter = waiter
    outbox.post_frame(frame, WRITTEN, True, imm)
    return True


cdef object not_executed_error(Outbox outbox, WRChain chain):
    return BufferStateError(
        f"{chain.text(outbox.lead_rail.peer)} was not executed: the connection has moved to a rail "
        f"that does not have a key for this memory; try again"
    )


cdef list take_unfinished_work(Outbox outbox):
    """Take the work that no lead has completed, in posting order."""
    cdef list works = outbox.unfinished_work
    if outbox.lead_rail.leftovers is not None:
        works = outbox.lead_rail.leftovers.take_works(works)
    outbox.unfinished_work = []
    outbox.flags &= ~RESUMED
    return works


cdef bint set_local_key(Outbox outbox, Frame frame) except -1:
    """Set the local key of the frame's memory for the lead's device.

    Returns False and ends the connection if the memory cannot be registered with that device.
    """
    try:
        frame.lkey = outbox.lead_rail.keys.local_key(frame.block)
    except (RDMAError, OSError, MemoryError) as error:
        outbox.lead_rail.connection_broke(error)
        return False
    return True


cdef object send_error(Outbox outbox, SendFuture message):
    return outbox.owner.error_for(
        outbox.end_error, f"send of {message.length} bytes to {outbox.lead_rail.peer}"
    )


UNDONE = (
    "a write with immediate data was not executed: the connection has moved to a rail that does not "
    "have a key for the memory, or its lease has ended"
)
