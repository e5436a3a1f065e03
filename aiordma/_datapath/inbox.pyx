# Messages that have arrived, in order, and the receivers that wait for messages.
#
# - A message that fits into a posted receive is complete when it arrives. A longer message is read
#   with RDMA. To limit the memory for a slow reader, at most `Config.fetch_ahead` bytes are read
#   before the program calls `recv`.
# - `recv` uses pool memory. With `recv_into`, a long message is read directly into the caller's
#   memory. The message is not acknowledged until the receiver takes it. If the receiver is
#   cancelled before that, the message has to be read again.
# - Memory stays pinned until all READs that were posted for it have completed.
#
# A receiver has to wait in each of the following cases, which `next_item` checks in this order:
#
# - Another receiver is ahead of it.
# - No message has arrived.
# - The first message is being read into the memory of another receiver.
# - The first message is long, and `fetch_ahead` has not read all of it.
#
# `fetch_ahead` does not start a READ under any of these conditions:
#
# - A receiver has been woken but has not resumed yet.
# - `allocate` is running.
# - The pool has no free block.
# - Memory is scarce, and the peer's device has not responded to a `probe`.
#
# The pool calls `fetch_ahead` again when a block becomes available.

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uintptr_t
from libc.string cimport memcpy

cimport cython

from .frames cimport (
    HAS_IMM,
    HEADER,
    FrameHeader,
    IS_WINDOW,
    RAIL_SHIFT,
    RendezvousKey,
    RendezvousKeys,
    RendezvousPiece,
    RendezvousRequest,
)
from .futures cimport DONE, PENDING, warn_never_awaited, wrap_callback_error
from .memory cimport PoolBlock
from .message cimport new_message
from .one_sided cimport MAX_TRANSFER
from .outbox cimport ENDED
from .sealing cimport PAYLOAD_SEAL
from .sends cimport MAX_PIECES, MessageOwner
from .stripes cimport select_lanes
from .work_queue cimport IBV_WR_RDMA_READ, KIND_READ

from aiordma._datapath.results import Received, ReceivedMemory
from aiordma.errors import (
    ConnectionBrokenError,
    ConnectionClosedError,
    MessageTooLongError,
    ProtocolError,
    QuotaError,
    RDMAError,
)
from aiordma.verbs._memory.buffers import bytes_of, keeper_of


cdef extern from "<endian.h>" nogil:
    uint32_t le32toh(uint32_t)
    uint64_t le64toh(uint64_t)

cdef extern from "Python.h":
    void PyErr_SetObject(object, object) noexcept

cdef extern from *:
    """
    static void set_iternext(PyObject *type, PyObject *(*next)(PyObject *))
    {
        ((PyTypeObject *)type)->tp_iternext = next;
    }
    """
    void set_iternext(object type, PyObject *(*next)(PyObject *) noexcept)


cdef enum:
    # Reading ahead pauses while this many bytes per rail are in flight. The limit is high enough to
    # keep a fast link busy, and low enough for the messages to stay in the CPU cache until they are
    # taken.
    MAX_BYTES_READING = 512 << 10
    # The keys for other rails arrive on the lead rail's link, behind the data that it has already
    # requested. Until all keys have arrived, the lead rail therefore reads the first FIRST_BYTES of
    # a message in chunks of FIRST_CHUNK.
    FIRST_BYTES = 256 << 10
    FIRST_CHUNK = 64 << 10


cdef object quota_error(pool, uint64_t size):
    """Return the error if the pool can never provide `size` bytes, or None."""
    try:
        pool.require_possible(size)
    except QuotaError as error:
        return error
    return None


# ---- receivers ---------------------------------------------------------------------------------------

# The device may still write to the memory after the receiver is gone, so the cycle collector must
# not clear the pin or the buffer.
@cython.no_gc_clear
@cython.final
cdef class ReceiveTarget(Pinned):
    """The caller's memory into which a message is received."""

    cdef int open(self, object memory) except -1:
        """Locate the memory, and pin it until the target is closed and no READ uses the memory."""
        self.memory = memory
        if isinstance(memory, Local):
            self.local = <Local> memory
            self.pinned_holder = self.local.holder()
            self.pinned_holder.pins += 1
            # `view` raises an error for dma-buf memory, which this process cannot access. Blocks of
            # the pool need no check.
            if not isinstance(self.pinned_holder, PoolBlock):
                memory.view
            if not self.local.writable:
                raise ValueError(f"cannot receive into {memory!r}: it is read-only")
            self.bytes, self.length = <unsigned char *> <uintptr_t> self.local.address, self.local.length
            return 0
        view = bytes_of(memory, True)
        if view.readonly:
            view = None  # its release may run Python code, so it must precede the exception
            raise ValueError(f"cannot receive into {type(memory).__name__}: it is read-only")
        self.keeper = keeper_of(view)
        PyObject_GetBuffer(view, &self.buffer, PyBUF_WRITABLE)
        self.has_buffer = True
        self.bytes, self.length = <unsigned char *> self.buffer.buf, self.buffer.len
        return 0

    cdef int close(self) except -1:
        """Unpin the caller's memory as soon as no READ into it is in progress."""
        self.closed = True
        self.allocate = self.memory_error = None
        return self.retire_if_unused()

    cdef int retire_if_unused(self) except -1:
        """Release the caller's memory if the receiver and all READs into it have ended."""
        if not self.closed or self.pins:
            return 0
        holder, self.pinned_holder = self.pinned_holder, None
        self.local = self.memory = self.keeper = None
        if holder is not None:
            (<Pinned> holder).unpin_now()
        if self.has_buffer:
            self.has_buffer = False
            PyBuffer_Release(&self.buffer)
        if self.registration is not None:
            registration, self.registration = self.registration, None
            registration.close()
        return 0

    def __dealloc__(self):
        if self.pinned_holder is not None:
            self.pinned_holder.unpin_now()
        if self.has_buffer:
            PyBuffer_Release(&self.buffer)


