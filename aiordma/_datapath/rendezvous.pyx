# Rendezvous messages that this side offers: their memory is opened to the peer, which reads it, and closed
# when the peer has acknowledged the message.
#
# Each piece of a message has a key of its own.  It is that of a memory window where the device has them,
# since no other queue pair takes it, and the peer's acknowledgement can end it; else of a memory region.

from cpython.bytes cimport PyBytes_AS_STRING
from libc.errno cimport EFAULT, EINVAL, errno
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memcpy

cimport cython

from .frames cimport (
    HEADER,
    IS_WINDOW,
    RendezvousPiece,
    RendezvousRequest,
    htole32,
    next_number,
)
from .memory cimport PoolBlock
from .sends cimport COPIED_BELOW, has_no_holes
from .work_queue cimport IBV_ACCESS_MW_BIND, IBV_ACCESS_REMOTE_READ

from aiordma._native import ffi, fork
from aiordma.verbs._memory.memory_region import is_there, reg_mr
from aiordma.errors import RDMAError, VerbsError

cdef extern from "<endian.h>" nogil:
    uint64_t htole64(uint64_t)


cdef enum:
    SPARE_WINDOWS = 16  # that are kept for the next messages


# ---- the request -----------------------------------------------------------------------------------

cdef uint32_t rendezvous_size(SendFuture message) noexcept:
    return HEADER + sizeof(RendezvousRequest) + message.count() * sizeof(RendezvousPiece)


cdef void write_request(unsigned char *to, SendFuture message, bytes seal) noexcept:
    """Writes what follows the header of an RNDV_RTS frame: the pieces with their keys, and the seal."""
    cdef RendezvousRequest *request = <RendezvousRequest *> to
    cdef RendezvousPiece *described = <RendezvousPiece *> (request + 1)
    cdef Piece piece = message.first
    request.request_id = htole32(message.request_id)
    request.count = htole32(message.count())
    while piece is not None:
        described.address = htole64(<uintptr_t> piece.bytes)
        described.length = htole64(piece.length)
        if piece.window is None:
            described.rkey, described.flags = htole32(piece.mr.rkey), 0
        else:
            described.rkey = htole32(piece.window.next_key())
            described.flags = htole32(IS_WINDOW)
        described += 1
        piece = piece.next
    memcpy(described, PyBytes_AS_STRING(seal), len(seal))


# ---- the memory ------------------------------------------------------------------------------------

