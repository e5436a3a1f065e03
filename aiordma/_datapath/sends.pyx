# Outgoing messages, and the frames that carry them.

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport uintptr_t
from libc.string cimport memcpy, memset

cimport cython

from .futures cimport DONE, FAILED, complete_waiter
from .keys cimport has_no_holes
from .memory cimport Pinned
from .message cimport Message
from .work_queue cimport (
    BEFORE_LAST,
    IBV_ACCESS_REMOTE_READ,
    IBV_SEND_SIGNALED,
    IBV_WR_SEND,
    KIND_SEND,
    WorkQueues,
    ibv_sge,
    post_sends,
)

from aiordma._core import arguments
from aiordma.verbs._memory.buffers import bytes_of, keeper_of, require_data

cdef extern from "Python.h":
    PyObject *PyMemoryView_GET_BASE(object) noexcept


cdef uint32_t imm_of(object imm) except? 0xFFFFFFFF:
    return arguments.integer("imm", imm, 0, arguments.U32_MAX)


cdef object cannot_send_error(Sender sender, MessageOwner owner):
    return sender.ownership_error(owner, "cannot send a message on")


cdef bint is_free_of_pointers(object view) noexcept:
    """Return whether a view shows the memory of an object of a type that contains no pointers.

    The result is False for a released view, whose base is NULL. `has_no_holes` accepts only types
    of bytes and numbers.
    """
    cdef PyObject *base = PyMemoryView_GET_BASE(view)
    return base != NULL and has_no_holes(<object> base)


@cython.final
cdef class MessageOwner:
    """The owner of a connection's messages. Each claim has its own."""

    def __cinit__(self, str name):
        self.name = name


cdef class Sender(RailObserver):
    """The interface of the outbox for waiting messages and their frames."""

    cdef object ownership_error(self, MessageOwner owner, str attempt):
        """Return the error for an attempt by `owner`, which is not `message_owner`."""
        raise NotImplementedError

    cdef int write(self, WorkRequest chain) except -1:
        """Post a write with immediate data when its turn among the messages comes."""
        raise NotImplementedError

    cdef bint withdraw(self, object item) except -1:
        """Drop a waiting message or write. Returns False if it has been posted."""
        raise NotImplementedError

    cdef void delivered(self, SendFuture message) noexcept:
        self.counts.messages_sent += 1
        self.counts.bytes_sent += message.length

    cdef int finish(self, SendFuture message, uint32_t status, uint32_t invalidated_key) except -1:
        """Complete a message that the peer has acknowledged and no rail can read any more."""
        raise NotImplementedError


# The cyclic garbage collector must not clear pieces, because the device may still read their
# memory. The trashcan limits the recursion when a long chain of pieces is deallocated.
@cython.no_gc_clear
@cython.trashcan(True)
@cython.freelist(64)
@cython.final
cdef class Piece:
    """Bytes of a message in the sender's memory, which is pinned until `close`."""

    cdef int open(self, object data) except -1:
        """Locate and pin the bytes of any object that can be sent.

        The first branches are fast paths for common types. `keeper_of` prevents numpy from moving
        an array whose buffer is used here.
        """
        cdef Pinned holder = None
        if type(data) is bytes:
            self.source = data
            self.bytes = <const unsigned char *> PyBytes_AS_STRING(data)
            self.length = PyBytes_GET_SIZE(data)
            return 0
        if type(data) is Message:
            (<Message> data)._check()
            holder = (<Message> data).block
            self.bytes = (<Message> data).block.bytes() + (<Message> data).offset
            self.length = (<Message> data).length
        elif isinstance(data, Local):
            holder = (<Local> data).holder()
            self.bytes = <const unsigned char *> <uintptr_t> (<Local> data).address
            self.length = (<Local> data).length
        if isinstance(holder, PoolBlock):
            holder.pins += 1
            self.source = holder
            return 0
        if holder is not None:
            data = data.view
        if type(data) is bytearray:
            return open_buffer(self, data)
        if type(data) is memoryview:
            open_buffer(self, data)
            # Open the buffer first. This raises an error for a released view, whose base is NULL.
            if not is_free_of_pointers(data):
                require_data(data)
                self.keeper = keeper_of(data)
            return 0
        data = bytes_of(data)
        self.keeper = keeper_of(data)
        return open_buffer(self, data)

    cdef Key key_of(self, ReadKeys keys):
        """Return the key for one rail, or None."""
        cdef Key key = self.key
        while key is not None and key.keys is not keys:
            key = key.next
        return key

    cdef void close(self) noexcept:
        cdef object source = self.source
        self.source = self.keeper = None
        if self.has_buffer:
            self.has_buffer = False
            PyBuffer_Release(&self.buffer)
        elif isinstance(source, PoolBlock):
            (<PoolBlock> source).unpin_now()

    def __dealloc__(self):
        if self.source is not None:
            self.close()