cdef object allocate_and_check_fit(ReceiveTarget target, uint64_t length):
    """Allocate the memory if `recv_with` has not done so.

    Returns the error if a message of this length does not fit, or None.
    """
    if target.memory_error is None and target.memory is None:
        try:
            target.open(target.allocate(length))
        except BaseException as error:  # the receiver raises it, not the drain
            target.memory_error = wrap_callback_error(error)
    if target.memory_error is None and length > target.length:
        return MessageTooLongError(length, target.length, received=True)
    return target.memory_error


@cython.final
cdef class RecvFuture(OpFuture):
    """The future of a waiting receiver, for the task that awaits its RecvOperation."""

    cdef bint withdraw(self) except -1:
        return self.inbox.receivers.remove(self)


@cython.freelist(64)
@cython.final
cdef class RecvOperation:  # type: Coroutine[Any, Any, Any]
    """A `recv`, `recv_into` or step of `async for`.

    It is an awaitable that asyncio treats as a coroutine. It can be cancelled at any time without
    losing a message, because it takes the message in its last step.
    """

    def __await__(self) -> Generator[Any, None, Any]:
        self.awaited = True
        return self

    def __iter__(self) -> Self:
        """Return the iterator of an await. Other callers, such as `for`, would lose the message."""
        if not self.awaited:
            raise TypeError(f"{self.name()}() must be awaited before its result can be used")
        return self

    def __bytes__(self) -> bytes:
        raise TypeError(
            f"{self.name()}() must be awaited before its result can be used: "
            "write bytes(await conn.recv())"
        )

    def __next__(self) -> RecvFuture:  # replaced by `recv_next`
        raise NotImplementedError

    def send(self, value: None) -> RecvFuture:
        result = self.advance()
        if type(result) is not RecvFuture:
            raise StopIteration(result)
        (<RecvFuture> result)._asyncio_future_blocking = True
        return result

    def throw(
        self, kind: type[BaseException] | BaseException, value=None,
        traceback: TracebackType | None = None,
    ) -> RecvFuture:
        if self.finished:
            raise RuntimeError("cannot reuse already awaited receive operation")
        if value is None:
            value = kind() if isinstance(kind, type) else kind
        self.close()
        raise value

    def close(self):
        self.started = True
        self.withdraw()

    @property
    def __qualname__(self) -> str:
        return self.name()

    cdef str name(self):
        if self.returns_memory:
            return "Connection.recv_with"
        return "Connection.recv" if self.memory is None and self.target is None else "Connection.recv_into"

    def __dealloc__(self):
        cdef Inbox inbox = self.inbox
        if not self.started:
            warn_never_awaited(self.name())
        elif self.waiter is not None and inbox is not None:
            # The operation was garbage collected while it waited, so remove it from the queue. Do
            # not touch the queue if the connection has ended or the inbox is garbage as well.
            if (
                inbox.receivers is not None
                and inbox.incoming is not None
                and inbox.end_error is None
            ):
                self.withdraw()

    cdef int withdraw(self) except -1:
        """Stop waiting, even if this operation has already been woken for a message."""
        cdef RecvFuture waiter = self.waiter
        cdef Inbox inbox = self.inbox
        self.waiter = None
        if waiter is not None:
            if not waiter.withdraw() and waiter.state == DONE:  # it was woken for a message
                inbox.woken_receivers -= 1
                inbox.fetcher.fetch_ahead()
            wake_if_ready(inbox)  # the next receiver gets the message or the end of iteration
        if not self.finished:
            self.finished = True
            if self.target is not None:
                put_back(inbox, self.target)
                self.target.close()
        return 0

    cdef object advance(self):
        """Run the coroutine until it has a result, or return the future that it has to await."""
        cdef RecvFuture waiter = self.waiter
        cdef bint waited = waiter is not None
        if not waited:
            if self.started or self.inbox is None:  # None if no connection created it
                self.started = True
                raise RuntimeError("cannot reuse already awaited receive operation")
            self.started = True
            if not self.inbox.wakeups.is_in_loop():
                self.inbox.outbox.owner.check_loop()
            if self.inbox.outbox.message_owner is not self.message_owner:
                self.finished = True
                raise cannot_receive_error(self.inbox, self.message_owner, "a second reader")
            self.inbox.fetcher.reads_ahead = self.memory is None and self.allocate is None
        try:
            if not waited and not self.inbox.fetcher.reads_ahead:
                self.target = ReceiveTarget.__new__(ReceiveTarget)
                self.target.allocate = self.allocate
                if self.allocate is None:
                    self.target.open(self.memory)
                self.memory = self.allocate = None
            while True:
                if waited:
                    if waiter.state == PENDING:
                        return waiter
                    self.waiter = None
                    if waiter.state != DONE:
                        raise waiter.exception_to_raise()
                    self.inbox.woken_receivers -= 1
                item = next_item(self.inbox, self, waited)
                if item is not None:
                    return self.finish(item)
                waiter, waited = self.waiter, True
                waiter.wakeups.poll_before_wait(waiter)
        except BaseException as error:
            self.withdraw()
            if self.ends_iteration and isinstance(error, ConnectionClosedError):
                raise StopAsyncIteration from None
            raise

    cdef object finish(self, object item):
        """Take the first message, which belongs to this operation."""
        cdef Message message
        cdef PendingRendezvous pending
        cdef Inbox inbox = self.inbox
        cdef ReceiveTarget target = self.target
        cdef uint64_t length
        self.finished = True
        if target is None:
            return inbox.take()
        if type(item) is PendingRendezvous:
            pending = <PendingRendezvous> item
            take_direct_read(inbox, pending)
            length, imm = pending.length, pending.imm if pending.has_imm else None
        else:
            message = inbox.take()
            memcpy(target.bytes, message.block.bytes() + message.offset, message.length)
            length, imm = message.length, message.imm
            message.end_lease()
        if self.returns_memory:
            result = ReceivedMemory(target.memory, length, imm)
        else:
            result = Received(length, imm)
        target.close()
        return result


