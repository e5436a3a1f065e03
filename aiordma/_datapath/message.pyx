# A received message, an ordered queue of items, and the counters of a connection.

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uintptr_t

cimport cython

from aiordma._native import ffi
from aiordma.errors import BufferStateError


# A message cannot be part of a reference cycle, because its members never refer to messages.
@cython.no_gc
@cython.freelist(64)
cdef class Message:
    """A received message. `message.data` is its memory, and `bytes(message)` is a copy.

    Functions that only accept bytes need the copy: `json.loads(bytes(message))`. To show this in
    their errors, `message.__class__` is a subclass with a name that contains the hint.

    The memory is yours until you call `release`, until the end of a `with` block, or until the
    message is garbage collected. Afterwards, the message raises BufferStateError. Views that you
    took before keep showing the same bytes.

    `imm` is the sender's immediate data, or None. `written` is only set in the empty message that
    reports a write with immediate data. It is the number of bytes in the last piece of that write,
    and None in all other messages.
    """

    @property
    def imm(self) -> int | None:
        return self.imm_value if self.has_imm else None

    @property
    def written(self) -> int | None:
        return self.bytes_written if self.has_written else None

    @property
    def data(self) -> memoryview:
        """The bytes in the memory in which they arrived.

        The memory is writable. Changes do not affect the sender.
        """
        return self.export()

    @property
    def _block(self) -> PoolBlock | None:
        return self.block

    def export(self) -> memoryview:
        self._check()
        return self.block.view_of(self.offset, self.offset + self.length)

    @property
    def __class__(self):
        # Functions such as json.loads name the class of the argument when they reject a message.
        # The name of this class therefore tells the user to write bytes(message).
        return named_for_errors

    @property
    def decode(self):
        """Raise an AttributeError that shows how to decode a message."""
        # This is a property, because `__getattr__` would slow down every attribute access.
        raise AttributeError(
            "a Message is not a bytes object: write bytes(message).decode(), which copies, or "
            "str(message.data, 'utf-8')", name="decode", obj=self,
        )

    def __bytes__(self) -> bytes:
        self._check()
        return PyBytes_FromStringAndSize(
            <const char *> self.block.bytes() + self.offset, self.length
        )

    def __len__(self) -> int:
        return self.length

    def __repr__(self):
        imm = "" if self.imm is None else f" imm={self.imm:#x}"
        state = "" if self.block is not None else " released"
        return f"<Message of {len(self)} bytes{imm}{state}>"

    def _check(self):
        """Raise BufferStateError if the message was released."""
        if self.block is None:
            raise BufferStateError(f"{self!r} has been released and cannot be read")

    def __eq__(self, other) -> bool:
        """Compare the contents with those of bytes, a bytearray, a memoryview or another message.
        """
        mine = self.export()
        if isinstance(other, Message):
            return mine == other.export()
        if isinstance(other, bytes | bytearray | memoryview):
            return mine == other
        return NotImplemented

    __hash__ = None

    cdef void end_lease(self) noexcept:
        cdef PoolBlock block = self.block
        if block is not None:
            self.block = None
            block.end_lease()

    def release(self):
        """Release the memory. A second call has no effect."""
        self.end_lease()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_):
        self.end_lease()

    def __dealloc__(self):
        self.end_lease()


cdef object named_for_errors = type(
    "Message; write bytes(message)", (Message,), {"__slots__": (), "__module__": __name__}
)


cdef Message new_message(PoolBlock block, uint64_t offset, uint64_t length):
    """Create a message that takes over a lease of the block."""
    cdef Message message = Message.__new__(Message)
    message.block, message.offset, message.length = block, offset, length
    message.is_last_in_frame = True
    return message


@cython.final
cdef class Fifo:
    """A queue in a growing ring buffer, which can also be searched."""

    def __cinit__(self):
        self.items = [None] * 8

    cdef Py_ssize_t place(self, Py_ssize_t i) noexcept:
        return (self.head + i) & (len(self.items) - 1)

    cdef object first(self):
        return self.items[self.head] if self.count else None

    cdef int grow(self) except -1:
        cdef list all = self.all()
        all.extend([None] * len(all))
        self.items, self.head = all, 0
        return 0

    cdef int append(self, object item) except -1:
        if self.count == len(self.items):
            self.grow()
        self.items[self.place(self.count)] = item
        self.count += 1
        return 0

    cdef int appendleft(self, object item) except -1:
        if self.count == len(self.items):
            self.grow()
        self.head = self.place(len(self.items) - 1)
        self.items[self.head] = item
        self.count += 1
        return 0

    cdef object popleft(self):
        cdef object item = self.items[self.head]
        self.items[self.head] = None
        self.head = self.place(1)
        self.count -= 1
        return item

    cdef bint remove(self, object item) except -1:
        cdef Py_ssize_t i
        for i in range(self.count):
            if self.items[self.place(i)] is item:
                for i in range(i, self.count - 1):
                    self.items[self.place(i)] = self.items[self.place(i + 1)]
                self.count -= 1
                self.items[self.place(self.count)] = None
                return True
        return False

    cdef bint replace(self, object item, object other) except -1:
        cdef Py_ssize_t i
        for i in range(self.count):
            if self.items[self.place(i)] is item:
                self.items[self.place(i)] = other
                return True
        return False

    cdef list take_all(self):
        """Empty the queue and return its items.

        Items must leave the queue before the caller handles them, because a garbage collection may
        end the connection in the meantime.
        """
        cdef list items = self.all()
        self.items, self.head, self.count = [None] * 8, 0, 0
        return items

    cdef list all(self):
        cdef Py_ssize_t i
        return [self.items[self.place(i)] for i in range(self.count)]


@cython.final
cdef class Served:
    """The number of bytes that the peer has read and written through one queue pair."""

    def __init__(self, qp: QueuePair):
        """Get the device's counters for the queue pair, if the device has them."""
        cdef uintptr_t counts, release
        library = qp.context.library
        counted = library.count_served(qp.pointer)
        if counted is not None:
            counts = int(ffi.cast("uintptr_t", counted))
            release = int(ffi.cast("uintptr_t", library.table.device.release_served))
            self.counts = <const aiordma_served *> counts
            self.release = <void (*)(const aiordma_served *) noexcept nogil> release

    def __dealloc__(self):
        if self.counts != NULL:
            self.release(self.counts)

    @property
    def bytes_read(self) -> int | None:
        """The bytes of completed reads of this side's memory, or None if the device does not count."""
        return None if self.counts == NULL else self.counts.bytes_read

    @property
    def bytes_written(self) -> int | None:
        """The bytes of completed writes to this side's memory, or None if the device does not count."""
        return None if self.counts == NULL else self.counts.bytes_written


cdef class Counts:
    """The counters of a connection: messages, bytes and transfers."""

    def __cinit__(self, *_, **__):
        self.served = []

    cdef int open_rail(self, Served served) except -1:
        self.served.append(served)
        return 0

    cdef int close_rail(self, Served served) except -1:
        if served in self.served:
            self.served.remove(served)
            self.closed_read += served.bytes_read or 0
            self.closed_written += served.bytes_written or 0
        return 0

    @property
    def peer_bytes_read(self) -> int:
        """The bytes of this side's memory that the peer has read."""
        return self.closed_read + sum([it.bytes_read or 0 for it in self.served])

    @property
    def peer_bytes_written(self) -> int:
        """The bytes of this side's memory that the peer has written."""
        return self.closed_written + sum([it.bytes_written or 0 for it in self.served])