cdef int open_buffer(Piece piece, object data) except -1:
    try:
        PyObject_GetBuffer(data, &piece.buffer, PyBUF_SIMPLE)
    except BufferError:
        data = bytes_of(data)  # raises an error that explains the problem
        PyObject_GetBuffer(data, &piece.buffer, PyBUF_SIMPLE)
    piece.has_buffer = True
    piece.source = data
    piece.bytes = <const unsigned char *> piece.buffer.buf
    piece.length = piece.buffer.len
    return 0


@cython.final
cdef class SendFuture(OpFuture):
    """An outgoing message, and the future of its delivery."""

    cdef int open(self, object data) except -1:
        """Open a buffer, or a list or tuple of buffers in order."""
        if type(data) is list or type(data) is tuple:
            return open_pieces(self, data)
        self.first = Piece.__new__(Piece)
        self.first.open(data)
        self.length = self.first.length
        return 0

    cdef Piece last(self):
        cdef Piece piece = self.first
        while piece.next is not None:
            piece = piece.next
        return piece

    cdef uint32_t count(self) noexcept:
        cdef Piece piece = self.first
        cdef uint32_t count = 0
        while piece is not None:
            count += 1
            piece = piece.next
        return count

    cdef void copy_to(self, unsigned char *to, Piece until) noexcept:
        """Copy the pieces before `until`, or all if it is None."""
        cdef Piece piece = self.first
        while piece is not until:
            if piece.length:
                memcpy(to, piece.bytes, piece.length)
                to += piece.length
            piece = piece.next

    cdef int join_pieces(self, uint64_t below) except -1:
        """Copy consecutive pieces shorter than `below` bytes into one piece."""
        cdef Piece piece = self.first, previous = None, joined
        cdef object run
        while piece is not None:
            run = []
            while piece is not None and piece.length < below:
                run.append(piece.bytes[: piece.length])
                piece.close()
                piece = piece.next
            content = b"".join(run)
            if content:
                joined = Piece.__new__(Piece)
                joined.open(content)
                joined.next = piece
            else:
                joined = piece
            if previous is None:
                self.first = joined
            else:
                previous.next = joined
            previous = piece
            piece = None if piece is None else piece.next
        return 0

    cdef void close_payload(self) noexcept:
        cdef Piece piece = self.first
        self.first = None
        while piece is not None:
            piece.close()
            piece = piece.next

    cdef bint withdraw(self) except -1:
        return self.sender is not None and self.sender.withdraw(self)


cdef int open_pieces(SendFuture message, object buffers) except -1:
    """Open each buffer as a piece of the message. A message without buffers gets an empty piece."""
    cdef Piece piece, last = None
    for data in buffers:
        piece = Piece.__new__(Piece)
        piece.open(data)
        message.length += piece.length
        if last is None:
            message.first = piece
        else:
            last.next = piece
        last = piece
    if last is None:
        message.first = Piece.__new__(Piece)
    return 0


@cython.no_gc_clear
cdef class Frame(WorkRequest):
    """A frame in a block of the pool, or its header and a message in the sender's memory."""

    cdef void detach(self) noexcept:
        """Record that the device no longer uses the memory."""
        if not self.awaits_completion:
            return
        self.awaits_completion = False
        if self.sender is not None:
            self.sender.frames_in_flight -= 1
        if not self.kept:
            self.release_block()

    cdef void release_from_journal(self) noexcept:
        """Record that the journal no longer needs the frame."""
        self.kept = False
        if not self.awaits_completion:
            self.release_block()

    cdef void release_block(self) noexcept:
        cdef PoolBlock block = self.block
        self.block = None
        if block is None:
            return
        if self.spare_blocks is None:
            block.end_lease()
        else:
            self.spare_blocks.append(block)

    cdef int on_completion(self, uint32_t byte_len) except -1:
        self.detach()
        return self.mark_arrived()

    cdef int mark_arrived(self) except -1:
        """Record that the peer or its device has the frame. A second call has no effect."""
        cdef SendFuture message = self.message
        cdef list messages = self.messages
        cdef object waiter = self.waiter
        self.message = self.messages = self.waiter = None
        if message is not None:
            self.sender.delivered(message)
            message.close_payload()
            message.settle(DONE, None)
        elif messages is not None:
            for message in messages:
                self.sender.delivered(message)
                message.settle(DONE, None)
        elif waiter is not None:
            complete_waiter(waiter, None)
        return 0

    cdef int prepare_again(self) except -1:
        """Prepare to post the frame again on another rail, where this rail's keys are unknown."""
        self.awaits_completion, self.missing = True, False
        self.opcode, self.imm, self.request_count = IBV_WR_SEND, 0, 1
        if self.sender is not None:
            self.sender.frames_in_flight += 1
        return 0

    cdef int on_error(self, object error) except -1:
        cdef SendFuture message
        if self.message is not None:
            self.message.settle(FAILED, error)
        elif self.messages is not None:
            for message in self.messages:
                message.settle(FAILED, error)
        elif self.waiter is not None:
            complete_waiter(self.waiter, error)
        return 0

    cdef str text(self, str peer):
        if self.message is not None:
            return f"send of {self.message.length} bytes to {peer}"
        if self.messages is not None:
            return f"send of {len(self.messages)} messages to {peer}"
        return f"control message to {peer}"

    cdef int free_memory(self) except -1:
        self.detach()
        if self.message is not None:
            self.message.close_payload()
        return 0