cdef PyObject *recv_next(PyObject *self) noexcept:
    """Implement `__next__`, ten times as fast as `raise StopIteration(message)` in Cython."""
    cdef object result
    try:
        result = (<RecvOperation> self).advance()
        if type(result) is RecvFuture:
            (<RecvFuture> result)._asyncio_future_blocking = True
            Py_INCREF(result)
            return <PyObject *> result
    except BaseException as error:
        PyErr_SetObject(type(error), error)
        return NULL
    # PyErr_SetObject would unpack a tuple, such as `Received`, into the exception's arguments.
    PyErr_SetObject(StopIteration, StopIteration(result) if isinstance(result, tuple) else result)
    return NULL


set_iternext(RecvOperation, recv_next)


@cython.final
cdef class MessageIterator:
    """The iterator of `async for message in connection`."""

    def __cinit__(self, Inbox inbox not None):
        self.inbox = inbox

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Message]:
        return next_of_iteration(self.inbox, None)


cdef RecvOperation next_of_iteration(Inbox inbox, MessageOwner owner):
    """Create a step of `async for`, on behalf of the owner of the messages if there is one."""
    cdef RecvOperation operation = RecvOperation.__new__(RecvOperation)
    operation.inbox, operation.message_owner, operation.ends_iteration = inbox, owner, True
    return operation


cdef MessageOwner claim_messages(Inbox inbox, str name):
    """Create an owner of the messages. Raises BusyError if they have an owner or a reader."""
    cdef Outbox outbox = inbox.outbox
    if outbox.message_owner is not None or inbox.receivers.size() or inbox.woken_receivers:
        raise cannot_receive_error(inbox, None, name)
    outbox.message_owner = MessageOwner(name)
    return outbox.message_owner


@cython.final
cdef class PendingRendezvous:
    """A message that the peer has offered and this side has not acknowledged yet."""

    def __len__(self) -> int:
        return self.length

    cdef bint is_complete(self) noexcept:
        return self.target is not None and not self.unread_bytes

    cdef uint32_t count(self) noexcept:
        return len(self.pieces) // sizeof(RendezvousPiece)

    cdef uint32_t window_key(self) noexcept:
        """Return the key that the acknowledgement invalidates, or 0."""
        cdef const RendezvousPiece *piece = pieces_of(self)
        return le32toh(piece.rkey) if le32toh(piece.flags) & IS_WINDOW else 0

    cdef int end_striping(self) except -1:
        """Stop requesting chunks. The chunks in progress keep the memory pinned."""
        cdef StripedRead striped = self.striped
        self.striped = None  # break the reference cycle
        return 0 if striped is None else striped.unpin()


cdef bytes keys_of(PendingRendezvous pending, uint32_t rail):
    return b"" if pending.keys is None else pending.keys.get(rail, b"")


cdef inline const RendezvousPiece *pieces_of(PendingRendezvous pending) noexcept:
    return <const RendezvousPiece *> PyBytes_AS_STRING(pending.pieces)


cdef PendingRendezvous parse_rendezvous(
    const unsigned char *frame, uint32_t length, uint64_t longest, bint sealed, bint has_rails
):
    """Parse an RNDV_RTS frame. Raises ProtocolError if the frame or the message is invalid."""
    cdef const FrameHeader *header = <const FrameHeader *> frame
    cdef const RendezvousRequest *request = <const RendezvousRequest *> (frame + HEADER)
    cdef const RendezvousPiece *piece
    cdef PendingRendezvous pending = PendingRendezvous.__new__(PendingRendezvous)
    cdef uint32_t count, size, i
    cdef object total
    if length < HEADER + sizeof(RendezvousRequest) + (PAYLOAD_SEAL if sealed else 0):
        raise ProtocolError(f"the peer sent a rendezvous request of invalid size: {length} bytes")
    if sealed:
        length -= PAYLOAD_SEAL
        pending.seal = PyBytes_FromStringAndSize(<const char *> frame + length, PAYLOAD_SEAL)
    count = le32toh(request.count)
    size = count * sizeof(RendezvousPiece)
    if not 0 < count <= MAX_PIECES or length != HEADER + sizeof(RendezvousRequest) + size:
        raise ProtocolError(
            f"the peer sent a rendezvous request of invalid size: {length} bytes for {count} pieces"
        )
    piece = <const RendezvousPiece *> (request + 1)
    pending.rail = le32toh(piece.flags) >> RAIL_SHIFT if has_rails else 0
    for i in range(count):
        if not le64toh(piece[i].length):
            raise ProtocolError("the peer offered an empty message by rendezvous")
        if le64toh(piece[i].length) > longest - pending.length:
            total = 0
            for i in range(count):
                total += le64toh(piece[i].length)
            raise ProtocolError(
                f"the peer sent a message of {total} bytes, but this side accepts at most {longest} "
                f"(Config.max_message here)"
            )
        if le64toh(piece[i].length) - 1 > ~<uint64_t> 0 - le64toh(piece[i].address):
            raise ProtocolError("the peer offered a message that extends beyond the end of the address space")
        if le32toh(piece[i].flags) & ~<uint32_t> IS_WINDOW != pending.rail << RAIL_SHIFT:
            raise ProtocolError("the peer sent a rendezvous request with extra bytes")
        pending.length += le64toh(piece[i].length)
    pending.pieces = PyBytes_FromStringAndSize(<const char *> piece, size)
    pending.request_id = le32toh(request.request_id)
    pending.has_imm = header.kind & HAS_IMM != 0
    pending.imm = le32toh(header.imm)
    return pending