# The peer may still read what the windows are bound to: the cycle collector must not clear them.
@cython.no_gc_clear
@cython.final
cdef class RendezvousMemory:
    """Opens the memory of one connection's messages to its peer, and closes it."""

    def __init__(self, memory: Memory):
        cdef uintptr_t deregister = memory.pd.context.library.dereg_mr
        self.pool, self.pd = memory.pool, memory.pd
        self.windows = []
        self.forks = fork.generation()
        self.deregister = <int (*)(ibv_mr *) noexcept nogil> deregister

    cdef int open_message(self, SendFuture message) except -1:
        """Opens the message's memory to the peer, to read, until the acknowledgement."""
        cdef Piece piece = message.first
        try:
            while piece is not None:
                self.open_piece(piece)
                piece = piece.next
        except BaseException:
            self.close_message(message, 0)
            raise
        return 0

    cdef int open_piece(self, Piece piece) except -1:
        """Gives the piece a window on a region that exists or is made for it, or else a region."""
        cdef object owner = piece.source
        if type(owner) is memoryview:
            owner = owner.obj
        if self.pool.has_windows:
            if self.pool.local_dma_mr and has_no_holes(owner):
                piece.region = self.pool.local_dma_mr
            elif isinstance(owner, PoolBlock):
                piece.region = (<PoolBlock> owner).mr
            else:
                try:
                    piece.mr = self.register(piece, owner, IBV_ACCESS_MW_BIND)
                    piece.region = <uintptr_t> piece.mr
                except VerbsError as error:
                    # The kernel takes no window on memory that may only be read.
                    if error.errno != EFAULT:
                        raise
            if piece.region:
                piece.window = self.take_window()
                return 0
        piece.mr = self.register(piece, owner, IBV_ACCESS_REMOTE_READ)
        return 0

    cdef ibv_mr *register(self, Piece piece, object owner, int access) except NULL:
        # By its address: the frames of an error would keep a buffer.
        pointer, _ = reg_mr(
            self.pd, ffi.cast("void *", <uintptr_t> piece.bytes), piece.length, access, None,
            there=is_there(owner),
        )
        cdef uintptr_t address = int(ffi.cast("uintptr_t", pointer))
        return <ibv_mr *> address

    cdef Window take_window(self):
        if self.windows:
            return <Window> self.windows.pop()
        return Window(self.pd.alloc_mw())

    cdef int close_message(self, SendFuture message, uint32_t invalidated_key) noexcept:
        """Ends the peer's access: 0, or the errno value of what could not be closed.

        `invalidated_key` is the key of a window that the peer has ended already; 0: of none.
        """
        cdef Piece piece = message.first
        cdef int failed = self.end_windows(message, invalidated_key), code
        cdef ibv_mr *mr
        while piece is not None:
            mr, piece.mr = piece.mr, NULL
            code = 0
            if mr != NULL and self.forks == fork.generation():
                with nogil:  # where pages are pinned this takes a while
                    code = self.deregister(mr)
            if code:
                failed = errno if code < 0 else code  # providers have it either way
            piece = piece.next
        message.close_payload()
        return failed

    cdef int end_windows(self, SendFuture message, uint32_t invalidated_key) noexcept:
        """Keeps the window that the peer has ended for another message, and closes the others."""
        cdef Piece piece = message.first
        cdef Window window
        cdef int failed = 0
        while piece is not None:
            window, piece.window, piece.region = piece.window, None, 0
            if window is not None:
                if (
                    invalidated_key
                    and invalidated_key == window.mw.rkey
                    and len(self.windows) < SPARE_WINDOWS
                ):
                    self.windows.append(window)
                else:
                    try:
                        window.close()
                    except (RDMAError, OSError) as error:
                        failed = error.errno or EINVAL
            piece = piece.next
        return failed

    cdef int close_spare_windows(self) except -1:
        while self.windows:
            self.windows.pop().close()
        return 0


# ---- what is offered -------------------------------------------------------------------------------

# The peer may still read them, as above.
@cython.no_gc_clear
@cython.final
cdef class Offers:
    """Messages that the peer may read, each until it acknowledges the message."""

    def __init__(self, memory: Memory, most: int, max_pieces: int):
        self.messages, self.memory = {}, RendezvousMemory(memory)
        self.most, self.max_pieces = most, max_pieces

    cdef int join_pieces(self, SendFuture message, uint32_t longest) except -1:
        """Joins pieces that are not worth a registration here and a READ there, or all if their
        request is longer than `longest`."""
        message.join_pieces(COPIED_BELOW)
        if message.count() > self.max_pieces or rendezvous_size(message) > longest:
            message.join_pieces(message.length + 1)
        return 0

    cdef int add(self, SendFuture message) except -1:
        self.latest = message.request_id = next_number(self.latest)
        self.messages[self.latest] = message
        return 0

    def close_windows(self):
        """The connection has ended: the peer reads nothing more.  The queue pair goes after this."""
        for message in self.messages.values():
            self.memory.end_windows(<SendFuture> message, 0)
        self.memory.close_spare_windows()

    cdef int close(self) except -1:
        """The queue pair is gone: closes the memory of the messages that the peer has not read."""
        cdef SendFuture message
        cdef int code = 0
        self.close_windows()
        messages, self.messages = self.messages, {}
        for message in messages.values():
            code = self.memory.close_message(message, 0) or code
        return code