# ---- the windows of a message, on one rail ----

cdef uint32_t count_windows(SendFuture message, ReadKeys keys) noexcept:
    cdef Piece piece = message.first
    cdef uint32_t count = 0
    while piece is not None:
        count += piece.key_of(keys).window is not None
        piece = piece.next
    return count


cdef aiordma_send *prepare_binds(
    SendFuture message, ReadKeys keys, aiordma_send *send, uint64_t wr_id
) noexcept:
    """Create the bind requests for the windows. Returns the position after the last one."""
    cdef Piece piece = message.first
    cdef Key key
    while piece is not None:
        key = piece.key_of(keys)
        if key.window is not None:
            key.window.prepare_bind(
                send, key.region, <uintptr_t> piece.bytes, piece.length, IBV_ACCESS_REMOTE_READ
            )
            send.wr_id = wr_id | BEFORE_LAST
            send += 1
        piece = piece.next
    return send


cdef void mark_windows_bound(SendFuture message, ReadKeys keys) noexcept:
    cdef Piece piece = message.first
    cdef Key key
    while piece is not None:
        key = piece.key_of(keys)
        if key.window is not None:
            key.window.mark_bound()
        piece = piece.next


@cython.no_gc_clear
@cython.final
cdef class RendezvousFrame(Frame):
    """An offer of memory, preceded by the binds of its windows."""

    cdef SendFuture offered

    cdef int prepare_again(self) except -1:
        """Prepare to post only the offer. Its windows were bound on the rail that broke."""
        self.offered = None
        return Frame.prepare_again(self)

    cdef int post_to(self, WorkQueues queue, uint64_t wr_id, uint32_t *posted) except -1:
        if self.offered is None:
            return Frame.post_to(self, queue, wr_id, posted)
        cdef ReadKeys keys = self.offered.first.key.keys
        cdef aiordma_send[MAX_PIECES + 1] sends
        cdef aiordma_send *send = prepare_binds(self.offered, keys, sends, wr_id)
        cdef ibv_sge sge
        memset(send, 0, sizeof(aiordma_send))
        send.wr_id, send.opcode, send.send_flags = wr_id, IBV_WR_SEND, IBV_SEND_SIGNALED
        send.num_sge = 1
        sge.addr, sge.length, sge.lkey = self.address, self.length, self.lkey
        cdef int code = post_sends(queue, sends, self.request_count, &sge, posted, 0)
        if not code:
            mark_windows_bound(self.offered, keys)
        return code


cdef Frame new_frame(PoolBlock block, uint32_t length):
    """Create a frame that takes over the lease of the block."""
    return init_frame(Frame.__new__(Frame), block, length)


cdef Frame new_rendezvous_frame(PoolBlock block, uint32_t length, SendFuture message):
    """Create the frame that offers the message, with the requests that bind its windows."""
    cdef RendezvousFrame frame = RendezvousFrame.__new__(RendezvousFrame)
    frame.offered = message
    frame.request_count += count_windows(message, message.first.key.keys)
    return init_frame(frame, block, length)


cdef Frame init_frame(Frame frame, PoolBlock block, uint32_t length):
    frame.kind, frame.opcode = KIND_SEND, IBV_WR_SEND
    frame.block, frame.awaits_completion = block, True
    frame.address, frame.length, frame.lkey = block.address, length, block.lkey
    return frame