@cython.no_gc_clear
@cython.final
cdef class RendezvousRead(WorkRequest):
    """An RDMA READ of a part of a rendezvous message, or of zero bytes.

    A READ of zero bytes tests whether the peer's device responds. It does not need memory or a key
    (IBTA 9.4.4, C9-88).
    """

    cdef int on_completion(self, uint32_t byte_len) except -1:
        cdef Fetcher fetcher = self.fetcher
        cdef Lane lane = self.lane
        cdef Pinned pinned = self.pinned
        self.lane = self.pinned = None
        if pinned is not None:
            pinned.unpin_now()
        if not self.length:  # a probe
            fetcher.probing, self.pending.answered = False, True
            return fetcher.fetch_ahead()
        fetcher.progress += self.length
        if lane is not None:
            (<SendQueue> lane.rail).bytes_read += self.length
            fetcher.outbox.stripes.finished(lane, self.length)
        return read_done(fetcher, self.pending, self.length)

    cdef int on_error(self, object error) except -1:
        return 0  # the queue pair fails each receiver, or another rail reads the message

    cdef str text(self, str peer):
        return f"read of a message of {self.pending.length} bytes from {peer}"

    cdef int free_memory(self) except -1:
        """Unpin the memory after a READ that failed, and let another rail repeat the READ."""
        cdef Pinned pinned
        cdef Lane lane = self.lane
        self.lane = None
        if lane is not None:
            read_failed(self.fetcher, self.pending, lane, self.start, self.length)
        elif self.fetcher.outbox.journal.is_enabled:  # otherwise, no other rail can read it
            repeat_read(self.fetcher, self)
        pinned, self.pinned = self.pinned, None
        if pinned is not None:
            pinned.unpin_now()
        return 0


# The device may be writing to the pinned memory, so the cycle collector must not clear the pin.
@cython.no_gc_clear
@cython.final
cdef class StripedRead(Striped):
    """A message that is read over several rails. Each chunk is part of one piece."""

    cdef int register_for(self, SendQueue rail) except -1:
        """Register the memory for the rail, if the peer has sent keys for the rail.

        A rail that fails to register the memory reads nothing. If it is the lead rail,
        `movable_bytes` breaks the rail.
        """
        if rail.number in self.lkeys or (
            rail.number != self.pending.rail and not keys_of(self.pending, rail.number)
        ):
            return 0
        try:
            lkey = rail.keys.local_key(self.pinned)
        except (RDMAError, OSError, MemoryError) as error:
            lkey, self.registration_error = 0, error.with_traceback(None)
        self.lkeys[rail.number] = lkey
        return 0

    cdef uint64_t movable_bytes(self, Lane lane, uint64_t start) except? 0xFFFFFFFFFFFFFFFF:
        """Return the number of bytes from `start` to the end of their piece, or 0.

        It is 0 if the rail broke, or if it lacks a key for the local memory or for the piece.
        """
        cdef SendQueue rail = <SendQueue> lane.rail
        cdef const RendezvousPiece *pieces = pieces_of(self.pending)
        cdef bint is_first_part = start < FIRST_BYTES
        cdef uint32_t i = piece_at(self, &start)
        if rail.error is not None:
            return 0
        lkey = self.lkeys.get(rail.number)
        if lkey == 0 and rail is self.fetcher.outbox.lead_rail:  # other rails may have no keys
            (<object> rail).rail_broke(
                self.registration_error
                or RDMAError("the device cannot register the memory of a message")
            )
        if not lkey:
            return 0
        if (
            rail.number != self.pending.rail
            and len(keys_of(self.pending, rail.number)) <= i * sizeof(RendezvousKey)
        ):
            return 0
        # The lead rail reads the first bytes in small chunks, because the keys for the other rails
        # arrive behind the data that it has requested (see FIRST_BYTES).
        rails_with_keys = len(self.pending.keys or ()) + 1
        if is_first_part and rails_with_keys < len(self.fetcher.outbox.stripes.lanes):
            return min(<uint64_t> FIRST_CHUNK, le64toh(pieces[i].length) - start)
        return le64toh(pieces[i].length) - start

    cdef int post(self, Lane lane, uint64_t start, uint64_t length) except -1:
        cdef SendQueue rail = <SendQueue> lane.rail
        cdef PendingRendezvous pending = self.pending
        cdef RendezvousRead read = new_read(self.fetcher, pending)
        cdef bytes keys = keys_of(pending, rail.number)
        read.lane, read.start = lane, start
        read.address, read.lkey = self.address + start, self.lkeys[rail.number]
        read.length = <uint32_t> length
        cdef uint32_t i = piece_at(self, &start)
        cdef const RendezvousPiece *pieces = pieces_of(pending)
        read.remote_address = le64toh(pieces[i].address) + start
        if rail.number != pending.rail:
            read.rkey = le32toh((<const RendezvousKey *> PyBytes_AS_STRING(keys))[i].rkey)
        else:
            read.rkey = le32toh(pieces[i].rkey)
        read.pinned = self.pinned
        read.pinned.pins += 1
        return rail.post(read)

    cdef int unpin(self) except -1:
        """Unpin the memory. Chunks in progress have their own pins."""
        cdef Pinned pinned = self.pinned
        self.pinned = None
        if pinned is not None:
            pinned.unpin_now()
        return 0

    def __dealloc__(self):
        self.unpin()


cdef uint32_t piece_at(StripedRead striped, uint64_t *start) noexcept:
    """Return the index of the piece that contains byte `start`, and make `start` relative to it."""
    cdef const RendezvousPiece *pieces = pieces_of(striped.pending)
    cdef uint32_t i = 0
    while start[0] >= le64toh(pieces[i].length):
        start[0] -= le64toh(pieces[i].length)
        i += 1
    return i


cdef RendezvousRead new_read(Fetcher fetcher, PendingRendezvous pending):
    cdef RendezvousRead read = RendezvousRead.__new__(RendezvousRead)
    read.kind, read.opcode = KIND_READ, IBV_WR_RDMA_READ
    read.fetcher, read.pending = fetcher, pending
    return read


# ---- the inbox ---------------------------------------------------------------------------------------

cdef bint is_complete(object item) noexcept:
    return type(item) is Message or (<PendingRendezvous> item).is_complete()


@cython.final
cdef class Inbox:
    """Messages that have arrived, and the receivers that wait for messages."""

    def __init__(
        self, Outbox outbox not None, Controls controls not None, Receives receives not None,
        memory: Memory, max_bytes_ahead: int,
    ):
        self.outbox, self.receives = outbox, receives
        self.wakeups = outbox.lead_rail.table.wakeups
        self.incoming, self.receivers = Fifo(), Fifo()
        self.fetcher = Fetcher(self, controls, memory, max_bytes_ahead)

    # ---- arriving ----

    cdef int add_message(self, object item) except -1:
        self.incoming.append(item)
        return wake_if_ready(self)

    cdef int add_rendezvous(self, PendingRendezvous pending) except -1:
        self.incoming.append(pending)
        self.fetcher.unread.append(pending)
        return self.fetcher.fetch_ahead()

    # ---- taking ----

    cdef object allocate_and_check(self, object item, ReceiveTarget target):
        """Return the error if a receiver cannot take the item. `target` is None for `recv`.

        For `recv_with`, this calls the user's `allocate`.
        """
        if type(item) is PendingRendezvous and (<PendingRendezvous> item).fetch_error is not None:
            fetch_error = (<PendingRendezvous> item).fetch_error
            (<PendingRendezvous> item).fetch_error = None  # only the first receiver gets it
            return fetch_error
        if target is not None:
            self.allocate_calls += 1
            try:
                return allocate_and_check_fit(target, len(item))
            finally:
                self.allocate_calls -= 1
        if type(item) is Message or (<PendingRendezvous> item).started:
            return None
        return quota_error(self.fetcher.pool, len(item))

    cdef Message take(self):
        cdef Message message = <Message> self.incoming.popleft()
        if message.fetched:
            self.fetcher.bytes_ahead -= message.length
        self.on_message_taken(message.length, message.is_last_in_frame)
        return message

    cdef int on_message_taken(self, uint64_t length, bint is_last_in_frame) except -1:
        """Count a message that a receiver has taken, and continue with the next ones."""
        self.outbox.counts.messages_received += 1
        self.outbox.counts.bytes_received += length
        if is_last_in_frame and self.end_error is None:
            self.receives.frame_taken()
        if self.fetcher.unread.size():
            self.fetcher.fetch_ahead()
        return wake_if_ready(self)

    # ---- the end ----

    cdef int end_iteration(self) except -1:
        """End every `async for` after it has consumed the messages that have arrived."""
        self.iteration_ends = True
        return wake_if_ready(self)

    def end(self, error: BaseException):
        """Fail all waiters with `error`. Messages that have arrived can still be received."""
        self.end_error = error
        self.fetcher.end()
        items = self.incoming.take_all()
        for item in items:
            if not is_complete(item):
                break  # messages behind it cannot be received in order
            self.incoming.append(item)
        while self.receivers.size():
            wake_first_receiver(self)


cdef bint is_first_receiver_ready(Inbox inbox) noexcept:
    """Return whether the first receiver can continue, with a complete message or an exception."""
    if inbox.end_error is not None:
        return True
    if inbox.incoming.size():
        return is_complete(inbox.incoming.first())
    return inbox.iteration_ends and (<RecvFuture> inbox.receivers.first()).ends_iteration


cdef int wake_first_receiver(Inbox inbox) except -1:
    cdef OpFuture receiver
    while inbox.receivers.size():
        receiver = <OpFuture> inbox.receivers.popleft()
        if receiver.state == PENDING:
            inbox.woken_receivers += 1
            return receiver.settle(DONE, None)
    return 0


cdef int wake_if_ready(Inbox inbox) except -1:
    if inbox.receivers.size() and is_first_receiver_ready(inbox):
        wake_first_receiver(inbox)
    return 0


cdef object cannot_receive_error(Inbox inbox, MessageOwner owner, str other):
    """Return the error for `owner`, or for `other` if it is None, which does not own the messages."""
    name = other if owner is None else owner.name
    return inbox.outbox.ownership_error(owner, f"{name} cannot receive from")


cdef list unacknowledged(Inbox inbox):
    """Return the rendezvous messages that have not been acknowledged, in order."""
    return [item for item in inbox.incoming.all() if type(item) is PendingRendezvous]


cdef object next_item(Inbox inbox, RecvOperation operation, bint has_waited):
    """Return the first item if the operation may take it. Otherwise queue it and return None.

    `has_waited` is True if the operation was woken, so that it is ahead of all waiting receivers.
    """
    cdef object first = inbox.incoming.first()
    cdef ReceiveTarget target = operation.target
    cdef bint in_turn = has_waited or not (inbox.receivers.size() or inbox.woken_receivers)
    cdef RecvFuture waiter
    # A message that is being read into a receiver's memory is reserved for that receiver.
    if type(first) is PendingRendezvous and (<PendingRendezvous> first).target is not None:
        if (<PendingRendezvous> first).target is not target:
            first = None
    if in_turn and first is not None:
        refusal = inbox.allocate_and_check(first, target)
        if inbox.incoming.first() is not first:  # the user's `allocate` changed the queue
            return next_item(inbox, operation, has_waited)
        if refusal is None and is_complete(first):
            return first
        if refusal is not None:
            inbox.fetcher.fetch_ahead()
            wake_if_ready(inbox)  # the message stays for the next receiver
            raise refusal
    # Each receiver that takes its turn wakes the next one. This receiver's turn ends with an error,
    # so wake the next receiver before raising it.
    if inbox.end_error is not None and (in_turn or not inbox.incoming.size()):
        wake_if_ready(inbox)
        raise inbox.outbox.owner.error_for(inbox.end_error)
    if inbox.iteration_ends and operation.ends_iteration and in_turn and not inbox.incoming.size():
        wake_if_ready(inbox)
        raise ConnectionClosedError()
    waiter = RecvFuture.__new__(RecvFuture, inbox.wakeups)
    waiter.inbox, waiter.target = inbox, target
    waiter.ends_iteration = operation.ends_iteration
    operation.waiter = waiter
    if has_waited:
        inbox.receivers.appendleft(waiter)
    else:
        inbox.receivers.append(waiter)
    if inbox.fetcher.unread.size():
        inbox.fetcher.fetch_ahead()
    return None


cdef int take_direct_read(Inbox inbox, PendingRendezvous pending) except -1:
    """Take the first message, which was read directly into its receiver's memory."""
    inbox.incoming.popleft()
    inbox.fetcher.bytes_ahead -= pending.length
    inbox.on_message_taken(pending.length, True)
    return inbox.fetcher.acknowledge(pending)


cdef int put_back(Inbox inbox, ReceiveTarget target) except -1:
    """Make the first message available again if it was being read for a cancelled receiver."""
    cdef object first = inbox.incoming.first()
    if type(first) is PendingRendezvous and (<PendingRendezvous> first).target is target:
        (<PendingRendezvous> first).target = None
        if inbox.end_error is None:
            inbox.fetcher.drop(<PendingRendezvous> first)
    return 0


# ---- reading messages that are too long for a frame --------------------------------------------------

@cython.final
cdef class Fetcher(RailObserver):
    """The reader of messages that are too long for a frame."""

    def __init__(
        self, Inbox inbox not None, Controls controls not None, memory: Memory, max_bytes_ahead: int
    ):
        self.inbox, self.outbox, self.controls = inbox, inbox.outbox, controls
        self.memory, self.pool = memory, memory.pool
        self.block_source = memory.block_source(self.fetch_ahead, internal=False)
        self.max_bytes_ahead, self.reads_ahead = max_bytes_ahead, True
        self.unread, self.read_watchers = Fifo(), set()

    cpdef int fetch_ahead(self) except -1:
        """Start reading the first message if a receiver waits, and others ahead of `recv`."""
        cdef PendingRendezvous pending
        cdef RecvFuture receiver
        while self.unread.size() and self.inbox.end_error is None and not self.inbox.allocate_calls:
            pending = <PendingRendezvous> self.unread.first()
            receiver = None
            if self.inbox.incoming.first() is pending:
                if self.inbox.woken_receivers:
                    return 0  # the woken receiver has precedence
                receiver = <RecvFuture> self.inbox.receivers.first()
            if receiver is None:
                # Do not read ahead if the program calls `recv_into`, because a message can then be
                # read directly into the program's memory.
                if (
                    not self.reads_ahead
                    or self.bytes_reading
                    >= MAX_BYTES_READING * <uint64_t> len(self.outbox.stripes.lanes)
                    or self.bytes_ahead + pending.length > self.max_bytes_ahead
                ):
                    return 0
            else:
                refusal = self.inbox.allocate_and_check(pending, receiver.target)
                if self.inbox.receivers.first() is not receiver:  # the user's `allocate` removed it
                    continue
                if refusal is not None:
                    return wake_first_receiver(self.inbox)  # the receiver raises the error
            if receiver is not None and receiver.target is not None:
                if not fetch_into_target(self, pending, receiver.target):
                    return 0
            elif not fetch_into_pool(self, pending):
                return 0
        return 0

    def lead_changed(self, SendQueue lead not None) -> None:
        """Read messages into the memory of the new lead's pool."""
        cdef PendingRendezvous pending
        for pending in unacknowledged(self.inbox):
            if pending.unread_bytes and pending.message is not None and not pending.watched:
                self.watch(pending)  # the peer may not send keys for this rail
        self.pool = lead.driver.pool

    cdef int watch(self, PendingRendezvous pending) except -1:
        """Limit the time for reading a message while other connections wait for memory.

        The pool calls `stalled` if the READs of this connection complete too slowly.
        """
        pending.watched = True
        self.watched_count += 1
        self.read_watchers.add(self.pool._stalled_reads)
        self.pool._stalled_reads.begin(self)
        return 0

    def stalled(self, timeout: float):
        """End the connection because READs took too long while others waited for memory."""
        self.outbox.lead_rail.connection_broke(
            ConnectionBrokenError(
                f"timed out reading a message from the peer: the peer's device completed too few "
                f"READs in {timeout:g} seconds while other connections waited for pool memory"
            )
        )

    cdef int read(
        self, PendingRendezvous pending, Pinned pinned, uint64_t address, uint32_t lkey
    ) except -1:
        """Read all pieces into consecutive memory at `address`, which `pinned` keeps pinned."""
        cdef const RendezvousPiece *piece
        cdef uint64_t offset, length, start = 0
        cdef uint32_t i, count = pending.count()
        cdef RendezvousRead read
        pending.started = True
        if self.unread.first() is pending:  # the connection has not ended in the meantime
            self.unread.popleft()
        self.bytes_ahead += pending.length
        self.bytes_reading += pending.length
        pending.unread_bytes = pending.length
        if (
            self.outbox.lead_rail.number
            or pending.rail != self.outbox.lead_rail.number
            or len(select_lanes(self.outbox.stripes.lanes, pending.length)) > 1
        ):
            # The message is read over all rails for which the peer has sent, or will send, keys. A
            # StripedRead also gets an lkey for each rail, because `lkey` may be the one of rail 0.
            return self.outbox.stripes.begin(new_striped_read(self, pending, pinned, address))
        piece = pieces_of(pending)
        for i in range(count):
            offset = 0
            length = le64toh(piece[i].length)
            while offset < length:
                read = new_read(self, pending)
                read.address, read.lkey = address, lkey
                read.length = <uint32_t> min(MAX_TRANSFER, length - offset)
                read.remote_address = le64toh(piece[i].address) + offset
                read.rkey = le32toh(piece[i].rkey)
                read.pinned = pinned
                read.start = start
                start += read.length
                pinned.pins += 1
                offset += read.length
                address += read.length
                self.outbox.lead_rail.post(read)
        return 0

    cdef int take_keys(self, bytes content) except -1:
        """Process the contents of an RNDV_KEYS frame.

        Keys for an acknowledged message or for a rail that has ended are ignored.
        """
        cdef const RendezvousKeys *frame = <const RendezvousKeys *> PyBytes_AS_STRING(content)
        cdef const RendezvousKey *keys = <const RendezvousKey *> (frame + 1)
        cdef PendingRendezvous pending
        cdef Lane lane
        cdef bytes known
        cdef uint32_t rail, count = 0, i
        if len(content) >= sizeof(RendezvousKeys):
            count = le32toh(frame.count)
        if (
            not 0 < count <= MAX_PIECES
            or len(content) != sizeof(RendezvousKeys) + count * sizeof(RendezvousKey)
        ):
            raise ProtocolError(f"the peer sent keys of invalid size: {len(content)} bytes for "
            f"{count} pieces")
        for i in range(count):
            if le32toh(keys[i].flags) & ~<uint32_t> IS_WINDOW:
                raise ProtocolError("the peer sent keys with extra bytes")
        rail = le32toh(frame.rail)
        for lane in self.outbox.stripes.lanes:
            if (<SendQueue> lane.rail).number != rail:
                continue
            for pending in unacknowledged(self.inbox):
                if pending.request_id != le32toh(frame.request_id):
                    continue
                if rail == pending.rail:
                    raise ProtocolError("the peer sent keys for a rail that already has them")
                known = keys_of(pending, rail)
                i = len(known) // sizeof(RendezvousKey)
                if le32toh(frame.first) != i or count > pending.count() - i:
                    raise ProtocolError(
                        f"the peer sent unexpected keys: {count} pieces starting at piece "
                        f"{le32toh(frame.first)}, but the message has {pending.count()} pieces, "
                        f"and the keys of {i} pieces are known"
                    )
                if pending.keys is None:
                    pending.keys = {}
                pending.keys[rail] = known + content[sizeof(RendezvousKeys):]
                if pending.striped is not None:
                    pending.striped.register_for(<SendQueue> lane.rail)
                    self.outbox.stripes.serve()
                return 0
        return 0

    def rail_removed(self, SendQueue rail not None) -> None:
        """Drop the peer's keys for a rail.

        Otherwise a peer that keeps adding rails could exhaust the memory.
        """
        cdef PendingRendezvous pending
        for pending in unacknowledged(self.inbox):
            if pending.keys is not None:
                pending.keys.pop(rail.number, None)

    cdef int acknowledge(self, PendingRendezvous pending) except -1:
        """Tell the peer that this side has read the message, so that its memory can be released."""
        if self.outbox.flags & ENDED:
            return 0
        return self.controls.acknowledge(
            pending.request_id,
            pending.window_key()  # only the lead rail's queue pair can invalidate it
            if self.outbox.pool.has_windows and pending.rail == self.outbox.lead_rail.number
            else 0,
        )

    cdef bint decrypt(self, PendingRendezvous pending) except -1:
        """Decrypt a message in place. Returns False if a failure ends the connection."""
        cdef unsigned char *bytes = NULL
        if pending.target is not None:
            bytes = pending.target.bytes
        elif pending.message is not None:
            bytes = pending.message.block.bytes()
        try:
            if bytes != NULL:  # NULL if the receiver is gone
                self.outbox.sealing.open_payload(bytes, pending.length, pending.seal)
        except ProtocolError as error:
            pending.unread_bytes = 1  # the message never becomes complete
            self.outbox.owner.violated(error)
            return False
        return True

    cdef int drop(self, PendingRendezvous pending) except -1:
        """Stop reading a message into its target, because the receiver was cancelled."""
        if not pending.unread_bytes:
            return requeue_unread(self, pending)
        if pending.striped is not None:
            return read_done(self, pending, self.outbox.stripes.drop(pending.striped))
        return 0  # `read_done` makes the message available again after its last READ

    cdef int end(self) except -1:
        """Stop reading messages, because the connection has ended."""
        end_watching(self)
        self.unread.take_all()
        self.outbox.stripes.close(self.inbox.end_error)
        for item in self.inbox.incoming.all():
            if type(item) is PendingRendezvous:
                (<PendingRendezvous> item).end_striping()
        return 0


cdef int end_watching(Fetcher fetcher) except -1:
    """Stop limiting the time for reads, because no message is watched any more."""
    for reads in fetcher.read_watchers:
        reads.end(fetcher)
    fetcher.read_watchers.clear()
    return 0


cdef bint fetch_into_pool(Fetcher fetcher, PendingRendezvous pending) except -1:
    """Start reading a message into pool memory. Returns False if no message can be read now."""
    cdef PoolBlock block
    cdef bint large = False
    block = (<BlockCache> fetcher.pool).take_fast(pending.length)
    if block is None:
        large = pending.length > (<BlockCache> fetcher.pool).slab_size
        if large and not pending.answered and not fetcher.pool._has_spare(pending.length):
            # Memory is scarce. Allocate it only after the peer's device has responded to a READ of
            # zero bytes, whose completion calls `fetch_ahead` again.
            probe(fetcher, pending)
            return False
        try:
            block = fetcher.block_source.block(pending.length)
        except QuotaError:
            return False
        except (RDMAError, OSError, MemoryError) as error:
            # This is a local failure. The first receiver gets the error, and the message remains
            # available for the next receiver.
            if fetcher.inbox.incoming.first() is pending and fetcher.inbox.receivers.size():
                pending.fetch_error = error
                wake_first_receiver(fetcher.inbox)
            return False
    if block is None:
        return False
    pending.message = new_message(block, 0, pending.length)
    pending.message.imm_value, pending.message.has_imm = pending.imm, pending.has_imm
    # Watch a large message, and a message for which the peer may not send the keys of this rail. Do
    # this only now, because a message without a block could be read into a receiver's own memory.
    if large or pending.rail != fetcher.outbox.lead_rail.number:
        fetcher.watch(pending)
    fetcher.read(pending, block, block.address, block.lkey)
    return True


cdef int probe(Fetcher fetcher, PendingRendezvous pending) except -1:
    """Probe the peer's device before scarce memory is allocated for the message.

    If the device never responds to a READ, the memory of the READ cannot be reused until the queue
    pair is destroyed.
    """
    if fetcher.probing:
        return 0
    fetcher.probing = True
    return fetcher.outbox.lead_rail.post(new_read(fetcher, pending))


cdef bint fetch_into_target(
    Fetcher fetcher, PendingRendezvous pending, ReceiveTarget target
) except -1:
    """Start reading a message for a receiver with its own memory, directly into it if possible.

    Returns False if no message can be read now.
    """
    cdef uint32_t global_lkey = (<BlockCache> fetcher.pool).local_dma_lkey
    cdef Local local = target.local
    if local is None and global_lkey:
        pending.target = target
        fetcher.read(pending, target, <uintptr_t> target.bytes, global_lkey)
        return True
    if local is None and pending.length <= fetcher.memory.staging_limit:
        return fetch_into_pool(fetcher, pending)
    if local is None:
        try:
            target.registration = fetcher.memory.register(target.memory, bytes_of(target.memory))
        except (RDMAError, OSError, MemoryError) as error:
            if quota_error(fetcher.pool, pending.length) is None:
                return fetch_into_pool(fetcher, pending)  # memory of the pool is sufficient
            target.memory_error = error
            wake_first_receiver(fetcher.inbox)
            return False
        local = target.local = target.registration
    pending.target = target
    holder = local.holder() if target.pinned_holder is None else target.pinned_holder
    fetcher.read(pending, holder, local.address, local.lkey)
    return True


cdef StripedRead new_striped_read(
    Fetcher fetcher, PendingRendezvous pending, Pinned pinned, uint64_t address
):
    """Prepare to read a message in chunks, over all rails for which the peer has sent keys."""
    cdef StripedRead striped = StripedRead.__new__(StripedRead, pending.length)
    cdef Lane lane
    striped.fetcher, striped.pending, striped.pinned = fetcher, pending, pinned
    pinned.pins += 1
    striped.address, striped.lkeys = address, {}
    pending.striped = striped
    for lane in fetcher.outbox.stripes.lanes:
        striped.register_for(<SendQueue> lane.rail)
    return striped


cdef int repeat_read(Fetcher fetcher, RendezvousRead read) except -1:
    """Let other rails repeat a READ of the broken lead rail, unless the message was dropped."""
    cdef PendingRendezvous pending = read.pending
    cdef StripedRead striped = pending.striped
    if not read.length:  # a probe
        fetcher.probing = False
        return 0
    if fetcher.inbox.end_error is not None:
        return 0
    if pending.target is None and pending.message is None:
        # The receiver was cancelled, so these bytes are not needed. Count the READ as done.
        return read_done(fetcher, pending, read.length)
    if striped is None:
        striped = new_striped_read(fetcher, pending, read.pinned, read.address - read.start)
        striped.ranges.clear()  # the other READs of the message are posted or repeated separately
        striped.rest = 0
    return fetcher.outbox.stripes.requeue_chunk(None, striped, read.start, read.length)


cdef int read_failed(
    Fetcher fetcher, PendingRendezvous pending, Lane lane, uint64_t start, uint64_t length
) except -1:
    """Let another rail read the chunk of a broken rail, unless its message was dropped."""
    if fetcher.inbox.end_error is not None:
        return 0
    if pending.striped.dropped:
        return read_done(fetcher, pending, length)
    return fetcher.outbox.stripes.requeue_chunk(lane, pending.striped, start, length)


cdef int read_done(Fetcher fetcher, PendingRendezvous pending, uint64_t length) except -1:
    """Record that READs of `length` bytes are over. After the last one, deliver the message."""
    pending.unread_bytes -= length
    fetcher.bytes_reading -= length
    if fetcher.inbox.end_error is not None:
        return 0
    if pending.unread_bytes:
        return fetcher.fetch_ahead() if fetcher.unread.size() else 0
    pending.end_striping()
    if pending.watched:
        pending.watched = False
        fetcher.watched_count -= 1
        if not fetcher.watched_count:
            end_watching(fetcher)
    if pending.seal is not None and not fetcher.decrypt(pending):
        return 0
    if pending.target is not None:
        return wake_if_ready(fetcher.inbox)
    if pending.message is None:  # the receiver is gone, so it must be read again
        return requeue_unread(fetcher, pending)
    fetcher.acknowledge(pending)
    pending.message.fetched = True
    fetcher.inbox.incoming.replace(pending, pending.message)
    if fetcher.unread.size():
        fetcher.fetch_ahead()
    return wake_if_ready(fetcher.inbox)


cdef int requeue_unread(Fetcher fetcher, PendingRendezvous pending) except -1:
    """Reset a message that was not read to the state in which it was offered."""
    pending.started = False
    fetcher.unread.appendleft(pending)  # only the first message can have a target
    fetcher.bytes_ahead -= pending.length
    return fetcher.fetch_ahead()
